"""Model directories: against the oracle, against transformers, and spoilt."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import oracles_network as oracle
import published_models as models
import pytest
import tiny_agents as tiny

from bpo_jax.models import architectures
from bpo_jax.models import hugging_face
from bpo_jax.models import lora
from bpo_jax.models import transformer

safetensors_numpy = pytest.importorskip('safetensors.numpy')

every_family = pytest.mark.parametrize('family', models.FAMILIES)


@pytest.fixture
def make(tmp_path):
  """Writes a random model of a family; returns directory, config, params."""

  def _make(family='qwen2', **overrides):
    values = models.config_json(family, **overrides)
    config = architectures.from_json(values)
    params = models.random_params(config)
    models.write(tmp_path / family, values, models.published(params))
    return tmp_path / family, config, params

  return _make


def logits_of(config, params, tokens):
  network = transformer.Transformer(config)
  rows, size = tokens.shape
  positions = np.broadcast_to(np.arange(size), tokens.shape)
  mask = np.broadcast_to(np.tril(np.ones((size, size), bool)),
                         (rows, size, size))
  both = jax.jit(lambda p: network.apply(
      {'params': p}, tokens, positions, mask, method='heads'))
  return np.asarray(both(params)[0])


def random_tokens(*shape):
  return np.random.default_rng(1).integers(models.VOCABULARY, size=shape)


# ---------------------------------------------------------------- loading


@every_family
def test_a_loaded_network_is_that_of_the_oracle(family, make):
  directory, config, params = make(family)
  got, loaded = hugging_face.load(directory)
  assert got == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  tokens = random_tokens(1, 45)  # Beyond the 32 positions of the llama3 row.
  logits = logits_of(got, loaded, tokens)
  expected = oracle.logits(config, params, tokens[0])
  np.testing.assert_allclose(logits[0], expected, atol=1e-4)
  assert np.std(expected) > 0.1


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('num_shards', [1, 3])
@pytest.mark.parametrize('prefix', ['model.', ''])
def test_files_of_every_kind_hold_the_same(dtype, num_shards, prefix, tmp_path):
  values = models.config_json()
  params = models.random_params(architectures.from_json(values))
  models.write(
      tmp_path, values, models.published(params, prefix), num_shards, dtype)
  _, loaded = hugging_face.load(tmp_path)
  rounded = jax.tree.map(
      lambda x: x.astype(jnp.dtype(dtype)).astype('f'), params)
  jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(loaded))


def test_what_older_files_have_besides_is_left_alone(make):
  directory, _, params = make('smollm2')
  tensors = models.published(params)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(4, 'f')
  models.write(directory, models.config_json('smollm2'), tensors)
  _, loaded = hugging_face.load(directory)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_overrides_are_those_the_files_say_nothing_of(make):
  directory, config, params = make()
  got, loaded = hugging_face.load(
      directory, dtype='bfloat16', remat='none', value_head=True)
  assert got == dataclasses.replace(
      config, dtype='bfloat16', remat='none', value_head=True)
  head = loaded.pop('value_head')
  assert head['kernel'].shape == (32, 1) and not head['kernel'].any()
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  with pytest.raises(ValueError, match='override.*dtype.*width'):
    hugging_face.load(directory, width=64)
  with pytest.raises(ValueError, match='lora.init_params'):
    hugging_face.load(directory, lora=transformer.LoraConfig(2, 2))


# ---------------------------------------------------------------- bad files


def spoil_config(directory):
  (directory / 'config.json').unlink()


def spoil_json(directory):
  (directory / 'config.json').write_text('{"model_type": ')


def spoil_weights(directory):
  (directory / 'model.safetensors').unlink()


def cut_header(directory):
  path = directory / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:100])


def cut_data(directory):
  path = directory / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-4])


def write_rubbish(directory):
  (directory / 'model.safetensors').write_bytes(b'PK\x03\x04' * 40)


@pytest.mark.parametrize('spoil, message', [
    (spoil_config, 'config.json: expected a JSON file.*No such'),
    (spoil_json, 'config.json: expected a JSON file'),
    (spoil_weights, 'expected model.safetensors or .* got neither'),
    (cut_header, 'model.safetensors: expected a whole .* got 100 bytes'),
    (cut_data, r'model.safetensors: expected a whole .* of \d+ bytes, got'),
    (write_rubbish, 'model.safetensors: expected a whole .* got 160 bytes'),
])
def test_a_file_that_is_missing_or_cut_is_named(spoil, message, make):
  directory, _, _ = make()
  spoil(directory)
  with pytest.raises(ValueError, match=message):
    hugging_face.load(directory)


def test_a_cut_file_is_told_how_long_it_should_be(make):
  directory, _, _ = make()
  size = (directory / 'model.safetensors').stat().st_size
  cut_data(directory)
  with pytest.raises(ValueError, match=f'of {size} bytes, got {size - 4} byte'):
    hugging_face.load(directory)


K_PROJ = 'model.layers.1.self_attn.k_proj.weight'


@pytest.mark.parametrize('change, message', [
    ({K_PROJ: None}, 'a tensor layers.1.self_attn.k_proj.weight .* got none'),
    ({'lm_head.weight': None}, 'lm_head.weight .*tie_word_embeddings: true'),
    ({K_PROJ: np.ones((16, 31), 'f')},
     r'k_proj.weight: expected shape \(16, 32\) .* got \(16, 31\)'),
    ({K_PROJ: np.ones((16, 32), 'i')}, 'k_proj.weight: .* F32.* got I32'),
    ({'model.layers.2.mlp.up_proj.weight': np.ones((2, 2), 'f')},
     'alone, got layers.2.mlp.up_proj.weight too'),
    ({'score.weight': np.ones((1, 32), 'f')}, 'alone, got score.weight too'),
    ({K_PROJ: np.full((16, 32), np.nan, 'f')},
     'safetensors: .*k_proj.weight: expected finite .* got 512 of 512'),
    ({'model.norm.weight': np.array([np.inf] + [1] * 31, 'f')},
     'safetensors: norm.weight: expected finite numbers, got 1 of 32'),
    ({K_PROJ.removeprefix('model.'): np.ones((16, 32), 'f')},
     'k_proj.weight: expected each tensor once'),
])
@pytest.mark.parametrize('num_shards', [1, 2])
def test_a_wrong_tensor_is_named(change, message, num_shards, make):
  directory, _, params = make()
  tensors = {**models.published(params), **change}
  tensors = {n: x for n, x in tensors.items() if x is not None}
  shutil.rmtree(directory)
  models.write(directory, models.config_json(), tensors)
  # As float32 would hide what a tensor of integers is.
  safetensors_numpy.save_file(tensors, directory / 'model.safetensors')
  with pytest.raises(ValueError, match=f'{directory}.*{message}'):
    hugging_face.load(directory)


@pytest.mark.parametrize('spoil, message', [
    (lambda x: x[:5], r'lm_head.weight: expected shape \(96, 24\)'),
    (lambda x: x + 1e-3, 'lm_head.weight: .*tie_word_embeddings: false')])
def test_tied_logits_are_those_of_the_embedding(spoil, message, make):
  directory, _, params = make('smollm2')
  tensors = models.published(params)
  tensors['lm_head.weight'] = spoil(tensors['model.embed_tokens.weight'])
  models.write(directory, models.config_json('smollm2'), tensors)
  with pytest.raises(ValueError, match=f'safetensors: {message}'):
    hugging_face.load(directory)


def test_a_value_head_that_is_not_finite_is_refused(make, tmp_path):
  directory, _, _ = make()
  safetensors_numpy.save_file(
      {'kernel': np.full((32, 1), np.nan, 'f'), 'bias': np.ones(1, 'f')},
      directory / 'value_head.safetensors')
  with pytest.raises(ValueError, match='head.safetensors: kernel: .* finite'):
    hugging_face.load(directory, value_head=True)


@pytest.mark.parametrize('said, expected', [
    (128, 128), (None, None), ('many', None)])
def test_how_long_a_model_was_made_for(said, expected, make):
  directory, _, _ = make(max_position_embeddings=said)
  assert hugging_face.max_positions(directory) == expected


def test_a_wrong_index_is_told(make, tmp_path):
  _, _, params = make()
  tensors = models.published(params)
  directory = tmp_path / 'sharded'
  models.write(directory, models.config_json(), tensors, num_shards=3)
  index = directory / 'model.safetensors.index.json'
  good = json.loads(index.read_text())
  name = sorted(tensors)[0]
  for weight_map, message in [
      ({**good['weight_map'], 'model.more': 'model-00001-of-00003.safetensors'},
       'expected the tensors that .* lists, got none named model.more'),
      ({**good['weight_map'], name: '../qwen2/model.safetensors'},
       'expected the name of a file'),
      ({**good['weight_map'], name: 'elsewhere.safetensors'},
       'expected all of 4 shards .* none named elsewhere.safetensors'),
      ([], 'weight_map: expected names'),
  ]:
    index.write_text(json.dumps({'weight_map': weight_map}))
    with pytest.raises(ValueError, match=message):
      hugging_face.load(directory)
  index.write_text(json.dumps(good))
  hugging_face.load(directory)
  (directory / 'model-00002-of-00003.safetensors').unlink()
  with pytest.raises(ValueError, match='none named model-00002-of-00003'):
    hugging_face.load(directory)


def test_sizes_that_no_machine_has_cost_no_time(make):
  directory, _, params = make()
  tensors = models.published(params)
  models.write(
      directory, models.config_json(num_hidden_layers=10**9), tensors)
  with pytest.raises(ValueError, match='a tensor layers.2.*got none'):
    hugging_face.load(directory)
  models.write(
      directory, models.config_json(vocab_size=2**31 - 1), tensors)
  with pytest.raises(ValueError, match=r'embed_tokens.*2147483647.*\(96, 32\)'):
    hugging_face.load(directory)


# ---------------------------------------------------------------- saving


@every_family
@pytest.mark.parametrize('shard_bytes', [10**9, 10_000])
def test_what_is_saved_is_loaded_again(family, shard_bytes, make, tmp_path):
  _, config, params = make(family)
  out = tmp_path / 'deep' / 'out'
  hugging_face.save(out, config, params, shard_bytes=shard_bytes)
  assert len(list(out.glob('*.safetensors'))) == 1 or shard_bytes < 10**9
  assert all(p.stat().st_size < 20_000 or shard_bytes > 10_000
             for p in out.glob('*.safetensors'))
  got, loaded = hugging_face.load(out)
  assert got == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert [path.name for path in out.parent.iterdir()] == ['out']


def test_saved_tensors_are_under_their_published_names(make, tmp_path):
  _, config, params = make('llama3')
  hugging_face.save(tmp_path / 'out', config, params)
  saved = safetensors_numpy.load_file(tmp_path / 'out' / 'model.safetensors')
  expected = models.published(params)
  assert saved.keys() == expected.keys()
  jax.tree.map(np.testing.assert_array_equal, saved, expected)


def test_bfloat16_halves_the_file(make, tmp_path):
  _, config, params = make()
  for dtype in ('float32', 'bfloat16'):
    hugging_face.save(tmp_path / dtype, config, params, dtype=dtype)
    values = json.loads((tmp_path / dtype / 'config.json').read_text())
    assert values['torch_dtype'] == dtype
  sizes = [(tmp_path / d / 'model.safetensors').stat().st_size
           for d in ('float32', 'bfloat16')]
  assert sizes[0] > 1.8 * sizes[1]
  _, loaded = hugging_face.load(tmp_path / 'bfloat16')
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype('f'), params)
  jax.tree.map(np.testing.assert_array_equal, loaded, rounded)


@pytest.mark.parametrize('tied', [True, False])
def test_scaled_embeddings_are_saved_as_such(tied, tmp_path):
  config = tiny.model(vocab_size=models.VOCABULARY, tied=tied, width=32).config
  params = models.random_params(config)
  assert config.scale_embeddings
  hugging_face.save(tmp_path / 'out', config, params)
  got, loaded = hugging_face.load(tmp_path / 'out')
  assert not got.scale_embeddings and not got.tied
  tokens = random_tokens(2, 9)
  np.testing.assert_allclose(
      logits_of(got, loaded, tokens), logits_of(config, params, tokens),
      atol=1e-5)


def test_a_value_head_is_kept_in_a_file_of_its_own(make, tmp_path):
  _, config, _ = make()
  config = dataclasses.replace(config, value_head=True)
  params = models.random_params(config)
  hugging_face.save(tmp_path / 'out', config, params)
  got, loaded = hugging_face.load(tmp_path / 'out', value_head=True)
  assert got == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert 'value_head' not in hugging_face.load(tmp_path / 'out')[1]
  safetensors_numpy.save_file(
      {'kernel': np.ones((31, 1), 'f'), 'bias': np.ones(1, 'f')},
      tmp_path / 'out' / 'value_head.safetensors')
  with pytest.raises(ValueError, match=r'kernel: expected shape \(32, 1\)'):
    hugging_face.load(tmp_path / 'out', value_head=True)


def test_tokenizer_and_template_come_from_the_model_it_was(make, tmp_path):
  like, config, params = make()
  files = {'tokenizer.json': '{}', 'tokenizer_config.json': '{"a": 1}',
           'chat_template.jinja': 'x', 'generation_config.json': '{}',
           'additional_chat_templates/tool.jinja': 'y'}
  (like / 'additional_chat_templates').mkdir()
  for name, text in {**files, 'notes.txt': 'z'}.items():
    (like / name).write_text(text)
  values = json.loads((like / 'config.json').read_text())
  (like / 'config.json').write_text(json.dumps(
      {**values, 'eos_token_id': [7, 8], 'rope_scaling': None}))
  hugging_face.save(tmp_path / 'out', config, params, like=like)
  got = {p.relative_to(tmp_path / 'out').as_posix(): p
         for p in (tmp_path / 'out').rglob('*') if p.is_file()}
  assert got.keys() == files.keys() | {'config.json', 'model.safetensors'}
  assert all(got[name].read_text() == text for name, text in files.items())
  written = json.loads(got['config.json'].read_text())
  assert written['eos_token_id'] == [7, 8]
  assert written['max_position_embeddings'] == 128


def test_what_cannot_be_saved_is_told_and_leaves_nothing(make, tmp_path):
  like, config, params = make()
  with_lora = dataclasses.replace(config, lora=transformer.LoraConfig(2, 2))
  adapted = lora.init_params(with_lora, params, jax.random.key(0))
  both = dataclasses.replace(config, qk_norm=True)
  out = tmp_path / 'out'
  for arguments, options, message in [
      ((with_lora, adapted), {}, 'lora.merge'),
      ((config, adapted), {}, 'lora_a: expected shape None .* got'),
      ((config, {**params, 'output': params['output'][:5]}), {}, r'\(5, 32\)'),
      ((config, {**params, 'output': params['output'] * np.nan}), {},
       'params: output: expected finite numbers'),
      ((both, models.random_params(both)), {}, 'qk_norm=True'),
      ((config, params), {'like': tmp_path}, 'expected a JSON file'),
      ((config, params), {'dtype': 'float8'}, 'dtype: expected one of'),
  ]:
    with pytest.raises(ValueError, match=message):
      hugging_face.save(out, *arguments, **options)
    assert not out.exists()
  with pytest.raises(ValueError, match='expected a path that is free'):
    hugging_face.save(like, config, params)
  merged = lora.merge(with_lora, adapted)
  hugging_face.save(out, *merged)
  jax.tree.map(
      np.testing.assert_array_equal, hugging_face.load(out)[1], params)


def test_a_save_that_dies_leaves_nothing(make, tmp_path, monkeypatch):
  _, config, params = make()
  out = tmp_path / 'somewhere' / 'out'

  def die(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(hugging_face, '_copy_kept_files', die)
  with pytest.raises(KeyboardInterrupt):
    hugging_face.save(out, config, params, like=tmp_path / 'qwen2')
  assert not out.parent.exists()


# ---------------------------------------------------------------- parity


def _transformers():
  torch = pytest.importorskip('torch')
  return torch, pytest.importorskip('transformers')


def their_model(family, seed=0):
  """Returns a random model that transformers made, nothing in it 0 or 1."""
  torch, transformers = _transformers()
  values = models.config_json(family)
  config = transformers.AutoConfig.for_model(**values)
  torch.manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  return model


def their_logits(model, tokens):
  torch, _ = _transformers()
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.float().numpy()


@every_family
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shard', ['1GB', '20KB'])
def test_logits_are_those_of_transformers(family, dtype, shard, tmp_path):
  torch, transformers = _transformers()
  their_model(family).to(getattr(torch, dtype)).save_pretrained(
      tmp_path, max_shard_size=shard)
  index = tmp_path / 'model.safetensors.index.json'
  assert index.is_file() == (shard == '20KB')
  # Not the model saved: rounding it rounded its rotary wavelengths too.
  model = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path, dtype=torch.float32)
  config, params = hugging_face.load(tmp_path)
  assert config == architectures.from_json(models.config_json(family))
  for size in (1, 7, 100):
    tokens = random_tokens(2, size)
    expected = their_logits(model, tokens)
    np.testing.assert_allclose(
        logits_of(config, params, tokens), expected, atol=1e-4)
    assert np.std(expected) > 0.1


@every_family
@pytest.mark.parametrize('shard_bytes', [10**9, 20_000])
def test_transformers_loads_what_is_saved(family, shard_bytes, tmp_path):
  _, transformers = _transformers()
  config = architectures.from_json(models.config_json(family))
  params = models.random_params(config)
  hugging_face.save(tmp_path / 'out', config, params, shard_bytes=shard_bytes)
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'out', output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys']
  assert str(model.dtype) == 'torch.float32'
  tokens = random_tokens(2, 100)
  np.testing.assert_allclose(
      their_logits(model, tokens), logits_of(config, params, tokens), atol=1e-4)


def test_transformers_loads_a_policy_trained_from_scratch(tmp_path):
  _, transformers = _transformers()
  config = tiny.model(vocab_size=models.VOCABULARY, value_head=True).config
  params = models.random_params(config)
  hugging_face.save(tmp_path / 'out', config, params)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
  tokens = random_tokens(2, 30)
  np.testing.assert_allclose(
      their_logits(model, tokens), logits_of(config, params, tokens), atol=1e-4)


def test_a_round_trip_through_both_keeps_every_bit(tmp_path):
  their_model('qwen3').save_pretrained(tmp_path / 'theirs')
  config, params = hugging_face.load(tmp_path / 'theirs')
  hugging_face.save(tmp_path / 'ours', config, params)
  theirs, ours = (
      safetensors_numpy.load_file(pathlib.Path(tmp_path, name,
                                               'model.safetensors'))
      for name in ('theirs', 'ours'))
  theirs.pop('lm_head.weight', None)
  assert theirs.keys() == ours.keys()
  jax.tree.map(np.testing.assert_array_equal, theirs, ours)
