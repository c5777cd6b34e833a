"""Run by sharding_test on eight virtual devices; prints its findings as JSON.

A process has the devices that it began with, so the tests' own has one. The
argument names what to look at, see `PARTS`.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import tiny_agents as tiny  # noqa: E402
import tiny_runs  # noqa: E402

from bpo_jax import archive  # noqa: E402
from bpo_jax import attention  # noqa: E402
from bpo_jax import batches as batches_lib  # noqa: E402
from bpo_jax import checkpoint  # noqa: E402
from bpo_jax import learner  # noqa: E402
from bpo_jax import packing  # noqa: E402
from bpo_jax import rollout  # noqa: E402
from bpo_jax import sampling  # noqa: E402
from bpo_jax import sharding  # noqa: E402
from bpo_jax.models import lora  # noqa: E402
from bpo_jax.models import transformer  # noqa: E402
from experiments import configs  # noqa: E402
from experiments import train  # noqa: E402

LOSS = learner.LossConfig(kl_coef=0.1, entropy_coef=0.01)
# Not of the losses: how many rows there are, and how full.
OF_ROWS = ('rows/computed_tokens', 'rows/padding')


def recording() -> optax.GradientTransformation:
  """Keeps the gradient that it is given as its state."""
  zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
  return optax.GradientTransformation(
      zeros, lambda gradient, state, params=None: (gradient, gradient))


OPTIMIZER = optax.chain(
    recording(), learner.make_optimizer(learner.OptimizerConfig()))


def network(kind, mesh=None):
  adapters = transformer.LoraConfig(2, 4.0) if kind == 'lora' else None
  return tiny.model(
      lora=adapters, attention_bias=kind == 'biased', qk_norm=kind == 'biased',
      tied=kind != 'biased').clone(mesh=mesh)


def batches(layout):
  """Rows of which those of trees have two blocks."""
  tree = tiny.random_trees(0, num_trees=16)
  rows = packing.pack(
      tree, tiny.random_credit(tree, 0), layout=layout,
      row_length=256 if layout == 'trees' else 128)
  return packing.micro_batches(rows, 512)


def state_of(kind):
  return learner.init_state(
      tiny.params_of(network(kind)), OPTIMIZER, jax.random.key(0))


def one_update(kind, layout, mesh):
  model = network(kind, mesh)
  update = learner.make_update_fn(
      model, OPTIMIZER, learner.make_policy_loss(LOSS), 0.9)
  reference = sharding.place(mesh, tiny.params_of(model, seed=1))
  state = sharding.place(mesh, state_of(kind))
  return update(state, batches(layout), 1e-3, reference)


def difference(left, right):
  """The largest deviation of a leaf, relative to the leaf's size."""
  def of(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-12)
  return max(jax.tree.leaves(jax.tree.map(of, left, right)))


def num_elsewhere(tree, places):
  """How many arrays lie elsewhere than they should."""
  return sum(
      not x.sharding.is_equivalent_to(place, x.ndim)
      for x, place in zip(jax.tree.leaves(tree), jax.tree.leaves(places)))


def exchanged(text, kinds='all-gather|all-to-all|all-reduce'):
  """The shapes that devices tell each other in a compiled program."""
  shapes = [found for found, _ in re.findall(rf'= (.*?) ({kinds})\(', text)]
  return [shape for several in shapes
          for shape in re.findall(r'\w+\[[\d,]*\]', several)]


def compare_outputs_fn(spec, found):
  """What a policy says of trees, whose rows the mesh does not divide."""
  tree = tiny.random_trees(1, num_trees=3)
  model = network('plain')
  params = tiny.params_of(model)
  alone = learner.make_outputs_fn(model, 0.9)(params, tree, 256)
  mesh = sharding.make_mesh(spec)
  there = learner.make_outputs_fn(network('plain', mesh), 0.9)(
      sharding.place(mesh, params), tree, 256)
  found[f'outputs_fn/{spec}'] = difference(there, alone)


def compare_updates(kind, layout, spec, found):
  alone, metrics = one_update(kind, layout, None)
  mesh = sharding.make_mesh(spec)
  state, values = one_update(kind, layout, mesh)
  name = f'{kind}/{layout}/{spec}'
  found[f'gradient/{name}'] = difference(
      state.optimizer_state[0], alone.optimizer_state[0])
  found[f'update/{name}'] = difference(
      lora.split(state.params)[0], lora.split(alone.params)[0])
  found[f'metrics/{name}'] = max(
      abs(values[k] - metrics[k]) / max(abs(metrics[k]), 1e-3)
      for k in metrics)
  found[f'elsewhere/{name}'] = num_elsewhere(state, sharding.of(mesh, state))
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


