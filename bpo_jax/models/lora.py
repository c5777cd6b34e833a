"""Low-rank adapters: which parameters are trained, and how they go back in.

The network applies them where its config has a `LoraConfig`; here is what one
does with their parameters. Parameters without adapters are all trained, so
whoever splits and joins need not ask which kind they are.

References: arXiv 2106.09685.
"""

import dataclasses
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from bpo_jax.models import transformer

_ADAPTERS = ('lora_a', 'lora_b')
# A critic is trained with the adapters: no base model has one.
_HEADS = ('value_head',)


def has_adapters(params: dict) -> bool:
  """Returns whether some of the parameters are adapters."""
  flat = traverse_util.flatten_dict(params)
  return any(path[-1] in _ADAPTERS for path in flat)


def split(params: dict) -> tuple[dict, dict]:
  """Parts parameters into what is trained and what stays.

  Args:
    params: of the whole network.

  Returns:
    trained: adapters and value head; everything, where there is no adapter.
    frozen: the rest, sharing its arrays with `params`.
  """
  if not has_adapters(params):
    return params, {}
  flat = traverse_util.flatten_dict(params)
  trained = {path: leaf for path, leaf in flat.items()
             if path[-1] in _ADAPTERS or path[0] in _HEADS}
  frozen = {path: leaf for path, leaf in flat.items() if path not in trained}
  return (traverse_util.unflatten_dict(trained),
          traverse_util.unflatten_dict(frozen))


def join(trained: dict, frozen: dict) -> dict:
  """Returns the whole again; the inverse of `split`."""
  return traverse_util.unflatten_dict(
      traverse_util.flatten_dict(trained)
      | traverse_util.flatten_dict(frozen))


def init_params(
    config: transformer.TransformerConfig, base: dict, rng_key: jax.Array
) -> dict:
  """Returns the parameters of a base model with fresh adapters beside them.

  Args:
    config: of the network with adapters, and a value head if one is wanted.
    base: parameters without adapters; their arrays are used as they are.
    rng_key: consumed.

  Raises:
    ValueError: if the base is that of another network.
  """
  shapes = jax.eval_shape(
      lambda key: transformer.init_params(config, key), rng_key)
  flat = traverse_util.flatten_dict(shapes)
  given = traverse_util.flatten_dict(base)
  fresh = {path: leaf for path, leaf in flat.items() if path not in given}
  for path, leaf in flat.items():
    new = path[-1] in _ADAPTERS or path[0] in _HEADS
    got = given.get(path)
    if (got is None and not new) or (got is not None
                                     and got.shape != leaf.shape):
      raise ValueError(
          f'{"/".join(path)}: expected shape {leaf.shape} as the config has'
          f' it, got {"none" if got is None else got.shape}; the base is of'
          ' another network')
  for number, (path, leaf) in enumerate(sorted(fresh.items())):
    key = jax.random.fold_in(rng_key, number)
    fresh[path] = _initial(path, leaf, key)
  return traverse_util.unflatten_dict({**given, **fresh})


def _initial(path, leaf, key):
  """Returns A uniform by its fan-in, and zeros for B and the value head."""
  if path[-1] == 'lora_a':
    bound = (6.0 / leaf.shape[-2]) ** 0.5
    return jax.random.uniform(key, leaf.shape, minval=-bound, maxval=bound)
  return jnp.zeros(leaf.shape)


def merge(
    config: transformer.TransformerConfig, params: dict
) -> tuple[transformer.TransformerConfig, dict]:
  """Adds what the adapters say to the kernels: W + (alpha / rank) A B.

  Args:
    config: of the network with adapters.
    params: its parameters.

  Returns:
    The config without adapters, and parameters that compute the same.

  Raises:
    ValueError: if there is nothing to merge.
  """
  if config.lora is None or not has_adapters(params):
    raise ValueError(
        'expected a config and parameters with adapters, got'
        f' lora={config.lora} and {"" if has_adapters(params) else "no "}'
        'adapters in the parameters')
  scale = config.lora.alpha / config.lora.rank

  def merged(node: Any) -> Any:
    if not isinstance(node, dict):
      return node
    if 'lora_a' not in node:
      return {name: merged(child) for name, child in node.items()}
    rest = {n: leaf for n, leaf in node.items() if n not in _ADAPTERS}
    delta = jnp.matmul(node['lora_a'], node['lora_b'])  # [layers, in, out]
    return {**rest, 'kernel': node['kernel'] + scale * delta}

  return dataclasses.replace(config, lora=None), merged(params)
