"""A language model of a few thousand weights, from its directory and back."""

import json

import chat_templates
import jax
import numpy as np
import pytest
import tiny_runs
import tiny_tokenizers

pytest.importorskip('tokenizers')
pytest.importorskip('safetensors')
pytest.importorskip('jinja2')

from bpo_jax import checkpoint  # noqa: E402
from bpo_jax import tokenizers  # noqa: E402
from bpo_jax.models import hugging_face  # noqa: E402
from bpo_jax.models import lora  # noqa: E402
from bpo_jax.models import transformer  # noqa: E402
from experiments import configs  # noqa: E402
from experiments import evaluate  # noqa: E402
from experiments import export  # noqa: E402
from experiments import train  # noqa: E402

CONFIG = transformer.TransformerConfig(
    vocab_size=320, width=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, mlp_width=24, scale_embeddings=False)


def write_model(folder, seed=0, config=CONFIG):
  """Writes a model directory with random weights; returns it."""
  params = transformer.init_params(config, jax.random.key(seed))
  hugging_face.save(folder, config, params)
  tiny_tokenizers.write(
      folder, eos_token='<|im_end|>', chat_template=chat_templates.CHATML)
  return folder


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return write_model(tmp_path_factory.mktemp('models') / 'tiny')


def config_of(directory, folder, **overrides):
  return tiny_runs.config(folder, **{
      'model': str(directory), 'eval_tasks': 1, 'eval_passes': 1,
      'warm_start_updates': None, 'lora_rank': 2,
      'observation_length': 64, 'max_action_tokens': 40, 'max_turns': 3,
      'system_prompt': 'Play.', 'max_rows': 4, 'updates': 2, **overrides})


def run(config):
  ready = train.set_up(config)
  try:
    return ready, train.run_training(ready)
  finally:
    ready.agent.close()


@pytest.fixture(scope='module')
def done(model, tmp_path_factory):
  """A run of two updates."""
  workdir = tmp_path_factory.mktemp('runs') / 'run'
  # Weights that say little are shaken, so that something is learnt.
  return run(config_of(model, workdir, learning_rate=0.05, entropy_coef=0.1))


def test_two_updates_move_the_adapters_alone(done, model):
  ready, result = done
  assert result['updates'] == 2 and result['tokens'] > 0
  _, base = hugging_face.load(model)
  _, frozen = lora.split(ready.state.params)
  jax.tree.map(np.testing.assert_array_equal, frozen, base)
  trained, _ = lora.split(ready.state.params)
  before, _ = lora.split(ready.reference)
  assert any(jax.tree.leaves(jax.tree.map(
      lambda x, y: bool(np.any(x != y)), trained, before)))


def test_a_checkpoint_holds_adapters_and_no_weights(done):
  ready, _ = done
  folder = ready.workdir / 'checkpoints'
  leaves = checkpoint.find(folder).leaves
  assert any('lora_a' in name for name in leaves)
  assert not any('kernel' in name or 'embedding' in name for name in leaves)


@pytest.mark.slow
def test_a_resumed_run_is_that_which_never_stopped(done, model, tmp_path):
  ready, _ = done
  again = dict(learning_rate=0.05, entropy_coef=0.1, save_every=1)
  first = train.set_up(config_of(model, tmp_path / 'run', **again))
  try:
    next(train.train(first))
    train.save(first)
  finally:
    first.agent.close()
  second, _ = run(config_of(model, tmp_path / 'run', resume=True, **again))
  jax.tree.map(
      np.testing.assert_array_equal, second.state.params, ready.state.params)


def test_adapters_of_other_weights_are_refused(done, tmp_path):
  ready, _ = done
  other = write_model(tmp_path / 'other', seed=1)
  config = configs.EvaluateConfig(
      workdir=str(ready.workdir), model=str(other), tasks=1, passes=1)
  with pytest.raises(ValueError, match='another base model'):
    evaluate.evaluate(config)


@pytest.mark.slow
def test_a_run_is_scored(done, tmp_path):
  ready, _ = done
  out = tmp_path / 'scores.json'
  evaluate.evaluate(configs.EvaluateConfig(
      workdir=str(ready.workdir), tasks=1, passes=1, out=str(out)))
  assert json.loads(out.read_text())['update'] == 2


def test_what_is_exported_says_what_the_run_says(done, model, tmp_path):
  ready, _ = done
  out = tmp_path / 'exported'
  export.export(configs.ExportConfig(
      workdir=str(ready.workdir), out=str(out)))
  config, params = hugging_face.load(out)
  _, expected = lora.merge(ready.agent.model.config, ready.state.params)
  assert config.lora is None
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params,
      expected)
  assert tokenizers.load(out).to_dict() == tokenizers.load(model).to_dict()
  with pytest.raises(ValueError):  # It is taken.
    export.export(configs.ExportConfig(
        workdir=str(ready.workdir), out=str(out)))


def test_a_small_policy_is_not_exported(tmp_path):
  ready = train.set_up(tiny_runs.config(tmp_path, updates=1))
  try:
    train.save(ready)
  finally:
    ready.agent.close()
  with pytest.raises(ValueError, match='expected a run with --model'):
    export.export(configs.ExportConfig(
        workdir=str(ready.workdir), out=str(tmp_path / 'out')))


@pytest.mark.parametrize('overrides, message', [
    ({'lora_targets': 'querry'}, 'did you mean query'),
    ({'observation_length': 4}, 'raise --observation_length'),
    ({'mesh': 'data:1,model:1', 'lora_rank': -1}, 'lora_rank'),
    ({'model': '/nowhere/at/all'}, 'config.json')])
def test_what_is_wrong_is_told_before_anything_runs(
    model, tmp_path, overrides, message):
  with pytest.raises((ValueError, OSError), match=message):
    train.set_up(config_of(model, tmp_path / 'run', **overrides))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
  small = transformer.TransformerConfig(**{
      **CONFIG.__dict__, 'vocab_size': 64})
  model = write_model(tmp_path / 'small', config=small)
  with pytest.raises(ValueError, match='expected ids below 64'):
    train.set_up(config_of(model, tmp_path / 'run'))
