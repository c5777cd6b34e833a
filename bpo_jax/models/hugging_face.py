"""Hugging Face directories: config.json and safetensors, read and written.

Neither transformers nor torch is needed, and nothing of a directory is ever
run: sizes and tensors are all that is read. Everything is checked against the
headers of the files before the first tensor is, so that a wrong directory costs
no time.

References: the safetensors format, and the names of tensors, as transformers
saves Llama, Qwen2 and Qwen3.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import checks
from bpo_jax.models import architectures
from bpo_jax.models import directories
from bpo_jax.models import transformer
from bpo_jax.tokenizers import hugging_face as tokenizer_files

_CONFIG = 'config.json'
_WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_VALUE_HEAD = 'value_head.safetensors'  # Ours: transformers knows no such file.
_SHARD_BYTES = 2_000_000_000
_MAX_NAMED = 5  # Tensors that an error spells out.
_OVERRIDES = ('dtype', 'remat', 'value_head')
_DTYPES = ('F32', 'BF16', 'F16')
# What a new config.json takes over from that of the model it was made from.
_KEPT_KEYS = (
    'bos_token_id', 'eos_token_id', 'pad_token_id', 'max_position_embeddings')
_KEPT_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'tokenizer.model', 'vocab.json',
    'merges.txt', 'special_tokens_map.json', 'added_tokens.json',
    'chat_template.jinja', 'chat_template.json',
    'additional_chat_templates/*.jinja', 'generation_config.json')

_LM_HEAD = 'lm_head.weight'
# Where our parameters are -> what the files call them.
_NAMES = {
    ('embedding', 'embedding'): 'embed_tokens.weight',
    ('final_norm', 'scale'): 'norm.weight',
    ('output',): _LM_HEAD,
}
_BLOCK_NAMES = {
    ('attention_norm', 'scale'): 'input_layernorm.weight',
    ('mlp_norm', 'scale'): 'post_attention_layernorm.weight',
    ('attention', 'query_norm', 'scale'): 'self_attn.q_norm.weight',
    ('attention', 'key_norm', 'scale'): 'self_attn.k_norm.weight',
    ('attention', 'query', 'kernel'): 'self_attn.q_proj.weight',
    ('attention', 'query', 'bias'): 'self_attn.q_proj.bias',
    ('attention', 'key', 'kernel'): 'self_attn.k_proj.weight',
    ('attention', 'key', 'bias'): 'self_attn.k_proj.bias',
    ('attention', 'value', 'kernel'): 'self_attn.v_proj.weight',
    ('attention', 'value', 'bias'): 'self_attn.v_proj.bias',
    ('attention', 'out', 'kernel'): 'self_attn.o_proj.weight',
    ('gate', 'kernel'): 'mlp.gate_proj.weight',
    ('up', 'kernel'): 'mlp.up_proj.weight',
    ('down', 'kernel'): 'mlp.down_proj.weight',
}


class Tensor(NamedTuple):
  """A tensor of a file that is to be written, not made yet."""

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]  # float32


class _Leaf(NamedTuple):
  """One of our parameters, and the tensors that hold it."""

  path: tuple[str, ...]
  shape: tuple[int, ...]
  num_layers: int | None  # None for one that is not of the blocks.

  @property
  def transposed(self) -> bool:
    """Whether the files have it as [out, in]."""
    return self.path[-1] == 'kernel'

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    shape = self.shape if self.num_layers is None else self.shape[1:]
    return shape[::-1] if self.transposed else shape

  def names(self) -> Iterator[str]:
    """Yields the name of each layer's tensor, without the prefix "model."."""
    if self.num_layers is None:
      yield _NAMES[self.path]
      return
    for layer in range(self.num_layers):
      yield f'layers.{layer}.{_BLOCK_NAMES[self.path[1:]]}'


