"""Slow, recursive float64 versions of what the library does with arrays."""

import numpy as np


class Node:
  """One node of one tree, with links both ways."""

  def __init__(self, tree, b, n):
    self.index = n
    self.length = int(tree.token_mask[b, n].sum())
    self.mask = [bool(m) for m in tree.action_mask[b, n]]
    self.entropies = [float(e) for e in tree.entropies[b, n]]
    self.log_probs = [float(p) for p in tree.behaviour_log_probs[b, n]]
    self.reward = float(tree.rewards[b, n])
    self.birth = int(tree.birth[b, n])
    self.parent = None
    self.children = []

  @property
  def leaves(self):
    """All leaves at or below."""
    if not self.children:
      return [self]
    return [leaf for child in self.children for leaf in child.leaves]

  @property
  def path(self):
    """Ancestors from the root to the node itself."""
    return (self.parent.path if self.parent else []) + [self]

  @property
  def siblings(self):
    """The others of its group."""
    if self.parent is None:
      return []
    return [child for child in self.parent.children if child is not self]

  @property
  def heir(self):
    """The child that was laid down first."""
    return min(self.children, key=lambda c: (c.birth, c.index))

  @property
  def total(self):
    """Return of the path from the root."""
    return sum(node.reward for node in self.path)

  @property
  def spans(self):
    """For every token, the number of the action it belongs to, or None."""
    spans, number = [], -1
    for i, inside in enumerate(self.mask):
      number += inside and (i == 0 or not self.mask[i - 1])
      spans.append(number if inside else None)
    return spans

  @property
  def num_actions(self):
    """Number of actions."""
    return 1 + max((s for s in self.spans if s is not None), default=-1)


def roots(tree):
  """Returns the root Node of every tree; None for a tree of padding."""
  result = []
  for b in range(len(tree.parents)):
    nodes = {n: Node(tree, b, n) for n in np.flatnonzero(tree.node_mask[b])}
    for n, node in nodes.items():
      parent = int(tree.parents[b, n])
      if parent >= 0:
        node.parent = nodes[parent]
        nodes[parent].children.append(node)
    result.append(nodes.get(0))
  return result


def walk(node):
  """Yields a node and everything below it."""
  if node is not None:
    yield node
    for child in node.children:
      yield from walk(child)


def per_node(tree, function):
  """Returns function(node) for every real node, [B, N] float64."""
  out = np.zeros(np.shape(tree.parents))
  for b, root in enumerate(roots(tree)):
    for node in walk(root):
      out[b, node.index] = function(node)
  return out


def node_value(node, aggregate, discount=1.0):
  """Reward-to-go of a node."""
  if not node.children:
    return node.reward
  value = lambda child: node_value(child, aggregate, discount)
  if aggregate == 'own':
    rest = value(node.heir)
  elif aggregate == 'split_mean':
    rest = np.mean([value(child) for child in node.children])
  else:
    rest = np.average([value(child) for child in node.children],
                      weights=[len(child.leaves) for child in node.children])
  return node.reward + discount * rest


def path_value(node, aggregate):
  """Mean return of the paths through a node."""
  return node_value(node, aggregate) + node.total - node.reward


def split_weight(node):
  """Weight of a node when children share their parent's alike."""
  if node.parent is None:
    return 1.0
  return split_weight(node.parent) / len(node.parent.children)


def credit(tree, per_token):
  """Returns [2, B, N, T]: per_token(node, token) -> (advantage, weight)."""
  out = np.zeros((2, *np.shape(tree.tokens)))
  for b, root in enumerate(roots(tree)):
    for node in walk(root):
      for t, inside in enumerate(node.mask):
        if inside:
          out[:, b, node.index, t] = per_token(node, t)
  out[0][out[1] == 0] = 0
  return out


def leaf_credit(tree, advantage, path_weighting):
  """Credit of training every path; advantage(returns) -> list."""
  def per_token(node, _):
    root = node.path[0]
    values = advantage([leaf.total for leaf in root.leaves])
    total = weighted = 0.0
    for leaf, value in zip(root.leaves, values):
      if node in leaf.path:
        length = max(sum(sum(n.mask) for n in leaf.path), 1)
        weight = 1.0 if path_weighting == 'token' else 1.0 / length
        total, weighted = total + weight, weighted + weight * value
    return weighted / total, total
  return credit(tree, per_token)


def rloo(tree, path_weighting='token'):
  """Leave-one-out over leaves."""
  def advantage(values):
    if len(values) < 2:
      return [0.0]
    return [v - (sum(values) - v) / (len(values) - 1) for v in values]
  return leaf_credit(tree, advantage, path_weighting)


