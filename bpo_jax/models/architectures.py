"""Published architectures: config.json to a TransformerConfig, and back.

Both spellings are read, that of transformers 4 (`rope_theta` and `rope_scaling`
at the top) and that of 5 (`rope_parameters`). The older one is written, which
both of them read. What the network does not compute is refused, never ignored.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bpo_jax import checks
from bpo_jax.models import transformer

_MAX_NUMBER = 3.4e38  # Of anything that is measured: a float32.
_NAMES = {
    'vocab_size': 'vocab_size',
    'width': 'hidden_size',
    'num_layers': 'num_hidden_layers',
    'num_heads': 'num_attention_heads',
    'mlp_width': 'intermediate_size',
}


class _Family(NamedTuple):
  """What a `model_type` leaves unsaid."""

  architecture: str
  attention_bias: bool = False
  qk_norm: bool = False
  head_dim: int | None = None  # Where the key is absent; None: width / heads.


FAMILIES = {
    'llama': _Family('LlamaForCausalLM'),
    'qwen2': _Family('Qwen2ForCausalLM', attention_bias=True),
    'qwen3': _Family('Qwen3ForCausalLM', qk_norm=True, head_dim=128),
}


def from_json(
    values: Mapping[str, Any], source: str = 'config.json'
) -> transformer.TransformerConfig:
  """Returns the network that a config.json describes.

  Args:
    values: what the file holds.
    source: its path, for errors.

  Raises:
    ValueError: if it is of an architecture that is not in `FAMILIES`, asks for
      something that the network does not compute, or lacks a size.
  """
  try:
    return _from_json(values)
  except ValueError as error:
    raise ValueError(f'{source}: {error}') from error


def _from_json(values):
  checks.one_of('model_type', values.get('model_type'), tuple(FAMILIES))
  family = FAMILIES[values['model_type']]
  _refuse(values, family)
  sizes = {ours: _size(values, theirs) for ours, theirs in _NAMES.items()}
  heads = sizes['num_heads']
  given = values.get('head_dim', family.head_dim)
  rope = _rope(values)
  return transformer.TransformerConfig(
      **sizes,
      num_kv_heads=_size(values, 'num_key_value_heads', heads),
      head_dim=_size({'head_dim': given}, 'head_dim', sizes['width'] // heads),
      rope_theta=_number(rope, 'rope_theta'),
      rope_scaling=_rope_scaling(rope),
      norm_epsilon=_number(values, 'rms_norm_eps'),
      scale_embeddings=False,
      tied=_switch(values, 'tie_word_embeddings'),
      attention_bias=family.attention_bias,
      qk_norm=family.qk_norm,
  )


def to_json(config: transformer.TransformerConfig) -> dict[str, Any]:
  """Returns what config.json says of a network, the inverse of `from_json`.

  Raises:
    ValueError: if no published architecture is this network.
  """
  switches = (config.attention_bias, config.qk_norm)
  kinds = {(f.attention_bias, f.qk_norm): name for name, f in FAMILIES.items()}
  if switches not in kinds or config.scale_embeddings:
    raise ValueError(
        'expected a network as llama, qwen2 (attention_bias) or qwen3 (qk_norm)'
        f' have it, got attention_bias={config.attention_bias},'
        f' qk_norm={config.qk_norm},'
        f' scale_embeddings={config.scale_embeddings}'
    )
  kind = kinds[switches]
  return {
      'architectures': [FAMILIES[kind].architecture],
      'model_type': kind,
      **{theirs: getattr(config, ours) for ours, theirs in _NAMES.items()},
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'hidden_act': 'silu',
      'rms_norm_eps': config.norm_epsilon,
      'rope_theta': config.rope_theta,
      'rope_scaling': _rope_json(config.rope_scaling),
      'tie_word_embeddings': config.tied,
  }


def _refuse(values, family):
  """Raises ValueError for what the network does not compute."""
  wanted = {
      'hidden_act': ('silu', 'swish'),
      'mlp_bias': (False,),
      'quantization_config': (None,),
      'use_sliding_window': (False,),
      'partial_rotary_factor': (1.0,),
  }
  if not family.attention_bias:
    # It would put one on the output projection too.
    wanted['attention_bias'] = (False,)
  if 'use_sliding_window' not in values:
    wanted['sliding_window'] = (None,)
  for key, allowed in wanted.items():
    got = values.get(key)
    if got is not None and got not in allowed:
      raise ValueError(f'{key}: expected {allowed[0]}, got {got!r}')
  layers = values.get('layer_types') or []
  if not isinstance(layers, list):
    raise ValueError(
        f'layer_types: expected a list of kinds of attention, got {layers!r}')
  other = [kind for kind in layers if kind != 'full_attention']
  if other:
    raise ValueError(
        f"layer_types: expected 'full_attention' alone, got {other[0]!r}")


def _rope(values) -> dict[str, Any]:
  """Returns the rotary parameters as transformers 5 writes them."""
  key = 'rope_scaling' if values.get('rope_scaling') else 'rope_parameters'
  rope = values.get(key) or {}
  if not isinstance(rope, Mapping) or any(
      isinstance(value, Mapping) for value in rope.values()):
    raise ValueError(
        f'{key}: expected one set of parameters for all layers, got {rope!r}')
  factor = rope.get('partial_rotary_factor', 1.0)
  if factor != 1.0:
    raise ValueError(
        f'{key}: partial_rotary_factor: expected 1.0, got {factor!r}')
  return {
      'rope_theta': values.get('rope_theta', 10_000.0),
      'original_max_position_embeddings': values.get('max_position_embeddings'),
      **rope,
      'rope_type': rope.get('rope_type', rope.get('type', 'default')),
  }


def _rope_scaling(rope) -> transformer.RopeScaling | None:
  checks.one_of('rope_type', rope['rope_type'], ('default', 'llama3'))
  if rope['rope_type'] == 'default':
    return None
  low, high = (
      _number(rope, key) for key in ('low_freq_factor', 'high_freq_factor'))
  if low >= high:
    raise ValueError(
        f'low_freq_factor: expected less than high_freq_factor {high}, got'
        f' {low}')
  return transformer.RopeScaling(
      factor=_number(rope, 'factor'),
      low_frequency_factor=low,
      high_frequency_factor=high,
      original_positions=_size(rope, 'original_max_position_embeddings'),
  )


def _rope_json(scaling: transformer.RopeScaling | None):
  if scaling is None:
    return None
  return {
      'rope_type': 'llama3',
      'factor': scaling.factor,
      'low_freq_factor': scaling.low_frequency_factor,
      'high_freq_factor': scaling.high_frequency_factor,
      'original_max_position_embeddings': scaling.original_positions,
  }


def _size(values, key, default=None) -> int:
  got = values.get(key)
  got = default if got is None else got
  if type(got) is not int or not 1 <= got <= checks.MOST:
    raise ValueError(
        f'{key}: expected a whole number from 1 to {checks.MOST}, got {got!r}')
  return got


def _number(values, key) -> float:
  got = values.get(key)
  # Compared before it is made a float, which a long integer may not become.
  if type(got) not in (int, float) or not 0 < got <= _MAX_NUMBER:
    raise ValueError(
        f'{key}: expected a positive number up to {_MAX_NUMBER}, got'
        f' {got!r:.100}')
  return float(got)


def _switch(values, key) -> bool:
  got = values.get(key, False)
  if type(got) is not bool:
    raise ValueError(f'{key}: expected true or false, got {got!r}')
  return got
