"""A language model of a few thousand weights, from its directory and back."""

import dataclasses
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import chat_templates
import jax
import numpy as np
import pytest
import tiny_agents
import tiny_runs
import tiny_tokenizers

pytest.importorskip('tokenizers')
pytest.importorskip('safetensors')
pytest.importorskip('jinja2')

from bpo_jax import checkpoint  # noqa: E402
from bpo_jax import sampling  # noqa: E402
from bpo_jax import tokenizers  # noqa: E402
from bpo_jax.models import hugging_face  # noqa: E402
from bpo_jax.models import lora  # noqa: E402
from bpo_jax.models import transformer  # noqa: E402
from experiments import assembly  # noqa: E402
from experiments import configs  # noqa: E402
from experiments import evaluate  # noqa: E402
from experiments import export  # noqa: E402
from experiments import language_models  # noqa: E402
from experiments import train  # noqa: E402
from experiments import warm_start  # noqa: E402

_TESTS = pathlib.Path(__file__).resolve().parent

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
  with pytest.raises(ValueError, match='another base model'):
    evaluate.evaluate(dataclasses.replace(config, warm_start=True))


def saved_run(model, folder, extra=(), **overrides):
  """Sets a run up, saves it with more `extra` and returns its config."""
  config = config_of(model, folder, **overrides)
  ready = train.set_up(config)
  ready.origin = {**ready.origin, **dict(extra)}
  try:
    train.save(ready)
  finally:
    ready.agent.close()
  return dataclasses.replace(config, resume=True)


def set_up(config, **overrides):
  ready = train.set_up(dataclasses.replace(config, **overrides))
  ready.agent.close()
  return ready


@pytest.mark.parametrize('lora_rank', [0, 2])
def test_a_run_does_not_go_on_from_another_model(lora_rank, model, tmp_path):
  config = saved_run(model, tmp_path, lora_rank=lora_rank)
  moved = shutil.copytree(model, tmp_path / 'moved')
  set_up(config, model=str(moved), updates=3)
  kept = checkpoint.read_config(tmp_path / 'run' / 'checkpoints')
  assert kept['model'] == str(moved) and kept['updates'] == 3
  other = write_model(tmp_path / 'other', seed=1)
  with pytest.raises(ValueError, match=f'another base model: .* in {other}'):
    set_up(config, model=str(other))
  # A run that is refused leaves all as it was.
  assert checkpoint.read_config(tmp_path / 'run' / 'checkpoints') == kept
  (moved / 'tokenizer_config.json').write_text(json.dumps({
      'eos_token': '<|im_end|>', 'chat_template': chat_templates.SMOLLM2}))
  with pytest.raises(ValueError, match=f'{moved}.*another chat template'):
    set_up(config, model=str(moved))
  with pytest.raises(ValueError, match='another chat template'):
    evaluate.evaluate(configs.EvaluateConfig(
        workdir=str(tmp_path / 'run'), tasks=1, warm_start=True))


