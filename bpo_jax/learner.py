"""One optimiser step from packed rows: loss, exact micro-batches, update."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bpo_jax import checks
from bpo_jax import masked
from bpo_jax import memory
from bpo_jax import objectives
from bpo_jax import options
from bpo_jax import packing
from bpo_jax import predictors
from bpo_jax import sharding
from bpo_jax import tree as trees
from bpo_jax import tree_checks
from bpo_jax import types
from bpo_jax.models import lora
from bpo_jax.models import transformer


# Nats: parts a choice between two tokens from a foregone one, until there are
# earlier updates to take a quantile of.
_FIRST_THRESHOLD = 0.5


class TrainState(NamedTuple):
  """Everything of the learner that must survive a preemption."""

  params: dict
  optimizer_state: optax.OptState
  update: jax.Array  # [] int32, optimiser steps taken
  rng_key: jax.Array  # [] key, fixed for the run; folded in, never advanced
  tasks_seen: jax.Array  # [] int32, place in the stream of training tasks
  environment_steps: jax.Array  # [] int32
  generated_tokens: jax.Array  # [] int32
  branch_threshold: jax.Array  # [] float32, nats; from earlier updates alone
  statistics: predictors.Statistics  # of earlier updates, to predict success by
  auxiliary: dict  # what an algorithm learns on the side, by name


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW under a global-norm clip.

  Attributes:
    max_gradient_norm: the gradient is scaled down to this norm.
    weight_decay: decoupled, per step and unit of learning rate.
    beta_1: decay of the mean of gradients.
    beta_2: decay of the mean of their squares.
  """

  max_gradient_norm: float = 1.0
  weight_decay: float = 0.0
  beta_1: float = 0.9
  beta_2: float = 0.95


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """The clipped surrogate, what is added to it, and how it becomes one number.

  Attributes:
    clip_epsilon_low: the ratio is clipped at 1 - this.
    clip_epsilon_high: the ratio is clipped at 1 + this.
    kl_coef: weight of the divergence from the reference policy.
    kl_estimator: 'k1', 'k2' or 'k3', see `objectives.kl`.
    entropy_coef: weight of the entropy bonus.
    value_coef: weight of the critic's squared error; 0 without a critic.
    value_clip: reward units that a value may move in an update; None for any.
    reducer: from tokens to one number, see `objectives.reduce`.
    sequence_norm: tokens that the sum of a sequence is divided by; for the
      reducer 'sequence_sum_norm' alone.
  """

  clip_epsilon_low: float = 0.2
  clip_epsilon_high: float = 0.2
  kl_coef: float = 0.0
  kl_estimator: objectives.KlEstimator = 'k2'
  entropy_coef: float = 0.0
  value_coef: float = 0.0
  value_clip: float | None = None
  reducer: objectives.Reducer = 'token_mean'
  sequence_norm: float | None = None

  def __post_init__(self):
    checks.one_of('kl_estimator', self.kl_estimator, objectives.KlEstimator)
    objectives.check_reducer(self.reducer, self.sequence_norm)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns AdamW without its learning rate, which `update` is given."""
  return optax.chain(
      optax.clip_by_global_norm(config.max_gradient_norm),
      optax.scale_by_adam(b1=config.beta_1, b2=config.beta_2),
      optax.add_decayed_weights(config.weight_decay),
  )


def warmup_cosine(progress: float, warmup: float, floor: float = 0.1) -> float:
  """The factor of the peak learning rate at a share of the budget.

  Rises linearly over the first `warmup` share, then falls by half a cosine to
  `floor`. A function of the share and not of updates, so that a budget in steps
  or tokens anneals alike.

  Args:
    progress: share of the budget spent, in [0, 1].
    warmup: share over which it rises, in [0, 1).
    floor: the factor at the end.
  """
  if progress < warmup:
    return (progress + 1e-3) / (warmup + 1e-3)
  x = (progress - warmup) / (1.0 - warmup)
  return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * x))


def init_state(
    params: dict, optimizer: optax.GradientTransformation, rng_key: jax.Array
) -> TrainState:
  """Returns the state of a run that has done nothing yet.

  Where the parameters have adapters, the optimiser knows these alone.

  Raises:
    MemoryError: if the device has too little for it; it says what to change.
  """
  zero = lambda: jnp.zeros((), jnp.int32)
  trained, _ = lora.split(params)
  with memory.explained_step(trained):
    optimizer_state = optimizer.init(trained)
  return TrainState(
      params, optimizer_state, zero(), rng_key, zero(), zero(), zero(),
      jnp.asarray(_FIRST_THRESHOLD, jnp.float32), predictors.init(), {},
  )


class BatchFacts(NamedTuple):
  """What a micro-batch has to know of the whole batch."""

  denominator: float  # Of the reducer, over all micro-batches.
  value_centre: float  # Mean value target, reward units; 0 without a critic.


# By name, [R, L] each: what each token adds to the loss.
Terms = dict[str, jax.Array]

# Takes what `packing.token_outputs` gives for the policy, the rows, the
# log-probs of the reference policy (None without one) and the facts of the
# batch. Returns the terms, and metrics as sums and denominators that add up.
TermsFn = Callable[
    [packing.TokenOutputs, packing.PackedRows, jax.Array | None, BatchFacts],
    tuple[Terms, dict[str, objectives.Metric]],
]


@dataclasses.dataclass(frozen=True)
class Loss:
  """What is minimised: terms per token, and how they become one number.

  Attributes:
    terms: per-token terms and metrics of a micro-batch.
    reducer: see `objectives.reduce`.
    norm: tokens, for the reducer 'sequence_sum_norm' alone.
    by_token: whether a token's terms depend on that token alone, so that rows
      may hold whole trees; else a row has to hold one sequence.
  """

  terms: TermsFn
  reducer: objectives.Reducer = 'token_mean'
  norm: float | None = None
  by_token: bool = False

  def __post_init__(self):
    objectives.check_reducer(self.reducer, self.norm)

  @property
  def layout(self) -> packing.Layout:
    """How trees are laid out: whole, or by paths where sequences matter."""
    by_token = self.by_token and self.reducer == 'token_mean'
    return 'trees' if by_token else 'paths'


def _imitation_terms(outputs, rows, reference_log_probs, facts):
  del reference_log_probs, facts
  return {'loss/imitation': -outputs.log_probs}, _entropy_metric(outputs, rows)


# The negative log-likelihood of the rows' actions, by weight.
imitation_loss = Loss(_imitation_terms, by_token=True)


def weighted_log_likelihood(
    reducer: objectives.Reducer = 'path_weighted', norm: float | None = None
) -> Loss:
  """Returns -sum of coefficient x log-prob, the coefficients in `advantages`.

    loss = -sum_i w_i c_i log pi_i / denominator

  For losses whose gradient is linear in those of the log-probs, with
  coefficients computed beforehand from the whole batch, such as trajectory DPO
  or a logistic margin: c_i is the derivative of the objective by log pi_i where
  the policy stands now. A loss that is not a sum over tokens stays exact under
  micro-batches that way.

  Args:
    reducer: what the sum is divided by; with weights of 1 'path_weighted'
      divides by the number of rows that train something.
    norm: tokens, for the reducer 'sequence_sum_norm' alone.
  """

  def terms(outputs, rows, reference_log_probs, facts):
    del reference_log_probs, facts
    coefficients = masked.fill(rows.advantages, rows.action_mask)
    values = -coefficients * outputs.log_probs
    return {'loss/likelihood': values}, _entropy_metric(outputs, rows)

  return Loss(terms, reducer, norm, by_token=True)


def make_policy_loss(
    config: LossConfig,
    objective: Callable[..., jax.Array] | None = None,
    *,
    by_token: bool | None = None,
) -> Loss:
  """Returns the surrogate with its KL, entropy and value terms.

  Args:
    config: scalars.
    objective: `(log_probs, behaviour_log_probs, advantages, mask=mask)` to what
      is to be maximised at each token, where the mask has all action tokens of
      a row's path; None for the surrogate clipped as in `config`.
    by_token: whether what the objective says of a token depends on that token
      alone, so that rows may hold whole trees; None for what is known, of the
      clipped surrogate that it does and of any other that it may not.
  """
  clip = {
      'clip_epsilon_low': config.clip_epsilon_low,
      'clip_epsilon_high': config.clip_epsilon_high,
  }
  if objective is None:
    objective = functools.partial(objectives.clipped_surrogate, **clip)

  def terms(outputs, rows, reference_log_probs, facts):
    log_probs = outputs.log_probs
    advantages = masked.fill(rows.advantages, rows.action_mask)
    policy = log_probs, rows.behaviour_log_probs, advantages
    losses = {'loss/surrogate': -objective(*policy, mask=rows.path_mask)}
    mask = rows.action_mask & (rows.weights != 0)
    metrics = objectives.ratio_metrics(*policy, mask, **clip)
    metrics |= _entropy_metric(outputs, rows)
    if config.kl_coef:
      checks.given('reference', reference_log_probs, 'kl_coef',
                   'the parameters of the reference policy')
      divergence = objectives.kl(
          log_probs, reference_log_probs, config.kl_estimator, rows.action_mask
      )
      losses['loss/kl'] = config.kl_coef * divergence
    if config.entropy_coef:
      losses['loss/entropy'] = -config.entropy_coef * outputs.entropies
    if config.value_coef:
      losses['loss/value'] = _value_term(config, outputs, rows)
      metrics |= objectives.value_metrics(
          outputs.values, rows.value_targets, mask, facts.value_centre
      )
    return losses, metrics

  if by_token is None:
    by_token = options.unwrap(objective) is objectives.clipped_surrogate
  return Loss(terms, config.reducer, config.sequence_norm, by_token)


def _value_term(config, outputs, rows):
  """Returns the weighted error of the critic at each token."""
  checks.given('values', outputs.values, 'value_coef',
               'a network with a value head')
  checks.given('value_targets', rows.value_targets, 'value_coef',
               'rows packed with the returns that values are to predict')
  return config.value_coef * objectives.value_loss(
      outputs.values, rows.value_targets, rows.old_values,
      value_clip=config.value_clip, mask=rows.action_mask,
  )


def _entropy_metric(outputs, rows):
  return {'policy/entropy': objectives.reduce(
      outputs.entropies, rows.weights, rows.action_mask)}


def make_batches(
    tree: trees.Tree,
    credit: types.Credit,
    max_tokens: int,
    *,
    layout: packing.Layout = 'trees',
    row_length: int | None = None,
    num_shards: int = 1,
    value_targets: np.ndarray | None = None,
    old_values: np.ndarray | None = None,
    debug: bool = False,
) -> list[packing.PackedRows]:
  """Returns the micro-batches of a batch of trees.

  Args:
    tree: B trees.
    credit: advantages and weights of their tokens, [B, N, T] each.
    max_tokens: bound on the tokens of a micro-batch, padding included.
    layout: 'trees' runs each token once; 'paths' repeats what siblings share,
      for losses that look at whole sequences.
    row_length: longest row; None chooses it from the trees.
    num_shards: devices that rows are parted over; `max_tokens` is for each.
    value_targets: [B, N, T] float, returns that a critic is to predict, reward
      units; None without a critic.
    old_values: [B, N, T] float, its predictions before the update, reward
      units; None where its step is not bound.
    debug: whether to check the trees and that the rest is finite at action
      tokens, which costs a pass over them.

  Raises:
    ValueError: if the rows cannot be packed; with `debug`, if a tree is none or
      a number is not finite, saying where.
  """
  if debug:
    tree.validate()
    numbers = {
        'advantages': credit.advantages, 'weights': credit.weights,
        'value_targets': value_targets, 'old_values': old_values,
    }
    for name, values in numbers.items():
      if values is not None:
        tree_checks.refuse(
            np.asarray(tree.action_mask) & ~np.isfinite(values), name, values,
            'finite numbers at action tokens')
    weights = np.where(tree.action_mask, credit.weights, 0)
    checks.at_least('weights', float(np.min(weights)), 0)
  if row_length is None and layout == 'trees':
    row_length = packing.row_length_of(tree, max_tokens, num_shards)
  rows = packing.pack(
      tree, credit, row_length, layout=layout, value_targets=value_targets,
      old_values=old_values
  )
  return packing.micro_batches(rows, max_tokens, num_shards=num_shards)


def make_update_fn(
    model: transformer.Transformer,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    temperature: float = 1.0,
) -> Callable[..., tuple[TrainState, dict[str, float]]]:
  """Returns one optimiser step over a batch of any number of micro-batches.

  A micro-batch contributes its sums; the denominator is that of the whole
  batch, computed before the first gradient, so how it is split changes nothing.
  The gradient is clipped once, after all of it has been added up.

  Args:
    model: the policy network; the state lies on its mesh, see
      `sharding.place`.
    optimizer: as by `make_optimizer`.
    loss: what is minimised.
    temperature: of the behaviour policy.

  Returns:
    `update(state, batches, learning_rate, reference=None)` to the next state,
    whose arrays replace those of `state`, and metrics by name. `reference` are
    the parameters of the reference policy. It raises a MemoryError that says
    what to change where a micro-batch is too much for the device.
  """
  accumulate = _make_accumulate(model, loss, temperature)
  apply = _make_apply(optimizer, model.mesh)

  def update(state, batches, learning_rate, reference=None):
    if loss.layout == 'paths':
      _check_paths(batches, loss)
    facts = batch_facts(batches, loss.reducer, loss.norm)
    trained, frozen = lora.split(state.params)
    with memory.explained_step(trained):
      gradient = jax.tree.map(
          lambda x: jnp.zeros(x.shape, x.dtype, device=_sharding(x)), trained)
    parts = []
    with memory.explained_rows(model, batches):
      for rows in batches:
        rows = sharding.place_rows(model.mesh, rows)
        gradient, part = accumulate(
            gradient, trained, frozen, reference, rows, facts
        )
        parts.append(part)
      parts = jax.device_get(parts)
    # What stays does not pass through the step, which consumes its arguments.
    with memory.explained_step(trained):
      state, norms = apply(
          state._replace(params=trained), gradient, learning_rate)
      norms = {name: float(norm) for name, norm in norms.items()}
    state = state._replace(params=lora.join(state.params, frozen))
    return state, _add_up(parts, facts) | norms

  return update


def _check_paths(batches, loss) -> None:
  """Refuses rows with more than a path in them to a loss of sequences."""
  for rows in batches:
    lengths = np.sum(rows.token_mask, axis=1, keepdims=True)
    if np.any(rows.token_mask & (rows.end != lengths)):
      what = (f'reducer {loss.reducer}' if loss.by_token
              else 'a loss that is not by_token and may look at sequences')
      raise ValueError(
          f"{what}: expected rows of layout='paths', which hold a sequence"
          ' each, got rows of trees')


def _sharding(x):
  """Returns where an array lies; None for one that is yet on the host."""
  return getattr(x, 'sharding', None)


def make_gradient_fn(
    model: transformer.Transformer, loss: Loss, temperature: float = 1.0
) -> Callable[..., tuple[dict, tuple[dict, dict]]]:
  """Returns the gradient of what a micro-batch adds to the loss; not jitted.

  Args:
    model: the policy network.
    loss: what is minimised.
    temperature: of the behaviour policy.

  Returns:
    `gradient(trained, frozen, reference, rows, facts)` to the gradient by
    `trained`, and the sums of the terms and the metrics by name. The parameters
    are as `lora.split` parts them; `reference` are those of the reference
    policy, or None; `facts` are those of the whole batch.
  """

  def micro_loss(trained, frozen, reference, rows, facts):
    params = lora.join(trained, frozen)
    outputs = packing.token_outputs(model, params, rows, temperature)
    reference_log_probs = None
    if reference is not None:
      reference_log_probs, _ = packing.token_log_probs(
          model, reference, rows, temperature
      )
    terms, metrics = loss.terms(outputs, rows, reference_log_probs, facts)
    sums = {
        name: objectives.reduce(
            term, rows.weights, rows.action_mask, loss.reducer, loss.norm
        )[0]
        for name, term in terms.items()
    }
    total = masked.divide(sum(sums.values()), facts.denominator)
    return total, (sums, metrics)

  return jax.grad(micro_loss, has_aux=True)


def _make_accumulate(model, loss, temperature):
  """Returns what adds the gradient of a micro-batch to that of the others."""
  gradient_fn = make_gradient_fn(model, loss, temperature)

  @functools.partial(jax.jit, donate_argnums=0)
  def accumulate(gradient, trained, frozen, reference, rows, facts):
    new, part = gradient_fn(trained, frozen, reference, rows, facts)
    total = jax.tree.map(jnp.add, gradient, new)
    return sharding.constrain(model.mesh, total), part

  return accumulate


def _make_apply(optimizer, mesh):
  """Returns the step along a gradient, which tells norms by name."""

  @functools.partial(jax.jit, donate_argnums=0)
  def apply(state, gradient, learning_rate):
    step, optimizer_state = optimizer.update(
        gradient, state.optimizer_state, state.params
    )
    params = jax.tree.map(
        lambda p, s: p - learning_rate * s, state.params, step
    )
    state = state._replace(
        params=params,
        optimizer_state=optimizer_state,
        update=state.update + 1,
    )
    state = sharding.constrain(mesh, state)
    return state, {
        'gradient/norm': optax.global_norm(gradient),
        'parameters/norm': optax.global_norm(params),
    }

  return apply


def _add_up(parts, facts) -> dict[str, float]:
  """Returns the batch's losses and metrics from those of its micro-batches."""
  if not parts:
    return {}
  losses, metrics = zip(*parts)
  values = {
      name: _ratio(sum(part[name] for part in losses), facts.denominator)
      for name in losses[0]
  }
  for name in metrics[0]:
    sums, counts = zip(*(part[name] for part in metrics))
    values[name] = _ratio(sum(sums), sum(counts))
  return values


