"""Run by sharding_test on eight virtual devices; prints its findings as JSON.

A process has the devices that it began with, so the tests' own has one.
"""

import functools
import json
import os
import sys
import tempfile

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import tiny_agents as tiny  # noqa: E402

from bpo_jax import checkpoint  # noqa: E402
from bpo_jax import learner  # noqa: E402
from bpo_jax import packing  # noqa: E402
from bpo_jax import sharding  # noqa: E402
from bpo_jax.models import lora  # noqa: E402
from bpo_jax.models import transformer  # noqa: E402

# Kind of network, layout of the rows, meshes; few, since each compiles anew.
CASES = (
    ('plain', 'paths', ('data:8',)),
    ('biased', 'trees', ('data:4,model:2',)),
    ('lora', 'trees', ('data:4,model:2',)))
LOSS = learner.LossConfig(kl_coef=0.1, entropy_coef=0.01)


def recording() -> optax.GradientTransformation:
  """Keeps the gradient that it is given as its state."""
  zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
  return optax.GradientTransformation(
      zeros, lambda gradient, state, params=None: (gradient, gradient))


OPTIMIZER = optax.chain(
    recording(), learner.make_optimizer(learner.OptimizerConfig()))


def network(kind):
  adapters = transformer.LoraConfig(2, 4.0) if kind == 'lora' else None
  return tiny.model(
      lora=adapters, attention_bias=kind == 'biased', qk_norm=kind == 'biased',
      tied=kind != 'biased')


def batches(layout):
  tree = tiny.random_trees(0, num_trees=5)
  rows = packing.pack(
      tree, tiny.random_credit(tree, 0), row_length=128, layout=layout)
  return packing.micro_batches(rows, 512)


def state_of(kind):
  return learner.init_state(
      tiny.params_of(network(kind)), OPTIMIZER, jax.random.key(0))


def one_update(kind, layout, mesh):
  model = network(kind)
  update = learner.make_update_fn(
      model, OPTIMIZER, learner.make_policy_loss(LOSS), 0.9, mesh)
  reference = sharding.place(mesh, tiny.params_of(model, seed=1))
  state = sharding.place(mesh, state_of(kind))
  return update(state, batches(layout), 1e-3, reference)


def difference(left, right):
  """The largest deviation of a leaf, relative to the leaf's size."""
  def of(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-12)
  return max(jax.tree.leaves(jax.tree.map(of, left, right)))


def compare_updates(kind, layout, specs, found):
  alone, metrics = one_update(kind, layout, None)

  def after(state):
    params = lora.split(jax.tree.map(np.asarray, state.params))[0]
    # A bias that all keys share changes no softmax: its gradient is rounding,
    # of which Adam makes a step of full size.
    params['blocks']['attention']['key'].pop('bias', None)
    return params

  for spec in specs:
    mesh = sharding.make_mesh(spec)
    state, values = one_update(kind, layout, mesh)
    name = f'{kind}/{layout}/{spec}'
    found[f'gradient/{name}'] = difference(
        state.optimizer_state[0], alone.optimizer_state[0])
    found[f'update/{name}'] = difference(after(state), after(alone))
    found[f'metrics/{name}'] = max(
        abs(values[k] - metrics[k]) / max(abs(metrics[k]), 1e-3)
        for k in metrics)
    expected = sharding.of(mesh, state)
    found[f'moved/{name}'] = sum(
        not x.sharding.is_equivalent_to(s, x.ndim)
        for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(expected)))
    compare_checkpoints(kind, spec, state, found)


def compare_checkpoints(kind, spec, state, found):
  """What a mesh saves is read bit for bit, wherever it is to lie."""
  raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(
      x.dtype, jax.dtypes.prng_key) else x
  with tempfile.TemporaryDirectory() as folder:
    checkpoint.save(folder, 1, state)
    for read in (None, 'data:4,model:2', 'data:8'):
      target = sharding.place(
          read and sharding.make_mesh(read), state_of(kind))
      back = checkpoint.restore(folder, target).state
      found[f'checkpoint/{kind}/{spec}/{read}'] = sum(
          not np.array_equal(raw(x), raw(y)) or x.sharding != t.sharding
          for x, y, t in zip(*map(jax.tree.leaves, (back, state, target))))


def compare_outputs(found):
  """A network over placed parameters says what it says on one device."""
  model, params = network('plain'), tiny.params_of(network('plain'))
  rows = batches('paths')[0]
  run = jax.jit(functools.partial(packing.token_log_probs, model))
  alone = run(params, rows)
  for spec in ('data:4,model:2',):
    mesh = sharding.make_mesh(spec)
    there = run(sharding.place(mesh, params), sharding.place_rows(mesh, rows))
    cut = [np.asarray(x)[:len(rows.tokens)] for x in there]
    found[f'outputs/{spec}'] = difference(cut, list(alone))


def main():
  found = {}
  jax.config.update('jax_disable_most_optimizations', True)
  compare_outputs(found)
  for kind, layout, specs in CASES:
    compare_updates(kind, layout, specs, found)
  json.dump(found, sys.stdout)


if __name__ == '__main__':
  main()
