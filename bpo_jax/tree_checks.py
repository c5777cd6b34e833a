"""What a batch of trees must be, checked on the host.

Every message names the field, what was expected, what came, and where.
"""

import functools
from typing import Any

import jax
import numpy as np

from bpo_jax import types

# Squares of contrasts between returns stay finite in float32 far below it.
_MAX_RETURN = 1e15
DTYPES = dict(
    tokens='int32', token_mask='bool', action_mask='bool',
    behaviour_log_probs='float32', entropies='float32', parents='int32',
    node_mask='bool', rewards='float32', terminal='bool', truncated='bool',
    birth='int32', anchor='int32', allowed='uint32')
PER_TOKEN = ('tokens', 'token_mask', 'action_mask', 'behaviour_log_probs',
             'entropies')
_ROUNDING = 1e-6  # Nats, of a softmax in float32.
_MIN_LOG_PROB = -1e4  # Nothing that was drawn is less likely, but faults are.


def validate(tree: Any) -> None:
  """Refuses what is no `bpo_jax.Tree`, see `Tree.validate`.

  Raises:
    ValueError: naming the field, what was expected, what came, and where.
  """
  _check_arrays(tree)
  _check_shape_of_trees(tree)
  _check_nodes(tree)
  _check_tokens(tree)


def refuse_empty(shape: tuple[int, ...]) -> None:
  """Refuses a batch in which there is nothing at all.

  Raises:
    ValueError: if any of B, N and T is 0.
  """
  if 0 in shape:
    raise ValueError(
        'tree: expected at least one tree, node and token (padding may be '
        f'all of them), got [B, N, T] of shape {tuple(shape)}')


def num_sets(action_mask: np.ndarray) -> int:
  """Returns U, the tokens up to the last action of any node, at least 1.

  Args:
    action_mask: [..., T] bool.
  """
  axes = tuple(range(np.ndim(action_mask) - 1))
  places = np.flatnonzero(np.any(action_mask, axis=axes))
  return int(places[-1]) + 1 if len(places) else 1


def _check_arrays(tree):
  """Checks ranks, shapes and dtypes against those of `tokens`."""
  fields = {name: getattr(tree, name) for name in DTYPES}
  if fields['allowed'] is None:
    del fields['allowed']
  for name, value in fields.items():
    if not isinstance(value, (np.ndarray, jax.Array)):
      raise ValueError(f'{name}: expected an array of dtype {DTYPES[name]}, '
                       f'got {type(value).__name__}')
  shape = np.shape(tree.tokens)
  if len(shape) != 3:
    raise ValueError(f'tokens: expected shape [B, N, T], got {shape}; make a '
                     'batch of builders by bpo_jax.tree.stack([builder])')
  refuse_empty(shape)
  for name, value in fields.items():
    dtype = DTYPES[name]
    if str(value.dtype) != dtype:
      raise ValueError(f'{name}: expected dtype {dtype}, got {value.dtype}')
    expected = shape if name in PER_TOKEN else shape[:2]
    got = np.shape(value)
    if name == 'allowed':
      if len(got) != 4 or not got[3] or not 0 < got[2] <= shape[2]:
        raise ValueError('allowed: expected shape [B, N, U, W] of 1 to '
                         f'{shape[2]} tokens and at least one word, got {got}')
      expected, got = shape[:2], got[:2]
    if got != expected:
      raise ValueError(f'{name}: expected shape {expected}, got {got}')


def refuse(bad, name, values, expected):
  """Raises ValueError with the first entry of `values` where `bad` holds."""
  where = np.argwhere(bad)
  if len(where):
    axes = ('tree', 'node', 'token')
    first = tuple(where[0].tolist())
    index = ', '.join(f'{axis} {i}' for axis, i in zip(axes, first))
    raise ValueError(
        f'{name}: expected {expected}, got {np.asarray(values)[first]}; first '
        f'at {index}, {len(where)} in all')


def _check_shape_of_trees(tree):
  """Checks which nodes are real, and who is whose parent."""
  parents, real = np.asarray(tree.parents), np.asarray(tree.node_mask)
  refuse_parents = functools.partial(refuse, name='parents', values=parents)
  index = np.arange(parents.shape[1])
  root = real & (parents == types.NO_PARENT)
  has_parent = parents != types.NO_PARENT
  refuse_parents(has_parent & ~real, expected='NO_PARENT on padding')
  refuse_parents(root & (index > 0), expected='the root at node 0 alone')
  refuse_parents((real.any(axis=1) & ~root[:, 0])[:, None],
                 expected='a root at node 0')
  refuse_parents(has_parent & ((parents < 0) | (parents >= index)),
                 expected='an index from 0 to below the node\'s own')
  refuse_parents(has_parent & ~_at_parent(real, parents),
                 expected='a real node, not padding')