def compare_outputs(spec, found):
  """Packed trees say the same, and no row leaves its device to be read."""
  rows = batches('trees')[0]
  rows = jax.tree.map(lambda x: np.concatenate([x] * 4), rows)
  assert rows.ancestors_blocks.shape[1] == 2 and len(rows.tokens) == 8
  params = tiny.params_of(network('plain'))

  def run(model, params, rows):
    def loss(params):
      outputs = packing.token_log_probs(model, params, rows, 0.9)
      return jnp.sum(outputs[0] * rows.weights + 0.1 * outputs[1]), outputs
    return jax.value_and_grad(loss, has_aux=True)(params)

  alone = jax.jit(functools.partial(run, network('plain')))(params, rows)
  mesh = sharding.make_mesh(spec)
  there = sharding.place(mesh, params), sharding.place_rows(mesh, rows)

  def compiled(mesh):
    program = jax.jit(functools.partial(run, network('plain', mesh)))
    program = program.lower(*there).compile()
    return program, len(exchanged(program.as_text(), 'all-gather'))

  program, found[f'gathers/{spec}'] = compiled(mesh)
  found[f'outputs/{spec}'] = difference(program(*there), alone)
  found[f'found/{spec}'] = compiled(None)[1]  # There are some to be found.


def compare_attention(found):
  """Every implementation, with rows that the mesh parts and with others."""
  rows, mesh = batches('trees')[0], sharding.make_mesh('data:4,model:2')
  rng = np.random.default_rng(0)
  for name in ('dense', 'blocks', 'pallas'):
    for num_rows in (4, 3):
      draw = lambda heads, n=num_rows: rng.normal(
          size=(n, heads, 256, 8)).astype(np.float32)
      take = lambda x, n=num_rows: np.concatenate([x] * 2)[:n]
      ancestors = attention.Ancestors(
          take(rows.end), take(rows.ancestors_blocks))

      def loss(mesh, *arrays, ancestors=ancestors, name=name):
        out = attention.attend(*arrays, ancestors, name, mesh)
        return jnp.sum(jnp.sin(out))

      of = jax.jit(
          jax.value_and_grad(loss, (1, 2, 3)), static_argnums=0)
      arrays = draw(4), draw(2), draw(2)
      found[f'attention/{name}/{num_rows}'] = difference(
          of(mesh, *arrays), of(None, *arrays))


def grown(agent, params, mesh, max_rows, found=None):
  """Grows trees of two stages, whose episodes do not all go in the rows."""
  grower = rollout.Grower(
      agent.model.clone(mesh=mesh), agent.batched, agent.sampler, 6,
      debug=True, max_rows=max_rows)
  act, programs = grower.act, {}

  def watched(params, rows):
    shape = rows.pending.shape
    if shape not in programs:
      programs[shape] = act.lower(params, rows).compile()
    rows, actions = programs[shape](params, rows)  # Refuses rows elsewhere.
    found['elsewhere/rows'] += num_elsewhere(
        rows, sharding.of_rows(mesh, rows))
    return rows, actions

  if found is not None:
    grower.act = watched
  tasks = agent.environment.tasks('train')[:3]
  plans = [tiny.random_plan(stage, 2, 4, birth=stage) for stage in range(2)]
  tree = grower.grow(
      sharding.place(mesh, params), tasks, jax.random.key(3), 9, plans).tree
  return tree, programs


def compare_rollouts(spec, max_rows, found):
  """The same trees, from a cache that is parted and is never gathered."""
  agent = tiny.household()
  params = tiny.params_of(agent.model)
  alone, _ = grown(agent, params, None, 16)
  found['elsewhere/rows'] = 0
  tree, programs = grown(
      agent, params, sharding.make_mesh(spec), max_rows, found)
  found[f'tree/{spec}'] = difference(tree, alone)
  found['held/handles'] = tiny.num_held(agent.grower)
  # Rows close their ranks where there is room to.
  assert sorted({rows for rows, _ in programs}) == {16: [16], 24: [18, 24]}[
      max_rows]
  seen = [shape for program in programs.values()
          for shape in exchanged(program.as_text())]
  assert seen
  found['gathers/cache'] = sum(',256,' in shape for shape in seen)


