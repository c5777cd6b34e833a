"""Sums, means and spreads over the real entries of an array.

The only place that divides by a count. A masked entry is replaced before any
arithmetic, so whatever stands there, NaN included, reaches neither a result nor
a gradient. A reduction over no real entry is 0.
"""

import chex
import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import types

Axis = int | tuple[int, ...] | None


def fill(values: chex.Array, mask: chex.Array, other: float = 0.0
         ) -> types.Array:
  """Returns `values` where `mask` is True and `other` elsewhere."""
  return jnp.where(mask, values, jnp.asarray(other, jnp.asarray(values).dtype))


def count(mask: chex.Array, axis: Axis = None, keepdims: bool = False
          ) -> types.Array:
  """Returns the number of real entries, float32."""
  return jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.float32)


def divide(numerator: chex.Array, denominator: chex.Array) -> types.Array:
  """Returns numerator / denominator, and 0 where the denominator is 0."""
  nonzero = denominator != 0
  return jnp.where(nonzero, numerator / jnp.where(nonzero, denominator, 1), 0)


def sum(values: chex.Array, mask: chex.Array, axis: Axis = None,
        keepdims: bool = False) -> types.Array:
  """Returns the sum of the real entries.

  Args:
    values: any shape.
    mask: bool, broadcastable to `values`; True where real.
    axis: axes to reduce; all by default.
    keepdims: whether reduced axes stay with size one.

  Returns:
    The sum, in the dtype of `values`; gradients flow to real entries only.
  """
  return jnp.sum(fill(values, mask), axis=axis, keepdims=keepdims)


def mean(values: chex.Array, mask: chex.Array, axis: Axis = None,
         keepdims: bool = False) -> types.Array:
  """Returns sum / count over the real entries; 0 where there is none."""
  mask = jnp.broadcast_to(mask, jnp.shape(values))
  total = sum(values, mask, axis, keepdims)
  return total / jnp.maximum(count(mask, axis, keepdims), 1)


def var(values: chex.Array, mask: chex.Array, axis: Axis = None,
        keepdims: bool = False, ddof: int = 0) -> types.Array:
  """Returns the variance of the real entries, in two passes.

  The difference E[x^2] - E[x]^2 cancels catastrophically in float32 and is
  never formed.

  Args:
    values: any shape.
    mask: bool, broadcastable to `values`; True where real.
    axis: axes to reduce; all by default.
    keepdims: whether reduced axes stay with size one.
    ddof: 1 for the unbiased estimate, 0 for the population's.

  Returns:
    sum (x - mean)^2 / max(count - ddof, 1); 0 for fewer than two entries.
  """
  mask = jnp.broadcast_to(mask, jnp.shape(values))
  deviation = fill(values, mask) - mean(values, mask, axis, keepdims=True)
  squares = sum(jnp.square(deviation), mask, axis, keepdims)
  return squares / jnp.maximum(count(mask, axis, keepdims) - ddof, 1)


def std(values: chex.Array, mask: chex.Array, axis: Axis = None,
        keepdims: bool = False, ddof: int = 0) -> types.Array:
  """Returns the square root of `var`, with gradient 0 where that is 0."""
  variance = var(values, mask, axis, keepdims, ddof)
  positive = variance > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)


def whiten(values: chex.Array, mask: chex.Array, axis: Axis = None,
           epsilon: float = 1e-6, ddof: int = 0) -> types.Array:
  """Returns (x - mean) / (std + epsilon) at real entries and 0 elsewhere."""
  centred = fill(values, mask) - mean(values, mask, axis, keepdims=True)
  spread = std(values, mask, axis, keepdims=True, ddof=ddof)
  return fill(over_spread(centred, spread, epsilon), mask)


def over_spread(deviation: chex.Array, spread: chex.Array,
                epsilon: chex.Numeric = 1e-6) -> types.Array:
  """Returns deviation / (spread + epsilon), 0 where the denominator is.

  Raises:
    ValueError: if epsilon is negative, which would turn signs around.
  """
  checks.between('epsilon', epsilon, 0)
  return divide(deviation, spread + epsilon)