def _leaves(config: transformer.TransformerConfig) -> list[_Leaf]:
  """Returns the parameters of a network that the files of a model hold."""
  config = dataclasses.replace(config, value_head=False)
  shapes = jax.eval_shape(
      lambda: transformer.init_params(config, jax.random.key(0)))
  return [
      _Leaf(path, leaf.shape,
            config.num_layers if path[0] == 'blocks' else None)
      for path, leaf in traverse_util.flatten_dict(shapes).items()
  ]


def iterate_shapes(
    config: transformer.TransformerConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Yields the name and the shape of every tensor in the files of a model."""
  for leaf in _leaves(config):
    for name in leaf.names():
      yield _whole_name(name), leaf.tensor_shape


def _whole_name(name: str) -> str:
  return name if name == _LM_HEAD else f'model.{name}'


# ---------------------------------------------------------------- loading


def load(
    directory: str | os.PathLike[str], **overrides: Any
) -> tuple[transformer.TransformerConfig, dict]:
  """Reads a model as transformers saves it.

  Layers are stacked and matrices transposed tensor by tensor: little more than
  one copy of the parameters is in memory at once. They come to rest on the
  default device. For a mesh, load under `jax.default_device` of a CPU and place
  them after.

  Args:
    directory: holds config.json, and model.safetensors or its shards with
      model.safetensors.index.json. Names may lack the prefix "model.".
    **overrides: fields of the TransformerConfig that the directory says nothing
      of: dtype, remat, value_head. A value head is read from where `save` puts
      it, and else is zero.

  Returns:
    The config, and the parameters in float32 whatever the files have.

  Raises:
    ValueError: if a file is missing, cut short or no such file; if the
      architecture is not one we have; if a tensor is missing, unexpected, there
      twice, of another shape or not finite.
  """
  directory = pathlib.Path(directory)
  config = read_config(directory, **overrides)
  leaves = _leaves(config)
  with contextlib.ExitStack() as stack:
    tensors = _open_all(directory, stack)
    _check_tensors(directory, config, leaves, tensors)
    head = _read_value_head(directory, config)
    flat = {leaf.path: _read_leaf(leaf, tensors) for leaf in leaves}
    if config.tied and _LM_HEAD in tensors:
      _check_tied(flat['embedding', 'embedding'], *tensors[_LM_HEAD])
  params = traverse_util.unflatten_dict(flat)
  return config, {**params, 'value_head': head} if head else params


def read_config(
    directory: str | os.PathLike[str], **overrides: Any
) -> transformer.TransformerConfig:
  """Returns the config of a model directory; see `load`."""
  path = pathlib.Path(directory, _CONFIG)
  for name in overrides:
    if name == 'lora':
      raise ValueError(
          'lora: expected none, for the files hold no adapters; give the'
          ' parameters some with lora.init_params')
    checks.one_of('override', name, _OVERRIDES)
  config = architectures.from_json(tokenizer_files.read_json(path), str(path))
  return dataclasses.replace(config, **overrides)


def max_positions(directory: str | os.PathLike[str]) -> int | None:
  """Returns how many tokens a model was made for; None if it does not say."""
  values = tokenizer_files.read_json(pathlib.Path(directory, _CONFIG))
  found = values.get('max_position_embeddings')
  return found if type(found) is int else None


def _open_all(directory, stack) -> dict[str, tuple[pathlib.Path, Any]]:
  """Returns the file and the unread slice of every tensor, without "model."."""
  tensors = {}
  for path, listed in _shards(directory).items():
    file = stack.enter_context(_open(path))
    names = set(file.keys())
    if listed - names:
      raise ValueError(
          f'{path}: expected the tensors that {_INDEX} lists, got none named'
          f' {_some(listed - names)}')
    for name in sorted(names):
      short = name.removeprefix('model.')
      if short in tensors:
        raise ValueError(
            f'{path}: {name}: expected each tensor once, with or without the'
            f' prefix "model.", got another in {tensors[short][0].name}')
      tensors[short] = path, file.get_slice(name)
  return tensors


def _shards(directory: pathlib.Path) -> dict[pathlib.Path, set[str]]:
  """Returns each file of weights, and the names that the index gives it."""
  index = directory / _INDEX
  if not index.is_file():
    if not (directory / _WEIGHTS).is_file():
      raise ValueError(
          f'{directory}: expected {_WEIGHTS} or {_INDEX}, got neither; weights'
          ' in other formats (.bin, .pth) are not read')
    return {directory / _WEIGHTS: set()}
  weight_map = tokenizer_files.read_json(index).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(
        f'{index}: weight_map: expected names and files, got {weight_map!r}')
  shards = {}
  for name, file in weight_map.items():
    # A name with a folder in it could lead out of the directory.
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise ValueError(
          f'{index}: {name}: expected the name of a file, got {file!r}')
    shards.setdefault(directory / file, set()).add(name)
  missing = {path.name for path in shards if not path.is_file()}
  if missing:
    raise ValueError(
        f'{index}: expected all of {len(shards)} shards in {directory}, got'
        f' none named {_some(missing)}')
  return shards


def _open(path: pathlib.Path):
  safetensors = _safetensors()
  try:
    return safetensors.safe_open(path, framework='numpy')
  except safetensors.SafetensorError as error:
    raise ValueError(
        f'{path}: expected a whole safetensors file{_promised(path)}, got'
        f' {path.stat().st_size} bytes ({error}); download it again'
    ) from error


def _promised(path: pathlib.Path) -> str:
  """Returns how long a file's own header says it is, if it can be read."""
  try:
    with path.open('rb') as file:
      size = int.from_bytes(file.read(8), 'little')
      if size > path.stat().st_size:
        return f' of more than {size} bytes'
      header = json.loads(file.read(size))
    header.pop('__metadata__', None)
    end = max(tensor['data_offsets'][1] for tensor in header.values())
    return f' of {8 + size + end} bytes'
  except (ValueError, TypeError, KeyError, IndexError, AttributeError):
    return ''


def _safetensors():
  try:
    # pylint: disable=import-outside-toplevel
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise ImportError(
        'model directories need the extra "hf": pip install "bpo-jax[hf]"'
    ) from error
  return safetensors


def _some(names: set[str]) -> str:
  shown = sorted(names)[:_MAX_NAMED]
  more = len(names) - len(shown)
  return ', '.join(shown) + (f' and {more} more' if more else '')


def _check_tensors(directory, config, leaves, tensors):
  """Raises ValueError unless the files hold what the network has, no more."""
  for leaf in leaves:
    for name in leaf.names():
      if name not in tensors:
        hint = ' (or tie_word_embeddings: true)' if name == _LM_HEAD else ''
        raise ValueError(
            f'{directory}: expected a tensor {name} as {_CONFIG} has it{hint},'
            f' got none among {len(tensors)}')
      _check_tensor(name, leaf.tensor_shape, *tensors[name])
  known = {name for leaf in leaves for name in leaf.names()}
  if config.tied:
    known.add(_LM_HEAD)  # A second copy of the embedding.
    if _LM_HEAD in tensors:
      shape = config.vocab_size, config.width
      _check_tensor(_LM_HEAD, shape, *tensors[_LM_HEAD])
  # Older files keep the wavelengths of RoPE, which follow from the config.
  other = {name for name in tensors
           if name not in known and not name.endswith('rotary_emb.inv_freq')}
  if other:
    path = tensors[min(other)][0]
    raise ValueError(
        f'{path}: expected the tensors of the network in {_CONFIG} alone, got'
        f' {_some(other)} too')


def _check_tensor(name, shape, path, tensor):
  got = tuple(tensor.get_shape())
  if got != shape:
    raise ValueError(
        f'{path}: {name}: expected shape {shape} as {_CONFIG} has it, got'
        f' {got}')
  if tensor.get_dtype() not in _DTYPES:
    raise ValueError(
        f'{path}: {name}: expected one of {", ".join(_DTYPES)}, got'
        f' {tensor.get_dtype()}')


def _read_leaf(leaf: _Leaf, tensors) -> jax.Array:
  """Returns a parameter in float32, its layers stacked."""
  out = np.empty(leaf.shape, np.float32)
  layers = [out] if leaf.num_layers is None else out
  for name, layer in zip(leaf.names(), layers):
    path, stored = tensors[name]
    tensor = stored[:].astype(np.float32, copy=False)
    check_finite(f'{path}: {name}', tensor)
    layer[...] = tensor.T if leaf.transposed else tensor
  return jnp.asarray(out)


def check_finite(name: str, tensor: np.ndarray) -> None:
  """Raises ValueError if a tensor has a NaN or an infinity in it."""
  bad = tensor.size - np.count_nonzero(np.isfinite(tensor))
  if bad:
    raise ValueError(
        f'{name}: expected finite numbers, got {bad} of {tensor.size} that are'
        ' not; a run that diverged, or a damaged file, has such weights')


def _check_tied(embedding, path, stored) -> None:
  """Raises ValueError unless the logits' own matrix is the embedding."""
  if not np.array_equal(stored[:].astype(np.float32), embedding):
    raise ValueError(
        f'{path}: {_LM_HEAD}: expected the values of the embedding, for'
        f' {_CONFIG} ties the two, got others; set tie_word_embeddings: false'
        ' there if it is a matrix of its own, or take the tensor out')


def _read_value_head(directory, config) -> dict[str, jax.Array]:
  """Returns the value head, {} where the config has none."""
  if not config.value_head:
    return {}
  head = {'kernel': np.zeros((config.width, 1), np.float32),
          'bias': np.zeros(1, np.float32)}
  path = directory / _VALUE_HEAD
  if path.is_file():
    with _open(path) as file:
      for name, zeros in head.items():
        if name not in file.keys():
          raise ValueError(f'{path}: expected a tensor {name}, got none')
        _check_tensor(name, zeros.shape, path, file.get_slice(name))
        head[name] = file.get_tensor(name).astype(np.float32)
        check_finite(f'{path}: {name}', head[name])
  return {name: jnp.asarray(leaf) for name, leaf in head.items()}


# ---------------------------------------------------------------- saving


def save(
    directory: str | os.PathLike[str],
    config: transformer.TransformerConfig,
    params: dict,
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: str = 'float32',
    shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes a directory that transformers loads, all of it or nothing.

  Embeddings that the network scales are written scaled, and untied from the
  logits then. A value head goes into a file of its own, value_head.safetensors,
  which `load` reads and transformers does not.

  Args:
    directory: a path that is free, or an empty folder.
    config: of the network, without adapters: merge them first.
    params: its parameters.
    like: a model directory whose tokenizer, chat template and ids of special
      tokens are taken over; None for weights alone.
    dtype: what tensors are rounded to, 'float32' or 'bfloat16'.
    shard_bytes: beyond this many, weights are parted into several files.

  Raises:
    ValueError: if the directory is taken, `like` is no model directory, the
      config has adapters or is of no published architecture, or the parameters
      are not of the config or not finite.
  """
  checks.one_of('dtype', dtype, ('float32', 'bfloat16'))
  if config.lora is not None:
    raise ValueError(
        f'lora: expected a config without adapters, got {config.lora}; merge'
        ' them with lora.merge')
  _check_params(config, params)
  head = params.get('value_head') if config.value_head else None
  config, params = _unscaled(config, params)
  values = {**architectures.to_json(config), 'torch_dtype': dtype}
  if like is not None:
    kept = tokenizer_files.read_json(pathlib.Path(like, _CONFIG))
    values |= {key: kept[key] for key in _KEPT_KEYS if key in kept}
  with directories.whole(directory) as folder:
    write(folder, values, _tensors(config, params), dtype, shard_bytes)
    if head is not None:
      _save_file({n: np.asarray(x, np.float32) for n, x in head.items()},
                 folder / _VALUE_HEAD)
    if like is not None:
      _copy_kept_files(pathlib.Path(like), folder)


def _check_params(config, params):
  """Raises ValueError unless the parameters are those of the config."""
  expected = {leaf.path: leaf.shape for leaf in _leaves(config)}
  if config.value_head:
    expected |= {('value_head', 'kernel'): (config.width, 1),
                 ('value_head', 'bias'): (1,)}
  flat = traverse_util.flatten_dict(params)
  given = {path: tuple(leaf.shape) for path, leaf in flat.items()}
  for path in sorted(expected.keys() | given.keys()):
    if expected.get(path) != given.get(path):
      raise ValueError(
          f'params: {"/".join(path)}: expected shape {expected.get(path)} as'
          f' the config has it, got {given.get(path)}')
  for path, leaf in flat.items():
    check_finite(f'params: {"/".join(path)}', np.asarray(leaf))


def _unscaled(config, params):
  """Returns the same network with its scale in the embeddings themselves."""
  if not config.scale_embeddings:
    return config, params
  embedding = np.asarray(params['embedding']['embedding'], np.float32)
  output = embedding if config.tied else params['output']
  scaled = embedding * np.float32(config.width**0.5)
  return (dataclasses.replace(config, scale_embeddings=False, tied=False),
          {**params, 'embedding': {'embedding': scaled}, 'output': output})


def _tensors(config, params) -> dict[str, Tensor]:
  """Returns what the files are to hold, under its names there."""
  flat = traverse_util.flatten_dict(params)
  tensors = {}
  for leaf in _leaves(config):
    for layer, name in enumerate(leaf.names()):
      read = functools.partial(_layer_of, leaf, layer, flat[leaf.path])
      tensors[_whole_name(name)] = Tensor(leaf.tensor_shape, read)
  return tensors


def _layer_of(leaf: _Leaf, layer: int, array) -> np.ndarray:
  array = np.asarray(array if leaf.num_layers is None else array[layer])
  return array.T if leaf.transposed else array


def write(
    folder: pathlib.Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: str = 'float32',
    shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes config.json and the weights, making one file's tensors at a time.

  Args:
    folder: where to.
    values: what config.json says.
    tensors: name in the files -> what makes it.
    dtype: what tensors are rounded to.
    shard_bytes: beyond this many, weights are parted into several files.
  """
  write_json(folder / _CONFIG, values)
  dtype = jnp.dtype(dtype)
  sizes = {name: math.prod(tensor.shape) * dtype.itemsize
           for name, tensor in tensors.items()}
  shards, weight_map = _parts(sizes, shard_bytes), {}
  for number, names in enumerate(shards, start=1):
    file = _WEIGHTS if len(shards) == 1 else (
        f'model-{number:05}-of-{len(shards):05}.safetensors')
    weight_map |= dict.fromkeys(names, file)
    _save_file(
        {name: tensors[name].read().astype(dtype) for name in names},
        folder / file)
  if len(shards) > 1:
    write_json(folder / _INDEX, {
        'metadata': {'total_size': sum(sizes.values())},
        'weight_map': weight_map})


def _parts(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
  """Returns names in order, parted before their sizes add up to more."""
  parts, total = [[]], 0
  for name, size in sizes.items():
    if parts[-1] and total + size > limit:
      parts.append([])
      total = 0
    parts[-1].append(name)
    total += size
  return parts


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a JSON object, a key a line."""
  text = json.dumps(values, indent=2, ensure_ascii=False) + '\n'
  path.write_text(text, encoding='utf-8')


def _save_file(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
  _safetensors().numpy.save_file(
      {name: np.ascontiguousarray(x) for name, x in tensors.items()}, path,
      metadata={'format': 'pt'})
  path.chmod(path.parent.stat().st_mode & 0o666)  # Readable as the folder is.


def _copy_kept_files(like: pathlib.Path, folder: pathlib.Path) -> None:
  for pattern in _KEPT_FILES:
    for path in like.glob(pattern):
      target = folder / path.relative_to(like)
      target.parent.mkdir(exist_ok=True)
      shutil.copyfile(path, target)