def compare_copies(found):
  """Forks exchange the rows that they copy, one at a time, and no others."""
  mesh, rng = sharding.make_mesh('data:4,model:2'), np.random.default_rng(0)
  config = tiny.model().config

  def filled(num_rows, size, mesh=None):
    return jax.tree.map(
        lambda x: jnp.asarray(100 * rng.random(x.shape), x.dtype),
        sampling.empty_cache(config, num_rows, size))

  cache, source = filled(8, 12), filled(16, 20)
  to = rng.permutation(8).astype(np.int32)
  origin = rng.integers(0, 16, 8).astype(np.int32)
  there = sharding.place_rows(mesh, (cache, source))
  copy = archive._copy_rows  # pylint: disable=protected-access
  take = batches_lib._take_rows  # pylint: disable=protected-access
  for name, run in (
      ('copy', lambda f, c, s, mesh: f(copy)(c, s, to, origin, 5, mesh=mesh)),
      ('take', lambda f, c, s, mesh: f(take)(s, origin, 6, mesh=mesh))):
    call, text = lambda f: f, []
    lowered = run(lambda f: f.lower, *there, mesh).compile()
    text = exchanged(lowered.as_text())
    found[f'gathers/{name}'] = sum(
        not re.search(r'\[1[,\]]', shape) for shape in text)
    assert text
    got = run(call, *jax.tree.map(jnp.copy, there), mesh)
    want = run(call, *jax.tree.map(jnp.copy, (cache, source)), None)
    found[f'elsewhere/{name}'] = num_elsewhere(
        got, sharding.of_rows(mesh, got))
    if name == 'take':
      got, want = jax.tree.map(lambda x: np.asarray(x)[:6], (got, want))
    found[f'outputs/{name}'] = difference(got, want)


def run_training(folder, **overrides):
  """The binary from first to last; its losses by update, and its scores."""
  config = tiny_runs.config(
      folder, updates=2, save_every=1, num_heads=4, num_kv_heads=2,
      warm_start_updates=1, max_tokens=1024, **overrides)
  with contextlib.redirect_stdout(io.StringIO()):
    status = tiny_runs.call(
        train, configs.TrainConfig, *tiny_runs.arguments(config))
  assert status == 0, overrides
  workdir = pathlib.Path(config.workdir)
  rows = [{name: float(value or 0) for name, value in row.items()
           if name not in OF_ROWS} for row in tiny_runs.metrics(workdir)]
  result = json.loads((workdir / 'result.json').read_text())
  return rows, (result['before'], result['after'])


def compare_runs(found):
  """A run on a mesh, and its going on elsewhere after its first update."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    shared = {'cache_dir': str(folder / 'cache')}
    losses, scores = run_training(folder / 'alone', **shared)
    assert len(losses) == 2 and all(x['gradient/norm'] for x in losses)

    def compare(case, got):
      found[f'losses/{case}'] = max(
          abs(x[k] - y[k]) / max(abs(y[k]), 1e-3)
          for x, y in zip(got[0], losses, strict=True) for k in y)
      found[f'scores/{case}'] = int(got[1] != scores)

    spec = 'data:2,model:2'
    compare(spec, run_training(folder / 'whole', mesh=spec, **shared))
    shutil.rmtree(folder / 'whole/run/checkpoints/2')
    for other in ('', 'data:4', 'data:4,model:2'):
      copy = folder / f'on {other}'
      shutil.copytree(folder / 'whole', copy)
      compare(f'{spec} then {other}', run_training(
          copy, mesh=other, resume=True, **shared))


# Few, since each compiles anew. No number of rows is a multiple of 3.
PARTS = {
    'fast': (
        functools.partial(compare_outputs, 'data:4,model:2'),
        functools.partial(compare_outputs_fn, 'data:4'),
        functools.partial(compare_updates, 'plain', 'trees', 'data:4,model:2'),
        functools.partial(compare_updates, 'lora', 'trees', 'data:4,model:2'),
        functools.partial(compare_rollouts, 'data:2,model:2', 16)),
    'slow': (
        functools.partial(compare_outputs, 'data:8'),
        functools.partial(compare_rollouts, 'data:3,model:2', 24),
        functools.partial(
            compare_updates, 'plain', 'paths', 'data:8'),
        functools.partial(
            compare_updates, 'biased', 'trees', 'data:4,model:2'),
        compare_attention, compare_copies),
    'runs': (compare_runs,)}


def main():
  found = {}
  jax.config.update('jax_disable_most_optimizations', True)
  for compare in PARTS[sys.argv[1]]:
    compare(found)
  json.dump(found, sys.stdout)


if __name__ == '__main__':
  main()