def _ratio(total, denominator) -> float:
  return float(total) / float(denominator) if denominator else 0.0


def batch_facts(
    batches: Sequence[packing.PackedRows],
    reducer: objectives.Reducer = 'token_mean',
    norm: float | None = None,
) -> BatchFacts:
  """Returns what each micro-batch has to know of all, added up in float64.

  Args:
    batches: all micro-batches of an update.
    reducer: whose denominator it is, see `objectives.reduce`.
    norm: tokens, for the reducer 'sequence_sum_norm' alone.
  """
  rows = [
      np.asarray(_denominators(b.weights, b.action_mask, reducer, norm))
      for b in batches
  ]
  denominator = sum(np.sum(row, dtype=np.float64) for row in rows)
  targets = [
      b.value_targets[b.action_mask & (b.weights != 0)]
      for b in batches
      if b.value_targets is not None
  ]
  count = sum(map(len, targets))
  total = sum(np.sum(t, dtype=np.float64) for t in targets)
  return BatchFacts(float(denominator), float(total / count) if count else 0.0)


_denominators = jax.jit(objectives.denominators, static_argnums=(2, 3))


def make_outputs_fn(
    model: transformer.Transformer, temperature: float = 1.0
) -> Callable[..., packing.TokenOutputs]:
  """Returns what says of every action token of trees what a policy says of it.

  For what an estimator or an objective has to know beforehand: values of a
  critic, log-probs of a reference or of the current policy, teacher-forced
  log-probs of a golden trajectory.

  Args:
    model: the network.
    temperature: of the behaviour policy.

  Returns:
    `outputs(params, tree, max_tokens)` to log-probs, entropies and, with a
    value head, values, [B, N, T] float32 NumPy arrays, 0 off the tree's action
    tokens.
  """
  compute = jax.jit(
      functools.partial(packing.token_outputs, model, temperature=temperature)
  )

  def outputs(params, tree, max_tokens):
    shape = np.shape(tree.tokens)
    nothing = np.zeros(shape, np.float32)
    credit = types.Credit(advantages=nothing, weights=nothing)
    fields = [np.zeros(shape, np.float32) for _ in range(3)]
    num_shards = sharding.num_row_parts(model.mesh)
    for rows in make_batches(tree, credit, max_tokens, num_shards=num_shards):
      index = rows.source[rows.action_mask]
      with memory.explained_rows(model, [rows]):
        placed = sharding.place_rows(model.mesh, rows)
        computed = jax.device_get(compute(params, placed))
      where = np.nonzero(rows.action_mask)  # A mesh may have added rows.
      for field, values in zip(fields, computed):
        if values is not None:
          field.ravel()[index] = values[where]
    has_values = model.config.value_head
    return packing.TokenOutputs(*fields[:2], fields[2] if has_values else None)

  return outputs