def _check_nodes(tree):
  """Checks what is recorded of every node."""
  parents, real = np.asarray(tree.parents), np.asarray(tree.node_mask)
  terminal, truncated, rewards, birth, anchor = map(np.asarray, (
      tree.terminal, tree.truncated, tree.rewards, tree.birth, tree.anchor))
  has_parent = parents != types.NO_PARENT
  for name, ended in (('terminal', terminal), ('truncated', truncated)):
    refuse(ended & ~real, name, ended, 'False on padding')
    refuse(has_parent & _at_parent(ended, parents), 'parents', parents,
           f'no child of a {name} node')
  refuse(terminal & truncated, 'truncated', truncated,
         'False where terminal is True')
  refuse(real & ~np.isfinite(rewards), 'rewards', rewards, 'finite rewards')
  totals = _path_totals(rewards, parents, real)
  refuse(np.abs(totals) > _MAX_RETURN, 'rewards', totals,
         f'returns of paths between -{_MAX_RETURN:g} and {_MAX_RETURN:g}')
  refuse(real & (birth < 0), 'birth', birth, '0 or more')
  refuse(real & ~has_parent & (birth > 0), 'birth', birth, '0 at the root')
  refuse(has_parent & (birth < _at_parent(birth, parents)), 'birth', birth,
         'at least that of the parent')
  refuse(real & (anchor < types.UNKNOWN_ANCHOR), 'anchor', anchor,
         f'{types.UNKNOWN_ANCHOR} or more')


def _path_totals(rewards, parents, real):
  """Returns the sum of rewards from the root to every node, float64."""
  totals = np.where(real, rewards, 0).astype(np.float64)
  for node in range(1, totals.shape[1]):
    above = np.maximum(parents[:, node], 0)
    totals[:, node] += np.where(
        parents[:, node] < 0, 0, totals[np.arange(len(totals)), above])
  return totals


def _check_tokens(tree):
  """Checks the masks over tokens and what is recorded of each action."""
  tokens, mask, action = map(
      np.asarray, (tree.tokens, tree.token_mask, tree.action_mask))
  real = np.asarray(tree.node_mask)[..., None]
  refuse(mask & ~real, 'token_mask', mask, 'False on padding nodes')
  starts_late = mask & ~np.pad(mask, ((0, 0), (0, 0), (1, 0)),
                               constant_values=True)[..., :-1]
  refuse(starts_late, 'token_mask', mask, 'a prefix of the node')
  refuse(action & ~mask, 'action_mask', action, 'a subset of token_mask')
  refuse(mask & (tokens < 0), 'tokens', tokens, '0 or more at real tokens')
  for name, sign, bound in (('behaviour_log_probs', 1, 'at most'),
                            ('entropies', -1, 'at least')):
    values = np.asarray(getattr(tree, name))
    refuse(action & ~np.isfinite(values), name, values,
           'finite values at action tokens')
    refuse(action & (sign * values > _ROUNDING), name, values,
           f'{bound} 0 at action tokens')
    refuse(~action & (values != 0), name, values, '0 off action tokens')
  values = np.asarray(tree.behaviour_log_probs)
  refuse(action & (values < _MIN_LOG_PROB), 'behaviour_log_probs', values,
         f'at least {_MIN_LOG_PROB:g} at action tokens')
  if tree.allowed is not None:
    _check_allowed(tokens, action, np.asarray(tree.allowed))


def _check_allowed(tokens, action, allowed):
  """Checks that every token drawn is one that could be drawn."""
  num_tokens = allowed.shape[2]
  refuse(action & (np.arange(action.shape[2]) >= num_tokens), 'action_mask',
         action, f'no action beyond the {num_tokens} tokens of `allowed`')
  tokens, action = tokens[..., :num_tokens], action[..., :num_tokens]
  word, bit = np.divmod(np.maximum(tokens, 0), types.WORD)
  last = allowed.shape[-1] - 1
  words = np.take_along_axis(allowed, np.minimum(word, last)[..., None], -1)
  is_allowed = (word <= last) & ((words[..., 0] >> bit.astype('u4')) & 1 > 0)
  refuse(action & ~is_allowed, 'tokens', tokens,
         'a token of `allowed` at action tokens')


def _at_parent(values, parents):
  return np.take_along_axis(values, np.maximum(parents, 0), axis=1)