def grpo(tree, scale='std', path_weighting='token', epsilon=1e-6):
  """Mean and standard deviation over leaves."""
  def advantage(values):
    if len(values) < 2:
      return [0.0]
    spread = np.std(values, ddof=1) + epsilon if scale == 'std' else 1.0
    return [(v - np.mean(values)) / spread for v in values]
  return leaf_credit(tree, advantage, path_weighting)


def member_above(node, root_group=True):
  """Nearest node at or above with siblings, or None."""
  for above in reversed(node.path):
    if above.siblings and (root_group or above.parent.parent is not None):
      return above
  return None


def sibling_advantage(node, aggregate):
  """Value of a node less the mean of its siblings'."""
  others = [path_value(sibling, aggregate) for sibling in node.siblings]
  return path_value(node, aggregate) - np.mean(others)


def prefix_terms(node, token, aggregate, root_group):
  """Yields (distance, advantage) of the branch points down the backbone."""
  distance = node.num_actions - node.spans[token]
  while node.children:
    heir = node.heir
    if heir.siblings and (root_group or node.parent is not None):
      yield distance, sibling_advantage(heir, aggregate)
    distance += heir.num_actions
    node = heir


def node_weight(node, node_weighting, incumbent, root_group=True):
  """Weight of a node's tokens."""
  member = member_above(node, root_group)
  if incumbent == 'drop' and member is not None:
    if member.birth < max(s.birth for s in member.parent.children):
      return 0.0
  return split_weight(node) if node_weighting == 'split' else 1.0


def bpo(tree, lambda_=0.95, prefix_credit='nearest', root_group=True,
        node_weighting='uniform', node_values='own', incumbent='keep'):
  """Leave-one-out among siblings."""
  def advantage(node, token):
    member = member_above(node, root_group)
    if member is not None:
      return sibling_advantage(member, node_values)
    terms = [lambda_ ** d * a for d, a in
             prefix_terms(node, token, node_values, root_group)]
    if prefix_credit in ('none', 'all_rows') or not terms:
      return 0.0
    return {'nearest': lambda x: x[0], 'mean': np.mean, 'sum': sum}[
        prefix_credit](terms)
  return credit(tree, lambda node, token: (
      advantage(node, token),
      node_weight(node, node_weighting, incumbent, root_group)))


def shrunk_baseline(member, rho, aggregate):
  """b = rho LOO + (1 - rho) b of the member above."""
  others = np.mean([path_value(s, aggregate) for s in member.siblings])
  above = member_above(member.parent)
  if above is None:
    return others
  level = sum(bool(node.siblings) for node in member.path) - 1
  trust = float(rho if np.ndim(rho) == 0 else rho[min(level, len(rho) - 1)])
  return trust * others + (1 - trust) * shrunk_baseline(above, rho, aggregate)


def bpo_rb(tree, rho=0.5, node_weighting='split', node_values='split_mean',
           incumbent='keep'):
  """Means below less shrunk baselines."""
  def advantage(node, _):
    member = member_above(node)
    if member is None:
      return 0.0
    return (path_value(node, node_values)
            - shrunk_baseline(member, rho, node_values))
  return credit(tree, lambda node, token: (
      advantage(node, token), node_weight(node, node_weighting, incumbent)))


def leave_one_out_mean(values, parents, mask):
  """Mean over the others of a group, [N] float64; 0 without others."""
  out = np.zeros(len(values))
  for i in np.flatnonzero(mask):
    others = [float(values[j]) for j in np.flatnonzero(mask)
              if j != i and parents[j] == parents[i] >= 0]
    out[i] = np.mean(others) if others else 0.0
  return out


def decisions(root, backbones_only=True):
  """Yields (node, token, position, host) of every decision of a tree."""
  for node in sorted(walk(root), key=lambda node: node.index):
    above = sum(n.length for n in node.path[:-1])
    for t, inside in enumerate(node.mask):
      if not inside or (t > 0 and node.mask[t - 1]):
        continue
      if backbones_only and node.birth:
        continue
      if t > 0:
        yield node, t, above + t, node
      elif node.parent is not None and node.parent.heir is node:
        yield node, t, above, node.parent


def action_entropy(node, token, statistic):
  """Entropy of the first token, or summed over the action."""
  stop = token + 1
  while statistic == 'action' and stop < len(node.mask) and node.mask[stop]:
    stop += 1
  return sum(node.entropies[token:stop])


def greedy(ranked, num_slots, min_spacing, cap=None):
  """Returns (node index, offset) taken greedily from ranked decisions."""
  taken = []
  for node, token, position, host in ranked:
    on_path = [p for _, _, p, h in taken
               if h in host.path or host in h.path]
    near = any(abs(position - p) < min_spacing for p in on_path)
    full = cap is not None and len(on_path) >= cap
    if len(taken) < num_slots and not near and not full:
      taken.append((node, token, position, host))
  return [(node.index, token) for node, token, _, _ in taken]
