"""A mesh of devices, and which axis of each array lies along which of its axes.

Two axes: `data` parts rows, `model` parts heads, the inner width of the MLPs
and the vocabulary. Everything else is XLA's: arrays are placed, and GSPMD makes
the programs. One device is the mesh `data:1,model:1`, or none at all.
"""

from collections.abc import Callable, Sequence
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from bpo_jax import checks
from bpo_jax.models import transformer

AXES = ('data', 'model')

# Axis of a leaf, counted from its end, that lies along `model`, by the names of
# the leaf and of what holds it. Maps out of the stream are parted by what they
# give, maps into it by what they take: so a block talks twice, after attention
# and after the MLP.
_OUT_OF_STREAM = ('query', 'key', 'value', 'gate', 'up')
_INTO_STREAM = ('out', 'down')


def parse(spec: str) -> dict[str, int]:
  """Returns the sizes that a flag such as `data:4,model:2` names.

  Args:
    spec: sizes by axis; one that is left out is 1, and so are both of ''.

  Raises:
    ValueError: if an axis is unknown, named twice, or has no positive size.
  """
  sizes = {}
  for part in spec.split(',') if spec.strip() else ():
    name, _, size = part.strip().partition(':')
    checks.one_of('mesh', name, AXES)
    if not re.fullmatch('0*[1-9][0-9]{0,17}', size) or name in sizes:
      raise ValueError(
          'mesh: expected each axis once with a size of at least 1, such as'
          f' data:4,model:2, got {spec!r}')
    sizes[name] = int(size)
  return {name: sizes.get(name, 1) for name in AXES}


def make_mesh(
    spec: str, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Returns the mesh that a flag describes.

  Args:
    spec: as for `parse`.
    devices: to take the first of; None for all there are.

  Raises:
    ValueError: if there are fewer devices than the mesh has places.
  """
  sizes = parse(spec)
  devices = jax.devices() if devices is None else devices
  count = math.prod(sizes.values())
  if count > len(devices):
    raise ValueError(
        f'mesh: {spec} has {count} places, expected at most as many as there'
        f' are devices, got {len(devices)}; make it smaller, or give this'
        ' process more devices')
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(
      tuple(sizes.values()), AXES, axis_types=auto, devices=devices[:count])


def num_row_parts(mesh: jax.sharding.Mesh | None) -> int:
  """Returns among how many devices rows are parted; 1 without a mesh."""
  return 1 if mesh is None else mesh.shape['data']


def check(
    mesh: jax.sharding.Mesh, config: transformer.TransformerConfig
) -> None:
  """Raises ValueError, before anything is placed, if a network does not part.

  Args:
    mesh: as by `make_mesh`.
    config: of the network.
  """
  parts = mesh.shape['model']
  for name in ('num_heads', 'num_kv_heads', 'mlp_width', 'vocab_size'):
    size = getattr(config, name)
    if size % parts:
      raise ValueError(
          f'mesh: model:{parts} does not divide {name}, expected a divisor of'
          f' {size}; take another --mesh')


def _spec(path: tuple[Any, ...], leaf: Any) -> jax.sharding.PartitionSpec:
  """Returns how a leaf of the parameters, or of what is shaped like them, lies.

  The rule goes by names, so that it holds for gradients and moments as well.
  """
  names = [getattr(key, 'key', getattr(key, 'name', '')) for key in path]
  axis = _model_axis(*['', *names][-2:])
  spec = [None] * leaf.ndim
  if axis is not None and leaf.ndim >= -axis:
    spec[axis] = 'model'
  return jax.P(*spec)


def _model_axis(holder: str, name: str) -> int | None:
  """Returns the axis along `model`, counted from the end; None for whole."""
  if name in ('embedding', 'output'):
    return -2
  if holder in _OUT_OF_STREAM and name in ('kernel', 'bias', 'lora_b'):
    return -1
  if holder in _INTO_STREAM and name in ('kernel', 'lora_a'):
    return -2
  return None


def of(mesh: jax.sharding.Mesh, tree: Any) -> Any:
  """Returns the sharding of every leaf of parameters, moments or a state.

  Args:
    mesh: as by `make_mesh`.
    tree: of arrays or their shapes; leaves that are no parameters, such as
      counts and keys, are whole on every device.
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, leaf: NamedSharding(mesh, _spec(path, leaf)), tree)


def place(mesh: jax.sharding.Mesh | None, tree: Any) -> Any:
  """Puts parameters, or a whole state, on the mesh; None leaves them."""
  if mesh is None:
    return tree
  return jax.device_put(tree, of(mesh, tree))


def constrain(mesh: jax.sharding.Mesh | None, tree: Any) -> Any:
  """Holds traced parameters or gradients to where `place` puts them."""
  if mesh is None:
    return tree
  return jax.lax.with_sharding_constraint(tree, of(mesh, tree))


def row_specs(rows: Any) -> Any:
  """Returns how rows lie along the axes: keys and values by heads as well.

  Args:
    rows: pytree of [R, ...] arrays or their shapes, such as
      `packing.PackedRows`, `sampling.Rows` or `sampling.Cache`.
  """

  def of_leaf(path, _):
    names = [getattr(key, 'name', None) for key in path]
    return jax.P(*AXES) if 'key_values' in names else jax.P('data')

  return jax.tree_util.tree_map_with_path(of_leaf, rows)


def of_rows(mesh: jax.sharding.Mesh, rows: Any) -> Any:
  """Returns the sharding of every leaf of rows, see `row_specs`."""
  return jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), row_specs(rows))


def place_rows(mesh: jax.sharding.Mesh | None, rows: Any) -> Any:
  """Parts rows over `data`; missing ones are made up of zeros.

  Args:
    mesh: as by `make_mesh`, or None, which leaves the rows where they are.
    rows: as of `row_specs`.

  Returns:
    The same on the mesh, R rounded up to a multiple of its `data` axis. Rows of
    zeros train nothing.
  """
  if mesh is None:
    return rows
  parts = mesh.shape['data']

  def fit(x):
    missing = -len(x) % parts
    if not missing:
      return x
    return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))

  rows = jax.tree.map(fit, rows)
  return jax.device_put(rows, of_rows(mesh, rows))


def zero_rows(mesh: jax.sharding.Mesh | None, shapes: Any) -> Any:
  """Returns zeros where `place_rows` puts them, never whole on one device.

  Args:
    mesh: as by `make_mesh`, whose `data` axis divides R; None for one device.
    shapes: pytree of jax.ShapeDtypeStruct, [R, ...] each.
  """
  if mesh is None:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.tree.map(
      lambda x, place: jnp.zeros(x.shape, x.dtype, device=place),
      shapes, of_rows(mesh, shapes))


def constrain_rows(mesh: jax.sharding.Mesh | None, rows: Any) -> Any:
  """Holds traced rows to where `place_rows` puts them."""
  if mesh is None:
    return rows
  return jax.lax.with_sharding_constraint(rows, of_rows(mesh, rows))


def held(
    mesh: jax.sharding.Mesh | None, function: Callable[..., Any]
) -> Callable[..., Any]:
  """Returns the function, with the rows that it gives held to the mesh."""

  @functools.wraps(function)
  def of(*args):
    return constrain_rows(mesh, function(*args))

  return of


def on_one(mesh: jax.sharding.Mesh | None, tree: Any) -> Any:
  """Puts small arrays on the first device of the mesh; None leaves them."""
  if mesh is None:
    return tree
  return jax.device_put(tree, mesh.devices.flat[0])
