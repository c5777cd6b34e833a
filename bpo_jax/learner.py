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

from bpo_jax import objectives
from bpo_jax import packing
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
  """The clipped surrogate and what is added to it.

  Attributes:
    clip_epsilon_low: the ratio is clipped at 1 - this.
    clip_epsilon_high: the ratio is clipped at 1 + this.
    kl_coef: weight of the k3 divergence from the reference policy.
    entropy_coef: weight of the entropy bonus.
  """

  clip_epsilon_low: float = 0.2
  clip_epsilon_high: float = 0.2
  kl_coef: float = 0.0
  entropy_coef: float = 0.0


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
  """Returns the state of a run that has done nothing yet."""
  zero = lambda: jnp.zeros((), jnp.int32)
  return TrainState(
      params, optimizer.init(params), zero(), rng_key, zero(), zero(), zero(),
      jnp.asarray(_FIRST_THRESHOLD, jnp.float32),
  )


# Per-token quantities of one micro-batch by name, [R, L] each. Those named
# `loss/..` add up to what is minimised; the others are only reported.
Terms = dict[str, jax.Array]

# Takes what `token_log_probs` gives for the policy (log-probs and entropies),
# the rows, and the reference policy's log-probs (None without a reference).
LossFn = Callable[
    [jax.Array, jax.Array, packing.PackedRows, jax.Array | None], Terms
]


def imitation_loss(log_probs, entropies, rows, reference_log_probs) -> Terms:
  """Returns the negative log-likelihood of the rows' actions."""
  del rows, reference_log_probs
  return {'loss/imitation': -log_probs, 'policy/entropy': entropies}


def make_policy_loss(
    config: LossConfig,
    objective: Callable[..., jax.Array] | None = None,
) -> LossFn:
  """Returns the surrogate with its KL and entropy terms.

  Args:
    config: scalars.
    objective: `(log_probs, behaviour_log_probs, advantages)` to what is to be
      maximised at each token; None for the surrogate clipped as in `config`.
  """
  if objective is None:
    objective = functools.partial(
        objectives.clipped_surrogate,
        clip_epsilon_low=config.clip_epsilon_low,
        clip_epsilon_high=config.clip_epsilon_high,
    )

  def policy_loss(log_probs, entropies, rows, reference_log_probs):
    log_ratio = log_probs - rows.behaviour_log_probs
    ratio = jnp.exp(log_ratio)
    # Where the clip cuts the gradient off: beyond the bound that the sign of
    # the advantage makes active.
    clipped = jnp.where(
        rows.advantages > 0,
        ratio > 1 + config.clip_epsilon_high,
        (rows.advantages < 0) & (ratio < 1 - config.clip_epsilon_low),
    )
    terms = {
        'loss/surrogate': -objective(
            log_probs, rows.behaviour_log_probs, rows.advantages
        ),
        'policy/entropy': entropies,
        'policy/clip_fraction': clipped.astype(jnp.float32),
        'policy/kl_to_behaviour': jnp.expm1(log_ratio) - log_ratio,
    }
    if config.kl_coef:
      divergence = objectives.kl(log_probs, reference_log_probs, 'k3')
      terms['loss/kl'] = config.kl_coef * divergence
    if config.entropy_coef:
      terms['loss/entropy'] = -config.entropy_coef * entropies
    return terms

  return policy_loss


def make_update_fn(
    model: transformer.Transformer,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    temperature: float = 1.0,
) -> Callable[..., tuple[TrainState, dict[str, float]]]:
  """Returns one optimiser step over a batch of any number of micro-batches.

  The loss is sum(w * l) / sum(w) over all action tokens of the batch, w being
  the credit's weights. A micro-batch contributes its sum; the denominator is
  that of the whole batch, so how it is split changes nothing. The gradient is
  clipped once, after all of it has been added up.

  Args:
    model: the policy network.
    optimizer: as by `make_optimizer`.
    loss_fn: per-token terms.
    temperature: of the behaviour policy.

  Returns:
    `update(state, batches, learning_rate, reference=None)` to the next state,
    whose arrays replace those of `state`, and metrics by name. `reference` are
    the parameters of the reference policy.
  """

  def micro_loss(params, reference, rows, denominator):
    log_probs, entropies = packing.token_log_probs(
        model, params, rows, temperature
    )
    reference_log_probs = None
    if reference is not None:
      reference_log_probs, _ = packing.token_log_probs(
          model, reference, rows, temperature
      )
    terms = loss_fn(log_probs, entropies, rows, reference_log_probs)
    sums = {
        name: objectives.reduce(values, rows.weights, rows.action_mask)[0]
        for name, values in terms.items()
    }
    losses = [total for name, total in sums.items() if name[:5] == 'loss/']
    return sum(losses) / denominator, sums

  @functools.partial(jax.jit, donate_argnums=0)
  def accumulate(gradient, params, reference, rows, denominator):
    new, sums = jax.grad(micro_loss, has_aux=True)(
        params, reference, rows, denominator
    )
    return jax.tree.map(jnp.add, gradient, new), sums

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
    return state, optax.global_norm(gradient), optax.global_norm(params)

  def update(state, batches, learning_rate, reference=None):
    denominator = max(total_weight(batches), 1e-8)
    gradient = jax.tree.map(jnp.zeros_like, state.params)
    parts = []
    for rows in batches:
      gradient, sums = accumulate(
          gradient, state.params, reference, rows, denominator
      )
      parts.append(sums)
    state, norm, size = apply(state, gradient, learning_rate)
    parts = jax.device_get(parts)
    values = {
        name: float(sum(part[name] for part in parts)) / denominator
        for name in (parts[0] if parts else ())
    }
    return state, values | {
        'gradient/norm': float(norm), 'parameters/norm': float(size)
    }

  return update


def total_weight(batches: Sequence[packing.PackedRows]) -> float:
  """Returns the sum of the weights of all action tokens, in float64."""
  return sum(
      float(np.sum(b.weights, where=b.action_mask, dtype=np.float64))
      for b in batches
  )