def test_weights_that_are_not_finite_are_refused_at_once(tmp_path):
  model = write_model(tmp_path / 'tiny')
  path = model / 'model.safetensors'
  data = bytearray(path.read_bytes())
  data[-4:] = b'\xff' * 4
  path.write_bytes(data)
  with pytest.raises(ValueError, match=f'{path}: .*expected finite numbers'):
    train.set_up(config_of(model, tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_checkpoints_that_say_less_are_read(model, tmp_path):
  nothing = {'base': language_models.fingerprint({}), 'chat_template': None}
  set_up(saved_run(model, tmp_path, nothing, lora_rank=0))


def test_what_a_fingerprint_tells(model):
  _, base = hugging_face.load(model)
  config = dataclasses.replace(CONFIG, lora=transformer.LoraConfig(2, 2.0))
  adapted = lora.init_params(config, base, jax.random.key(0))
  own = language_models.fingerprint(base)
  assert language_models.fingerprint(adapted) == own
  shaken = jax.tree.map(lambda x: x + 1e-6, base)
  assert language_models.fingerprint(shaken) != own


def test_episodes_longer_than_the_model_was_made_for_are_told(
    model, tmp_path, caplog):
  short = shutil.copytree(model, tmp_path / 'short')
  values = json.loads((short / 'config.json').read_text())
  for most, count in ((10_000, 0), (100, 1)):
    (short / 'config.json').write_text(json.dumps(
        {**values, 'max_position_embeddings': most}))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      set_up(config_of(short, tmp_path / str(most)))
    told = [record.getMessage() for record in caplog.records
            if 'max_position_embeddings is 100, but' in record.getMessage()]
    assert len(told) == count


@pytest.mark.parametrize('make', [
    lambda folder: folder, lambda folder: folder / 'file',
    lambda folder: folder / 'file' / 'sub', lambda folder: '/proc/x'])
def test_where_nothing_can_be_exported_is_told_first(make, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='--out: .*expected a path'):
    export.export(configs.ExportConfig(
        workdir=str(tmp_path / 'no run'), out=str(make(tmp_path))))
  assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.slow
def test_a_run_is_scored(done, tmp_path):
  ready, _ = done
  out = tmp_path / 'scores.json'
  evaluate.evaluate(configs.EvaluateConfig(
      workdir=str(ready.workdir), tasks=1, passes=1, out=str(out)))
  assert json.loads(out.read_text())['update'] == 2


@pytest.mark.parametrize('arguments', [(), ('--dtype=bfloat16',)])
def test_the_binary_exports(arguments, done, tmp_path, capsys):
  ready, _ = done
  call = lambda: tiny_runs.call(
      export, configs.ExportConfig, f'--workdir={ready.workdir}',
      f'--out={tmp_path / "out"}', *arguments)
  assert call() == 0
  assert f'update 2 of {ready.workdir} is in' in capsys.readouterr().out
  config, _ = hugging_face.load(tmp_path / 'out')
  assert config.vocab_size == CONFIG.vocab_size
  assert call() == 2  # It is taken.
  error = capsys.readouterr().err
  assert error.startswith('error: --out: ') and error.count('\n') == 1


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')
@pytest.mark.parametrize('owner, part', [
    (assembly, 'init_params'), (checkpoint, 'restore'), (lora, 'merge')])
def test_want_of_memory_is_one_line(
    owner, part, done, monkeypatch, tmp_path, capsys):
  ready, _ = done
  binaries = {
      train: (configs.TrainConfig, '--resume', *tiny_runs.arguments(
          ready.config), 'a smaller network'),
      evaluate: (configs.EvaluateConfig, f'--workdir={ready.workdir}',
                 'JAX_PLATFORMS=cpu'),
      export: (configs.ExportConfig, f'--workdir={ready.workdir}',
               f'--out={tmp_path / "out"}', 'JAX_PLATFORMS=cpu')}
  monkeypatch.setattr(owner, part, tiny_agents.exhaust)
  for binary in [export] if owner is lora else binaries:
    config_class, *arguments, advice = binaries[binary]
    assert tiny_runs.call(binary, config_class, *arguments) == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith(
        'error: out of memory on the device: the parameters and their copies.')
    assert advice in told, told


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


@pytest.fixture
def few_games(monkeypatch):
  """Lets the searcher look at few games, which is quick."""
  monkeypatch.setattr(warm_start, '_FITTED_GAMES', 8)


def played(agent, expert, tasks):
  """What the searcher does in `demonstrate`, its won episodes alone."""
  rng = np.random.default_rng(0)
  episodes = [expert.play(agent.environment, task, rng, 30) for task in tasks]
  return [(turns, last) for turns, last in episodes if last.reward > 0]


def said_in(agent, turns):
  """The conversation of an episode, up to its last reply."""
  messages = [{'role': 'system', 'content': agent.phrasebook.system}]
  for timestep, command in turns:
    told, = agent.phrasebook.prompt(timestep)
    messages += [{'role': 'user', 'content': told},
                 {'role': 'assistant', 'content': command}]
  return messages


@pytest.mark.parametrize('room', ['enough', 'no end', 'too little'])
@pytest.mark.parametrize('constrained', [True, False])
def test_a_demonstration_is_the_conversation_rendered_whole(
    constrained, room, model, few_games, tmp_path):
  sizes = dict(observation_length=1024, constrained=constrained, max_turns=30)
  wide = assembly.make_agent(config_of(
      model, tmp_path, max_action_tokens=64, **sizes))
  expert = warm_start.make_expert(wide, 0.0)
  tasks = wide.environment.tasks('train')[:3]
  episodes = played(wide, expert, tasks)
  longest = max(len(wide.tokenizer.encode(command))
                for turns, _ in episodes for _, command in turns)
  sizes['max_action_tokens'] = {
      'enough': 64, 'no end': longest, 'too little': longest - 1}[room]
  agent = assembly.make_agent(config_of(model, tmp_path, **sizes))
  show = lambda: warm_start.demonstrate(
      agent, expert, tasks, np.random.default_rng(0), 30)
  if constrained and room != 'enough':  # It has no such row in its table.
    with pytest.raises(ValueError, match='raise --max_action_tokens'):
      show()
    return
  tree = show()
  if room == 'too little':  # What the policy cannot say is not imitated.
    assert tree is None or len(tree.parents) < len(episodes)
    return
  tree.validate()
  assert len(tree.parents) == len(episodes) > 0
  codec, sampler = agent.batched.codec, agent.sampler
  for b, (turns, _) in enumerate(episodes):
    leaf, = tiny_agents.leaves(tree, b)
    ids = tiny_agents.path_tokens(tree, b, leaf)
    assert not agent.language_model.turns.verify(said_in(agent, turns), ids)
    for node, (timestep, _) in zip(
        tiny_agents.path(tree, b, leaf)[1:], turns, strict=True):
      count = int(tree.action_mask[b, node].sum())
      drawn = np.zeros((1, sampler.action_length), np.int32)
      drawn[0, :count] = tree.tokens[b, node, :count]
      commands = codec.encode_commands(timestep.available)[None]
      goes_on = [
          bool(sampling.is_unfinished(sampler, commands, drawn, step)[0])
          for step in range(1, count + 1)]
      assert all(goes_on[:-1])
      assert not goes_on[-1] or count == sampler.action_length


@pytest.mark.parametrize('constrained', [True, False])
def test_a_warm_start_moves_the_adapters_alone(
    constrained, model, few_games, tmp_path):
  config = config_of(
      model, tmp_path, warm_start_updates=2, warm_start_batch=1, max_turns=20,
      max_action_tokens=64, constrained=constrained)
  ready = set_up(config)
  _, base = hugging_face.load(model)
  trained, frozen = lora.split(ready.reference)
  jax.tree.map(np.testing.assert_array_equal, frozen, base)
  start, _ = lora.split(assembly.init_params(config, ready.agent))
  assert all(jax.tree.leaves(jax.tree.map(
      lambda x, y: bool(np.any(x != y)), trained, start)))
  again = set_up(config, resume=True, updates=3)
  jax.tree.map(
      np.testing.assert_array_equal, again.reference, ready.reference)


def die(*args):
  raise RuntimeError('killed')


def learn(agent, params, config, progress):
  """Stands for `warm_start.train`: what is learnt depends on the weights."""
  shift = params['embedding']['embedding'].sum()
  return jax.tree.map(lambda x: x + shift, params)


def dead_run(model, folder, monkeypatch):
  """The config of a run that died when its warm start was made."""
  config = config_of(model, folder, warm_start_updates=1)
  monkeypatch.setattr(warm_start, 'train', learn)
  with monkeypatch.context() as patch, pytest.raises(RuntimeError):
    patch.setattr(assembly, 'init_state', die)
    train.set_up(config)
  return config


def test_a_warm_start_of_another_model_is_not_taken_up(
    model, monkeypatch, tmp_path):
  config = dead_run(model, tmp_path, monkeypatch)
  folder = tmp_path / 'run'
  before = checkpoint.read_config(folder / 'checkpoints')
  other = write_model(tmp_path / 'other', seed=1)
  with pytest.raises(
      ValueError, match=f'{folder}/warm_start is .*another base model'):
    set_up(config, resume=True, model=str(other))
  assert checkpoint.read_config(folder / 'checkpoints') == before
  with pytest.raises(ValueError, match='another base model'):
    evaluate.evaluate(configs.EvaluateConfig(
        workdir=str(folder), model=str(other), tasks=1, warm_start=True))
  ready = set_up(config, model=str(other))  # It begins anew.
  start = assembly.init_params(ready.config, ready.agent)
  wanted, _ = lora.split(learn(None, start, None, None))
  jax.tree.map(
      np.testing.assert_array_equal, lora.split(ready.reference)[0], wanted)


def test_another_model_is_refused_before_it_gets_a_warm_start(
    model, monkeypatch, tmp_path):
  monkeypatch.setattr(warm_start, 'train', learn)
  config = saved_run(model, tmp_path, warm_start_updates=1)
  monkeypatch.setattr(warm_start, 'train', die)  # Is not called again.
  shutil.rmtree(tmp_path / 'run' / warm_start.FOLDER)
  other = write_model(tmp_path / 'other', seed=1)
  with pytest.raises(ValueError, match='another base model'):
    set_up(config, model=str(other))


def test_a_warm_start_of_the_same_model_is_taken_up(
    model, monkeypatch, tmp_path):
  config = dead_run(model, tmp_path, monkeypatch)
  monkeypatch.setattr(warm_start, 'train', die)  # Is not called again.
  set_up(config, resume=True)
  moved = shutil.copytree(model, tmp_path / 'moved')
  set_up(config, resume=True, model=f'{moved}/', remat='none')


def test_a_vocabulary_that_is_no_whole_words_is_refused(tmp_path):
  odd = dataclasses.replace(CONFIG, vocab_size=321)
  directory = write_model(tmp_path / 'odd', config=odd)
  with pytest.raises(ValueError, match=(
      'odd/config.json: vocab_size: expected a multiple of 32.*got 321'
      '.*--constrained=false')):
    set_up(config_of(directory, tmp_path))
  assert not (tmp_path / 'run').exists()
  set_up(config_of(directory, tmp_path, constrained=False))


_ON_HOST = '''
import sys
import jax
import run_language_model_test as tests
host, *_, other = jax.devices()
jax.config.update('jax_default_device', other)  # As an accelerator would be.
loaded, placed = [], lambda x: {d for leaf in jax.tree.leaves(x)
                                for d in leaf.devices()}
make = tests.assembly.init_params
tests.assembly.init_params = lambda *args: loaded.append(make(*args)) or (
    loaded[-1])
tests.warm_start._FITTED_GAMES = 8
sizes = dict(warm_start_updates=1, warm_start_batch=1, max_turns=20,
             max_action_tokens=64, max_rows=4)
model, folder = sys.argv[1], tests.pathlib.Path(sys.argv[2])
run = lambda name, **more: tests.set_up(
    tests.config_of(model, folder / name, **sizes, **more))
alone, meshed = run('alone'), run(
    'meshed', mesh='data:2,model:1', cache_dir=str(folder / 'second'))
assert placed(loaded[0]) == placed(alone.reference) == {other}
assert placed(loaded[1]) == {host}
assert placed(meshed.reference) == set(jax.devices()[:2])
jax.tree.map(tests.np.testing.assert_array_equal,
             alone.reference, meshed.reference)
'''


@pytest.mark.slow
def test_what_is_to_go_on_a_mesh_is_loaded_on_the_host(model, tmp_path):
  paths = os.pathsep.join([str(_TESTS.parent), str(_TESTS)])
  done = subprocess.run(
      [sys.executable, '-c', _ON_HOST, str(model), str(tmp_path)], check=False,
      capture_output=True, text=True, env={
          **os.environ, 'PYTHONPATH': paths, 'JAX_PLATFORMS': 'cpu',
          'XLA_FLAGS': '--xla_force_host_platform_device_count=4'})
  assert done.returncode == 0, done.stderr[-3000:]


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
    ({'lora_targets': 'querry'}, '--lora_targets: .*did you mean query'),
    ({'model': ' '}, 'model: expected some text'),
    ({'chat_date': 'foo'}, "--chat_date: .* got 'foo'"),
    ({'observation_length': 4}, 'raise --observation_length'),
    ({'mesh': 'data:1,model:1', 'lora_rank': -1}, 'lora_rank'),
    ({'model': '/nowhere/at/all'}, 'config.json')])
