"""Aliases, sentinels and Protocols; the bottom of the import order."""

from collections.abc import Sequence
from typing import Any, Protocol

import chex
import jax

Array = jax.Array
ArrayTree = Any  # Any pytree of arrays.

NO_PARENT = -1  # In `Tree.parents`, for the root and for padding.
UNKNOWN_ANCHOR = -1  # In `Tree.anchor`, for a node of unknown observation.
UNUSED_SLOT = -1  # In `BranchPlan.node`, for a slot without a branch point.
WORD = 32  # Tokens of the vocabulary that share a uint32 of `Tree.allowed`.


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Credit:
  """What every token of a tree is credited with; carries no gradient.

  Attributes:
    advantages: reward units; 0 off the tree's `action_mask`.
    weights: the sum of the weights of the paths through the token; 0 off the
      tree's `action_mask`.
  """

  advantages: chex.Array  # [B, N, T] float32
  weights: chex.Array  # [B, N, T] float32


@chex.dataclass(frozen=True, mappable_dataclass=False)
class BranchPlan:
  """Where to fork each tree, and how often.

  Attributes:
    node: index of the node to fork in; -1 for an unused slot.
    offset: a fork keeps the node's tokens below it; 0 forks before the node.
    count: number of forks; 0 for an unused slot.
    unspent: forks that the policy's budget allowed and the plan leaves out;
      None where the policy does not say.
  """

  node: chex.Array  # [B, M] int32
  offset: chex.Array  # [B, M] int32
  count: chex.Array  # [B, M] int32
  unspent: chex.Array | None = None  # [B] int32


class Environment(Protocol):
  """A batch of forkable sandboxes as a rollout sees it, states by handle.

  Attributes:
    codec: between text and tokens; its `observation_length` bounds a turn.
  """

  codec: Any

  def reset(self, tasks: Sequence[Any], seeds: Sequence[int]
            ) -> tuple[Any, list[list[int]]]:
    """Returns the first states of R tasks, and the tokens of their prompts."""

  def step(self, handles: Array, actions: Array, active: Array,
           lengths: Array | None = None) -> Any:
    """Steps R states, under jit or not; the old states stay as they were."""

  def release(self, handles: Sequence[int]) -> None:
    """Drops a reference of each handle."""

  def raise_pending(self) -> None:
    """Raises, once, what could not be raised while stepping."""


class Estimator(Protocol):
  """Says which token of a tree gets how much credit."""

  def __call__(self, tree: Any, **scalars: Any) -> Credit:
    """Returns the credit of a `Tree`."""


class BranchPolicy(Protocol):
  """Says where a tree is to be forked next."""

  def __call__(self, tree: Any, **scalars: Any) -> BranchPlan:
    """Returns the plan of a `Tree`."""
