"""Branching in several stages: forks of forks."""

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax.numpy as jnp

from bpo_jax import checks
from bpo_jax import options as options_lib
from bpo_jax import tree as tree_lib
from bpo_jax import types


def recursive(policy: Callable[..., types.BranchPlan], depth: int
              ) -> Callable[..., types.BranchPlan]:
  """Returns a policy that forks forks, `depth` times when called in turn.

  Every call forks the nodes of a tree's newest stage alone: `policy` with
  birth = max over the tree's nodes of their birth, while that is below `depth`.
  After that the plan is empty and leaves its whole budget unspent. Trees of one
  batch may be in different stages.

  Args:
    policy: a branch policy with the option `birth`.
    depth: stages of branching.

  Returns:
    A policy with the options of `policy`, without `birth`. One that is keyed
    wants a new key at every call.

  Raises:
    ValueError: if `depth` is below 1 or the policy has no option `birth`.
  """
  checks.whole('depth', depth)
  signature = inspect.signature(policy)
  options = dict(signature.parameters)
  if options.pop('birth', None) is None:
    raise ValueError('policy: expected a branch policy with the option birth, '
                     f'got one with {", ".join(signature.parameters)}')

  @functools.wraps(options_lib.unwrap(policy))
  def forks_newest(tree: tree_lib.Tree, *args: Any, **kwargs: Any
                   ) -> types.BranchPlan:
    if 'birth' in kwargs:
      raise ValueError('birth: expected none, for `recursive` forks the newest '
                       f'stage, got {kwargs["birth"]}')
    tree_lib.check_batch(tree)
    stage = jnp.max(jnp.where(tree.node_mask, tree.birth, 0), axis=-1)
    plan = policy(tree, *args, birth=stage, **kwargs)
    return _empty_where(stage >= depth, plan)

  forks_newest.__signature__ = signature.replace(
      parameters=list(options.values()))
  return forks_newest


def _empty_where(done, plan):
  """Returns the plan without the forks of the trees that are done."""
  unspent = plan.unspent
  if unspent is not None:
    unspent = unspent + jnp.where(done, jnp.sum(plan.count, axis=-1), 0)
  done = done[:, None]
  return types.BranchPlan(
      node=jnp.where(done, types.UNUSED_SLOT, plan.node),
      offset=jnp.where(done, 0, plan.offset),
      count=jnp.where(done, 0, plan.count), unspent=unspent)