def test_what_is_wrong_is_told_before_anything_runs(
    model, tmp_path, overrides, message):
  with pytest.raises((ValueError, OSError), match=message):
    train.set_up(config_of(model, tmp_path / 'run', **overrides))


_DATED = "{{ strftime_now('%d') }}" + chat_templates.CHATML
_TRIMMED = chat_templates.CHATML.replace("['content']", "['content'] | trim")


@pytest.mark.parametrize('template, overrides, message', [
    (chat_templates.INSTRUCT, {}, 'no system message. .*pass --system_prompt='),
    ("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}"
     '{% endif %}' + chat_templates.CHATML, {'system_prompt': None},
     'demands a system message. .*--system_prompt=TEXT'),
    (_DATED, {}, '--chat_date=2024-07-26'),
    (_TRIMMED, {}, '--altered_replies=keep')])
def test_what_a_template_needs_is_told_by_its_flag(
    template, overrides, message, tmp_path):
  model = write_model(tmp_path / 'tiny')
  (model / 'chat_template.jinja').write_text(template)
  with pytest.raises(ValueError, match=f'{model}.*{message}'):
    train.set_up(config_of(model, tmp_path / 'run', **overrides))
  assert not (tmp_path / 'run').exists()


def test_a_tokenizer_that_takes_text_for_special_is_named(
    model, monkeypatch, tmp_path):
  def of(*_, **__):
    raise ValueError("the tokenizer takes '<|im_end|>' in a text")

  monkeypatch.setattr(language_models.chat.Turns, 'of', of)
  with pytest.raises(ValueError, match=f'{model}: the tokenizer takes'):
    train.set_up(config_of(model, tmp_path / 'run'))


def test_a_gguf_file_is_one_in_capitals_too(tmp_path):
  pytest.importorskip('gguf')
  (tmp_path / 'A.GGUF').write_bytes(b'PK' * 20)
  with pytest.raises(ValueError, match='A.GGUF: expected a GGUF file'):
    train.set_up(config_of(tmp_path / 'A.GGUF', tmp_path / 'run'))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
  small = transformer.TransformerConfig(**{
      **CONFIG.__dict__, 'vocab_size': 64})
  model = write_model(tmp_path / 'small', config=small)
  with pytest.raises(ValueError, match='expected ids below 64'):
    train.set_up(config_of(model, tmp_path / 'run'))
