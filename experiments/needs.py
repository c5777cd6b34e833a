"""What some algorithms need besides the trees of an update, and its making.

A critic's values, an implicit reward's log-ratios, golden trajectories of tasks
in which every rollout failed, predictions from earlier updates.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import advantages
from bpo_jax import algorithms
from bpo_jax import branching
from bpo_jax import designs
from bpo_jax import golden
from bpo_jax import learner
from bpo_jax import masked
from bpo_jax import options
from bpo_jax import predictors
from bpo_jax import preferences
from bpo_jax import returns
from bpo_jax import tokenizers
from bpo_jax import tree as trees
from bpo_jax import types
from bpo_jax import variance
from experiments import assembly
from experiments import configs
from experiments import methods
from experiments import warm_start

_GOLDEN = 2**32 - 2  # Its draws; apart from those of the warm start.
_DOUBT = 0.02  # About what is predicted to be certain.
_FIRST_RHO = 0.5  # Trust in siblings before anything is learnt,
_PRIOR = 1.0  # held with this weight, in squared reward units.
_FORGETTING = 0.95  # Per update, of what rho is learnt from.


class Given(NamedTuple):
  """What an update goes on with.

  Attributes:
    tree: the trees, with golden trajectories where there are any.
    arrays: what the estimator takes besides, by argument.
    value_targets: [B, N, T] for the value head, None without one.
    state: with what was learnt on the side.
    metrics: by name.
  """

  tree: trees.Tree
  arrays: Mapping[str, Any]
  value_targets: Any
  state: learner.TrainState
  metrics: Mapping[str, float]


def bare(tree: trees.Tree) -> trees.Tree:
  """Returns the tree without the sets of allowed tokens, which are large."""
  return tree.replace(allowed=None)


def _keep(given: Given, **learnt: Any) -> Given:
  """Puts what was learnt where the next update finds it."""
  auxiliary = {**given.state.auxiliary, **learnt}
  return given._replace(state=given.state._replace(auxiliary=auxiliary))


class Needs:
  """Makes what a method needs, update by update."""

  def __init__(self, config: configs.TrainConfig, agent: assembly.Agent,
               method: methods.Method):
    """Compiles nothing yet; a golden method fits its searcher here."""
    self._config, self._agent, self._method = config, agent, method
    self._outputs = learner.make_outputs_fn(
        assembly.learning_model(config, agent), config.temperature)
    self._observe = jax.jit(predictors.update)
    credit = options.of(method.credit)
    if 'selection slope' in method.needs:
      self._slope = jax.jit(functools.partial(
          advantages.selection_slope,
          **{n: credit[n].default for n in ('unit', 'node_values')}))
    # A rho that was given stays.
    self._learns_rho = (
        options.unwrap(method.credit) is advantages.bpo_rb
        and config.rho is None)
    if self._learns_rho:
      self._baseline_sums = jax.jit(functools.partial(
          advantages.baseline_sums, node_values=credit['node_values'].default))
    if 'whitespace_mask' in method.wants:
      self._whitespace = tokenizers.whitespace(agent.tokenizer)
    self._plan = jax.jit(self._make_plan)
    self._add_variances = jax.jit(variance.update)
    self._targets = jax.jit(self._make_targets)
    if 'implicit reward' in method.needs:
      self._preference_loss = learner.weighted_log_likelihood()
      self._preference_step = learner.make_update_fn(
          agent.model, assembly.make_optimizer(config), self._preference_loss,
          config.temperature)
    if 'golden trajectory' in method.needs:
      self._expert = warm_start.make_expert(agent, noise=0.0)

  def plan(self, state: learner.TrainState, key: jax.Array, tree: trees.Tree
           ) -> types.BranchPlan:
    """Returns where the method forks the trees of an update next.

    Args:
      state: that the trees were grown with.
      key: for this stage alone; consumed.
      tree: as it is.
    """
    current = None
    if 'current_log_probs' in self._method.wants:
      current = self._outputs(
          state.params, tree, self._config.max_tokens).log_probs
    return self._plan(
        bare(tree), state.branch_threshold, state.statistics,
        key, current, self._design(state))

  def _make_plan(
      self, tree, threshold, statistics, key, current_log_probs, design):
    wants = self._method.wants
    makers = {
        'threshold': lambda: threshold,
        'key': lambda: key,
        'values': lambda: self._predicted(statistics, tree),
        'current_log_probs': lambda: current_log_probs,
        'design': lambda: design,
        'whitespace_mask': lambda: jnp.asarray(self._whitespace)[tree.tokens],
    }
    return self._method.plan(tree, **{n: makers[n]() for n in wants})

  def _design(self, state):
    """Returns where trees of earlier updates recommend to fork, or None."""
    if 'design' not in self._method.wants:
      return None
    chosen = options.of(self._method.plan)
    return designs.next_design(
        state.auxiliary['variance_sums'], **self._trust(state),
        **{n: chosen[n].default for n in ('num_rollouts', 'explore')})

  def _trust(self, state):
    """Returns the credit's rho, by its name: given, or learnt for each level.

    Of earlier updates alone. Nothing for a credit that has no rho.
    """
    if self._learns_rho:
      sums = state.auxiliary['baseline_sums']
      rho = (sums[0] + _FIRST_RHO * _PRIOR) / (sums[1] + _PRIOR)
      return {'rho': jax.device_get(jnp.clip(rho, 0, 1))}
    rho = options.of(self._method.credit).get('rho')
    return {} if rho is None else {'rho': rho.default}

  def _predicted(self, statistics, tree):
    """Returns the success that earlier updates predict, [B, N]."""
    values = predictors.predict(statistics, tree)
    if options.unwrap(self._method.plan) is branching.trace_budget:
      # What never succeeded so far is unlikely, not impossible: at 0 TRACE
      # would see no mixed outcome anywhere and leave all of its budget.
      return jnp.clip(values, _DOUBT, 1 - _DOUBT)
    return values

  def give(self, state: learner.TrainState, tree: trees.Tree,
           tasks: Sequence[Any]) -> Given:
    """Returns what the update goes on with, before its first gradient."""
    given = Given(tree, {}, None, state, {})
    if 'anchors' in self._method.needs:
      algorithms.check_anchors(self._method.name, tree)
    for need, make in (('golden trajectory', self._golden),
                       ('value head', self._critic),
                       ('selection slope', self._selection_slope),
                       ('implicit reward', self._implicit_reward)):
      if need in self._method.needs:
        given = make(given, tasks)
    if 'design' in self._method.wants:
      given = self._seen(given)
    return self._learnt_rho(given) if self._learns_rho else given

  def observe(self, statistics: predictors.Statistics, tree: trees.Tree
              ) -> predictors.Statistics:
    """Returns the statistics that have seen the trees of an update."""
    return self._observe(statistics, bare(tree))

  def _critic(self, given: Given, tasks) -> Given:
    """Adds the value head's values, and what it is to be trained towards."""
    values = self._outputs(
        given.state.params, given.tree, self._config.max_tokens).values
    targets = self._targets(bare(given.tree), values)
    return given._replace(
        arrays={**given.arrays, 'values': values}, value_targets=targets)

  def _seen(self, given: Given) -> Given:
    """Adds the trees to what the next design is made of."""
    auxiliary = given.state.auxiliary
    return _keep(given, variance_sums=self._add_variances(
        auxiliary['variance_sums'], bare(given.tree)))

  def _learnt_rho(self, given: Given) -> Given:
    """Adds the trust in siblings that earlier updates suggest, by level."""
    trust = self._trust(given.state)
    sums = given.state.auxiliary['baseline_sums']
    new = self._baseline_sums(bare(given.tree), **trust)
    given = _keep(given, baseline_sums=_FORGETTING * sums + new)
    told = {f'baseline/rho_{level}': float(rho)
            for level, rho in enumerate(trust['rho']) if level}
    return given._replace(
        arrays={**given.arrays, **trust},
        metrics={**given.metrics, **told})

  def _selection_slope(self, given: Given, tasks) -> Given:
    """Adds the slope of the batch before; this one's is for the next."""
    before = given.state.auxiliary['selection_slope']
    given = _keep(
        given, selection_slope=jnp.stack(self._slope(bare(given.tree))))
    return given._replace(
        arrays={**given.arrays, 'a2': masked.divide(*before)})

  def _make_targets(self, tree, values):
    """Returns the lambda-returns, with the scalars of the estimator."""
    chosen = options.of(self._method.credit)
    scalars = {n: chosen[n].default for n in ('discount', 'lambda_')}
    on_trees = options.unwrap(self._method.credit) is advantages.tree_gae
    return advantages.lambda_returns(
        tree, values, node_weighting='split' if on_trees else 'uniform',
        **scalars)

  def _implicit_reward(self, given: Given, tasks) -> Given:
    """Trains the second policy on pairs, then reads its rewards off."""
    tree, config = given.tree, self._config
    second = given.state.auxiliary['implicit_reward']
    old, size = tree.behaviour_log_probs, config.max_tokens
    ratios = self._outputs(second.params, tree, size).log_probs - old
    beta = config.preference_beta
    credit = preferences.trajectory_dpo(tree, ratios, beta=beta)
    # Divided by the rows as well; a step of Adam does not see the scale.
    if np.any(credit.advantages):  # Else no two returns differ.
      batches = learner.make_batches(
          tree, credit, size, layout=self._preference_loss.layout)
      second, _ = self._preference_step(second, batches, config.learning_rate)
      ratios = self._outputs(second.params, tree, size).log_probs - old
    # Untrained it differs by rounding, which a z-score would blow up.
    ratios = ratios * (int(second.update) > 0)
    return _keep(given, implicit_reward=second)._replace(
        arrays={**given.arrays, 'implicit_rewards': beta * ratios})

  def _golden(self, given: Given, tasks) -> Given:
    """Hangs the searcher's success into trees where every rollout failed."""
    total = np.asarray(returns.leaf_returns(given.tree))
    solved = options.of(self._method.credit)['success_threshold'].default
    # Off the leaves it is 0, which is none of theirs.
    failed = ~(np.asarray(trees.is_leaf(given.tree))
               & (total >= solved)).any(axis=1)
    rng = np.random.default_rng(
        [self._config.seed, _GOLDEN, int(given.state.update)])
    show = lambda task: warm_start.demonstrate(
        self._agent, self._expert, [task], rng, self._agent.grower.max_turns)
    chains = [show(task) if is_failed else None
              for task, is_failed in zip(tasks, failed)]
    tree, mask = golden.graft(given.tree, chains)
    log_probs = self._outputs(
        given.state.params, tree, self._config.max_tokens).log_probs
    return given._replace(
        tree=golden.teacher_forced(tree, mask, log_probs),
        arrays={**given.arrays, 'golden': mask},
        metrics={**given.metrics, 'golden/tasks': float(mask.any(1).sum())})


def first_token_entropies(tree: trees.Tree) -> np.ndarray:
  """Returns the entropy at every decision of the first trajectories, nats.

  What follows an action token at once is inside an action that was forked,
  unless a whole turn, whose anchor is known, ended without an observation.
  """
  last = np.maximum(np.sum(tree.token_mask, axis=-1, keepdims=True) - 1, 0)
  ends = np.take_along_axis(np.asarray(tree.action_mask), last, -1)[..., 0]
  parents = np.asarray(tree.parents)
  is_head = ends & (np.asarray(tree.anchor) == types.UNKNOWN_ANCHOR)
  inside = (parents >= 0) & np.take_along_axis(
      is_head, np.maximum(parents, 0), 1)
  decisions = tree.action_mask[..., 0] & (tree.birth == 0) & ~inside
  return np.asarray(tree.entropies[..., 0])[decisions]
