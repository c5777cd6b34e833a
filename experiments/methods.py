"""From flags to a method: an algorithm with a run's choices filled in.

Every scalar option of every part of the table of algorithms is a field of a
config, and so a flag, made from the part's own signature and docstring.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from bpo_jax import algorithms
from bpo_jax import branching
from bpo_jax import checks
from bpo_jax import learner
from bpo_jax import options
from bpo_jax import tree as tree_lib
from bpo_jax import types
from bpo_jax.branching import depths
from experiments import config_fields

# Options that a run sets by a flag of its own, or that only the agent knows.
_SET_OTHERWISE = ('num_branch_points', 'num_forks', 'vocab_size', 'a2')
# What a policy may ask for besides the tree, by the name of its argument.
CONTEXT = ('threshold', 'key', 'values', 'design', 'current_log_probs',
           'whitespace_mask')
# Lengths that papers give in tokens of a language model's prose, and keep with
# --model; a turn of the terse wording is about 7 tokens, 3 of them the action.
_TERSE = {'min_spacing': 8, 'boundary_interval': 6, 'entropy_window': 6}
# What an option is where the flag is left out, if not the algorithm's own.
_DEFAULTS = {
    **{name: f"None: {value}, and the algorithm's own with --model."
       for name, value in _TERSE.items()},
    'rho': 'None: learnt from earlier updates, a number for each level.',
}
# Policies whose M branch points are shared out over the first trajectories.
_SHARED_OUT = (branching.causal_threshold,)
_SELECTIONS = {'top_m': 'top_entropy', 'causal': 'causal_threshold'}


# All but the one that must be told true values.
POLICIES = {name: algorithms.branch_policy(name)
            for name in algorithms.branch_policies()
            if name != 'oracle_value_gap'}


class TableOption(NamedTuple):
  """An option of some parts of the table.

  Attributes:
    annotation: as in `options.Option`.
    holders: the algorithms and policies that have it, by what it means there.
  """

  annotation: Any
  holders: dict[str, list[str]]


@functools.cache
def table_options() -> dict[str, TableOption]:
  """Returns every option of the table by name."""
  found = {}
  rows = [(name, algorithms.get(name).parts) for name in algorithms.names()]
  policies = [(name, (policy,)) for name, policy in POLICIES.items()]
  for holder, parts in rows + policies:
    for part in parts:
      for name, option in options.of(part).items():
        if name not in _SET_OTHERWISE:
          known = found.setdefault(name, TableOption(option.annotation, {}))
          holders = known.holders.setdefault(option.help, [])
          holders += [holder] if holder not in holders else []
  return {name: option._replace(holders=_spelt_out(option.holders))
          for name, option in sorted(found.items())}


def _spelt_out(holders: dict[str, list[str]]) -> dict[str, list[str]]:
  """Returns the holders, those under "as in ..." where that is spelt out."""
  said = {text: list(names) for text, names in holders.items()
          if not text.startswith('as in')}
  first = next(iter(said.values()))
  for text, names in holders.items():
    if text not in said:
      first += [name for name in names if name not in first]
  return said


def option_fields() -> list[tuple[str, Any, Any]]:
  """Returns a config field for every option, for `dataclasses`."""
  return [
      (name, option.annotation | None, config_fields.field(
          None, _help(name, option), **_bounds(option)))
      for name, option in table_options().items()
  ]


def _bounds(option: TableOption) -> dict[str, Any]:
  """Returns the range of an option that counts; kernels check the others."""
  is_count = int in (option.annotation, config_fields.optional_of(
      option.annotation))
  return {'min': 0, 'max': checks.MOST} if is_count else {}


def _help(name: str, option: TableOption) -> str:
  """Returns what the option means to whom, and what it is if left out."""
  meanings = ' '.join(f'{text} [{", ".join(holders)}]'
                      for text, holders in option.holders.items())
  return meanings + ' ' + _DEFAULTS.get(name, "None: the algorithm's own.")


@dataclasses.dataclass(frozen=True)
class Method:
  """An algorithm with a run's choices filled in.

  Attributes:
    name: of the algorithm.
    num_backbones: first trajectories of each task.
    num_stages: how often a tree is branched.
    credit: (tree, **arrays) -> Credit.
    plan: (tree, **context) -> BranchPlan; None where only the root branches.
    wants: the names of `CONTEXT` that the plan takes.
    objective: surrogate per token, to be maximised.
    loss: the scalars of what is added to it.
    needs: keys of `algorithms.NEEDS`.
  """

  name: str
  num_backbones: int
  num_stages: int
  credit: Callable[..., types.Credit]
  plan: Callable[..., types.BranchPlan] | None
  wants: tuple[str, ...]
  objective: Callable[..., Any]
  loss: learner.LossConfig
  needs: tuple[str, ...]


def make(config: Any, vocab_size: int | None = None) -> Method:
  """Returns the config's algorithm, its own defaults where the config has None.

  Args:
    config: an `experiments.configs.TrainConfig`.
    vocab_size: of the policy's tokens, for policies that scale by log|V|.

  Raises:
    ValueError: if the config sets an option that the algorithm does not have,
      or leaves nothing to compare.
  """
  algorithm = algorithms.get(config.algorithm)
  given = {name: getattr(config, name) for name in table_options()
           if getattr(config, name) is not None}
  num_backbones = config.num_backbones or algorithm.defaults['num_backbones']
  policy = _policy(algorithm, config, num_backbones, given, vocab_size)
  parts = (policy, algorithm.estimator, algorithm.objective)
  _refuse_unknown(algorithm, parts, given)
  _refuse_alone(algorithm, policy, num_backbones)
  num_stages = config.num_stages or algorithms.num_stages(policy)
  return Method(
      name=algorithm.name,
      num_backbones=num_backbones,
      num_stages=num_stages if policy else 0,
      credit=_filled(algorithm.estimator, given),
      plan=_staged(policy, num_stages),
      wants=_wants(policy, given),
      objective=_filled(algorithm.objective, given),
      loss=_loss(algorithm, config),
      needs=algorithm.needs,
  )


def _wants(policy, given) -> tuple[str, ...]:
  """Returns what the policy takes of a run's context.

  Trees are branched by the policy that grew them, so that APPO's influence of a
  token measures rounding alone: it is asked for by name or left out.
  """
  known = set(options.keywords(policy)) if policy else set()
  if not {'variant', 'influence_decay'} & set(given):
    known -= {'current_log_probs'}
  return tuple(name for name in CONTEXT if name in known)


def _filled(function, given: Mapping[str, Any]):
  """Returns the function with those of the given options that it has."""
  known = options.of(function)
  return functools.partial(
      function, **{n: value for n, value in given.items() if n in known})


def _policy(algorithm, config, num_backbones, given, vocab_size):
  """Returns the branch policy with its options, None without one."""
  if config.branch_policy and config.selection:
    raise ValueError('--selection is short for a --branch_policy; give one')
  name = config.branch_policy or _SELECTIONS.get(config.selection)
  policy = POLICIES[name] if name else algorithm.branch_policy
  sizes = _given_sizes(algorithm, policy, config)
  if policy is None or sizes.get('num_branch_points') == 0:
    return None
  known = options.of(policy)
  for name in ('num_branch_points', 'num_forks'):
    if name in known and name in algorithm.defaults:
      sizes.setdefault(name, algorithm.defaults[name])
  if options.unwrap(policy) in _SHARED_OUT:
    points = known['num_branch_points'].default
    points = sizes.get('num_branch_points', points)
    sizes['max_per_path'] = -(-points // num_backbones)
  if 'vocab_size' in known and vocab_size is not None:
    sizes['vocab_size'] = vocab_size
  terse = {name: value for name, value in _TERSE.items()
           if config.model is None and name in known
           and known[name].default > value}
  chosen = {name: value for name, value in given.items() if name in known}
  return functools.partial(policy, **terse | sizes | chosen)


def _given_sizes(algorithm, policy, config) -> dict[str, int]:
  """Returns M and K - 1 where the config has them, for a policy that does."""
  flags = {'num_branch_points': 'num_branch_points', 'num_forks': 'group_size'}
  known = {} if policy is None else options.of(policy)
  sizes = {}
  for name, flag in flags.items():
    value = getattr(config, flag)
    if value is None:
      continue
    if policy is None:
      raise ValueError(f'{algorithm.name} branches at the root alone; leave'
                       f' --{flag} out, or add a --branch_policy')
    if name not in known:
      raise ValueError(
          f'--{flag} is no option of {algorithm.name}, whose branch policy has'
          f' {", ".join(sorted(known)) or "none"}')
    sizes[name] = value - (flag == 'group_size')
  if policy is None and config.num_stages is not None:
    raise ValueError(f'{algorithm.name} branches at the root alone; leave'
                     ' --num_stages out, or add a --branch_policy')
  return sizes


def _staged(policy, num_stages):
  """Returns the policy as it is called once a stage."""
  if policy is None or num_stages == 1:
    return policy
  if algorithms.num_stages(policy) > 1:
    return policy
  return branching.recursive(policy, num_stages)


def _refuse_unknown(algorithm, parts, given):
  known = {name for part in parts if part is not None
           for name in options.of(part)}
  for name in given:
    if name not in known:
      holders = ', '.join(sum(table_options()[name].holders.values(), []))
      raise ValueError(
          f'--{name} is no option of {algorithm.name} but of {holders}; leave'
          ' it out')


def _refuse_alone(algorithm, policy, num_backbones):
  """Refuses a budget that grows one path a task, with nothing to compare."""
  if num_backbones == 1 and policy is None and 'value head' not in (
      algorithm.needs):
    raise ValueError(
        f'{algorithm.name} compares the trajectories of a task with each other,'
        ' and one backbone without forks is alone: raise --num_backbones'
    )
  total = options.of(policy).get('num_rollouts') if policy else None
  if total is not None:
    checks.at_least('num_rollouts', total.default, num_backbones,
                    f' (num_backbones = {num_backbones} come first)')
    if 'value head' not in algorithm.needs:
      checks.at_least('num_rollouts', total.default, 2, ' (one has nothing to '
                      'be compared with)')


def _loss(algorithm, config) -> learner.LossConfig:
  """Returns the loss's scalars, the algorithm's where the config has None."""
  names = [field.name for field in dataclasses.fields(learner.LossConfig)]
  values = {n: algorithm.defaults[n] for n in names if n in algorithm.defaults}
  values |= {n: getattr(config, n) for n in names
             if getattr(config, n, None) is not None}
  if 'value head' not in algorithm.needs:
    values['value_coef'] = 0.0
  if values['reducer'] == 'sequence_sum_norm':
    # Tokens of the longest path: a constant, so that length is no discount.
    values['sequence_norm'] = float(config.turn_limit * config.action_length)
  return learner.LossConfig(**values)


def check(method: Method) -> None:
  """Refuses option values that a part of the method cannot take.

  What a function checks of its scalars it checks when it is traced; so it is
  traced here, on the shape of a tree, before anything costs time.

  Raises:
    ValueError: by the part that takes the option.
  """
  tree = tree_lib.empty((2, 4, 4))
  token, node = np.zeros((2, 4, 4), np.float32), np.zeros((2, 4), np.float32)
  arrays = {'value head': {'values': token},
            'implicit reward': {'implicit_rewards': token},
            'golden trajectory': {'golden': node.astype(bool)},
            'selection slope': {'a2': np.float32(0)}}
  given = {name: array for need in method.needs
           for name, array in arrays.get(need, {}).items()}
  jax.eval_shape(method.credit, tree, **given)
  jax.eval_shape(method.objective, token, token, token, mask=token > 0)
  if method.plan is not None:
    context = {'threshold': np.float32(0), 'key': jax.random.key(0),
               'values': node, 'design': depths.unknown(),
               'current_log_probs': token, 'whitespace_mask': token > 0}
    jax.eval_shape(
        method.plan, tree, **{name: context[name] for name in method.wants})
