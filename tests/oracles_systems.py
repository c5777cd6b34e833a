"""Slow, recursive float64 versions of the estimators of branching systems."""

import statistics

import numpy as np
import oracles


def relative(values, epsilon=1e-6):
  """Group-relative advantages of a list; 0 for a group of one."""
  if len(values) < 2:
    return [0.0] * len(values)
  return [(v - np.mean(values)) / (np.std(values, ddof=1) + epsilon)
          for v in values]


def relative_by_node(nodes, values, epsilon=1e-6):
  """node -> group-relative advantage."""
  return dict(zip(nodes, relative(list(values), epsilon)))


def row_start(node):
  """First node of the row that a node is on: of a fork or a trajectory."""
  while node.parent.parent is not None and node.parent.heir is node:
    node = node.parent
  return node


def row_end(node):
  """Leaf that a node's row ends in."""
  return row_end(node.heir) if node.children else node


def row_of(leaf):
  """Nodes of the row that ends in a leaf."""
  start = row_start(leaf)
  return leaf.path[leaf.path.index(start):]


def is_first(node):
  """Whether a node is on a first trajectory."""
  return node.parent is not None and row_start(node).parent.parent is None


def is_branch_point(node):
  """Whether a node below the root is forked."""
  return node.parent is not None and len(node.children) > 1


def point_left(node):
  """Child of the last branch point above, at or above the node, or None."""
  for above in reversed(node.path):
    if above.parent is not None and is_branch_point(above.parent):
      return above
  return None


def point_ahead(node):
  """Next branch point along the row, the node included, or None."""
  while not is_branch_point(node):
    if not node.children:
      return None
    node = node.heir
  return node


def length(nodes):
  """Action tokens of nodes."""
  return sum(sum(node.mask) for node in nodes)


def row_credit(tree, advantage, weight):
  """Credit by node; the root weighs 0."""
  def per_token(node, _):
    if node.parent is None:
      return 0.0, 0.0
    return advantage(node), weight(node)
  return oracles.credit(tree, per_token)


def cbpo(tree, cbv_clip=0.5, cbv_scale=0.2, epsilon=1e-6,
         path_weighting='sequence'):
  """Group-relative, scaled where the forks of a point disagree."""
  points = [node for root in oracles.roots(tree) for node in oracles.walk(root)
            if is_branch_point(node)]
  spreads = [np.std([row_end(c).total for c in p.children]) for p in points]
  mean = np.mean(spreads) if spreads else 0.0
  spread = np.std(spreads) if spreads else 0.0

  def z(point):
    if spread < 1e-6:
      return 0.0
    own = np.std([row_end(child).total for child in point.children])
    return (own - mean) / spread

  def base(node):
    leaves = node.path[0].leaves
    return relative([x.total for x in leaves], epsilon)[
        leaves.index(row_end(node))]

  def final(child):
    a = base(child)
    limit = cbv_clip * abs(a)
    return a + cbv_scale * np.sign(a) * np.clip(z(child.parent), -limit, limit)

  def advantage(node):
    left, ahead = point_left(node), point_ahead(node)
    before = ahead and np.mean([base(child) for child in ahead.children])
    if left is None:
      return base(node) if ahead is None else before
    return final(left) if ahead is None else (final(left) + before) / 2

  def weight(node):
    if path_weighting == 'token':
      return 1.0
    return 1.0 / length(row_of(row_end(node)))
  return row_credit(tree, advantage, weight)


def appo(tree, epsilon=1e-6):
  """First trajectories and forks as two groups."""
  def advantage(node):
    leaves = node.path[0].leaves
    groups = {}
    for first in (True, False):
      members = [leaf for leaf in leaves if is_first(leaf) == first]
      groups.update(relative_by_node(
          members, [leaf.total for leaf in members], epsilon))
    forks = [groups[leaf] for leaf in node.leaves if not is_first(leaf)]
    return groups[row_end(node)] + (np.mean(forks) if forks else 0.0)
  return row_credit(tree, advantage, lambda node: float(is_first(node)))


def arpo_soft(tree, epsilon=1e-6):
  """Every path a row."""
  return oracles.grpo(tree, epsilon=epsilon)


def arpo_hard(tree, epsilon=1e-6):
  """Every token once."""
  return oracles.credit(tree, lambda node, _: (np.mean(
      [relative([x.total for x in node.path[0].leaves], epsilon)[
          node.path[0].leaves.index(leaf)] for leaf in node.leaves]), 1.0))


class Branpo:
  """One tree as BranPO sees it."""

  def __init__(self, root, threshold, epsilon):
    self.threshold = threshold
    starts = [child for child in root.children if child.birth == 0]
    wins = [self.wins(start) for start in starts]
    self.mixed = 0.5 < np.mean(wins) < 1 if wins else False
    used = [leaf for leaf in root.leaves if leaf is not root
            and self.used(row_start(leaf))]
    tails = [leaf for leaf in used if self.member(leaf) is not None]
    self.tails = relative_by_node(
        tails, [leaf.total for leaf in tails], epsilon)
    rewards = {start: [] for start in starts}
    for leaf in used:
      top = leaf.path[1]
      rewards[root.heir if top.birth else top].append(leaf.total)
    self.bases = relative_by_node(
        starts, list(map(np.mean, rewards.values())), epsilon)

  def wins(self, node):
    return row_end(node).total >= self.threshold

  def verdict(self, fork):
    """1 if a fork beats its parent's heir, -1 if it loses, else 0."""
    rival = fork.parent.heir
    if self.wins(fork) != self.wins(rival):
      return 1 if self.wins(fork) else -1
    steps = [sum(n.num_actions for n in row_end(x).path) for x in (fork, rival)]
    if self.wins(fork) and self.mixed:
      return int(np.sign(steps[1] - steps[0]))
    return 0

  def kept(self, fork):
    return self.verdict(fork) != 0

  def used(self, start):
    """Whether a row is trained: a first trajectory, or a fork that is kept."""
    is_fork = start.parent.parent is not None or start.birth > 0
    return not is_fork or self.kept(start)

  @staticmethod
  def member(node):
    """First node of the tail that a node is in, or None on a base."""
    found = point_left(node)
    if found is None and node.parent is not None:
      top = node.path[1]
      is_forked = any(child.birth for child in top.parent.children)
      if is_forked and (top.birth or top.parent.heir is top):
        found = top
    return found

  def rejected(self, member):
    if member.parent.heir is member:
      at_root = member.parent.parent is None  # Of other first rollouts, too.
      return any(self.verdict(x) > 0 for x in member.siblings
                 if x.birth or not at_root)
    return self.verdict(member) < 0

  def credit(self, node, token):
    if node.parent is None:
      return 0.0, 0.0
    start = row_start(node)
    if not self.used(start):
      return 0.0, 0.0
    member = self.member(node)
    if member is None:
      return self.bases[start], 1.0
    advantage = self.tails[row_end(node)]
    tail = node.path[node.path.index(member):-1]
    first = not any(n.num_actions for n in tail) and node.spans[token] == 0
    if self.rejected(member) and first and advantage > 0:
      return 0.0, 1.0
    return advantage, 1.0


def branpo(tree, success_threshold=0.8, epsilon=1e-6):
  """Bases, and tails that contrast."""
  seen = {}

  def per_token(node, token):
    root = node.path[0]
    if root not in seen:
      seen[root] = Branpo(root, success_threshold, epsilon)
    return seen[root].credit(node, token)
  return oracles.credit(tree, per_token)


def gcpo(tree, golden, success_threshold=0.5, epsilon=1e-6,
         contrast='surrogate', contrast_beta=1.0):
  """GRPO, or a golden path against failures."""
  def per_token(node, marked):
    leaves = node.path[0].leaves
    teacher = [leaf for leaf in leaves if marked[leaf.index]]
    rollouts = [leaf for leaf in leaves if not marked[leaf.index]]
    failed = not any(leaf.total >= success_threshold for leaf in rollouts)
    if not failed:
      values = relative_by_node(
          rollouts, [leaf.total for leaf in rollouts], epsilon)
    elif teacher and rollouts:
      values = {**{leaf: 1 / len(teacher) for leaf in teacher},
                **{leaf: -1 / len(rollouts) for leaf in rollouts}}
      if contrast == 'logistic_margin':
        margin = sum(v * mean_log_prob(leaf) for leaf, v in values.items())
        slope = contrast_beta / (1 + np.exp(contrast_beta * margin))
        values = {leaf: slope * v for leaf, v in values.items()}
    else:
      values = dict.fromkeys(leaves, 0.0)
    total = weighted = 0.0
    for leaf in node.leaves:
      if leaf in values:
        weight = 1 / max(length(leaf.path), 1)
        total, weighted = total + weight, weighted + weight * values[leaf]
    return (weighted / total if total else 0.0), total

  out = np.zeros((2, *np.shape(tree.tokens)))
  for b, marked in enumerate(np.asarray(golden)):
    part = oracles.credit(tree, lambda node, _: per_token(node, marked))
    out[:, b] = part[:, b]
  return out


def mean_log_prob(leaf):
  """Length-normalised log-likelihood of a path."""
  found = [p for node in leaf.path
           for p, inside in zip(node.log_probs, node.mask) if inside]
  return sum(found) / max(len(found), 1)


def golden_leaf(tree, scores):
  """[B, N] bool: the leaf of the largest score, where that is above 0."""
  marked = np.zeros(np.shape(tree.parents), bool)
  for b, root in enumerate(oracles.roots(tree)):
    if root is not None:
      best = max(root.leaves, key=lambda leaf: scores[b, leaf.index])
      marked[b, best.index] = scores[b, best.index] > 0
  return marked


def tree_grpo(tree, epsilon=1e-6, path_weighting='token'):
  """Against the leaves of one child of the root, and against all."""
  def per_token(node, _):
    root = node.path[0]
    inter = relative_by_node(
        root.leaves, [leaf.total for leaf in root.leaves], epsilon)
    total = weighted = 0.0
    for leaf in node.leaves:
      value = inter[leaf]
      if leaf.parent is not None:
        own = leaf.path[1].leaves
        value += relative_by_node(own, [x.total for x in own], epsilon)[leaf]
      weight = 1.0
      if path_weighting == 'sequence':
        weight = 1 / max(length(leaf.path), 1)
      total, weighted = total + weight, weighted + weight * value
    return weighted / total, total
  return oracles.credit(tree, per_token)


def treerl(tree, path_weighting='token'):
  """Global and local gain."""
  value = lambda node: np.mean([leaf.total for leaf in node.leaves])

  def per_token(node, _):
    weight = sum(1.0 if path_weighting == 'token'
                 else 1 / max(length(leaf.path), 1) for leaf in node.leaves)
    step = oracles.member_above(node)
    if step is None:
      return 0.0, weight
    gain = (value(step) - value(node.path[0])) + (
        value(step) - value(step.parent))
    return gain / np.sqrt(len(step.leaves)), weight
  return oracles.credit(tree, per_token)


def spo_tree(tree, max_probability=0.9, node_values='split_mean',
             node_weighting='uniform'):
  """Gain of a segment, on tokens that were open."""
  out = oracles.credit(tree, lambda node, _: (
      _gain(node, node_values), oracles.node_weight(
          node, node_weighting, 'keep')))
  log_probs = np.where(tree.action_mask, tree.behaviour_log_probs, 0)
  with np.errstate(divide='ignore'):
    return out * (log_probs <= np.log(max_probability))


def _gain(node, aggregate):
  step = oracles.member_above(node)
  if step is None:
    return 0.0
  return (oracles.path_value(step, aggregate)
          - oracles.path_value(step.parent, aggregate))


def _surprisals(tree, b, birth, unit):
  """Sorted surprisals of the candidates of one tree and stage."""
  found = []
  for node in oracles.walk(oracles.roots(tree)[b]):
    for t, inside in enumerate(node.mask):
      start = t == 0 or not node.mask[t - 1]
      if inside and node.birth == birth and (unit == 'token' or start):
        found.append((node, _surprisal(node, t, unit)))
  return found


def _surprisal(node, t, unit):
  """Of one token, or of the whole action that begins with it."""
  drawn = -node.log_probs[t]
  if unit == 'action' and node.mask[t + 1:t + 2] == [True]:
    # In the order, and the precision, in which equal sums come out equal.
    drawn = float(np.float32(drawn) + np.float32(_surprisal(node, t + 1, unit)))
  return drawn


def sipo(tree, a2=0.0, w=1.0, unit='token', node_values='own',
         node_weighting='uniform'):
  """Leave-one-out among siblings, the incumbent's value corrected."""
  trees = {}

  def corrected(b, node):
    value = oracles.path_value(node, node_values)
    parent = node.parent
    forked = parent.heir is node and any(
        sibling.birth > node.birth for sibling in node.siblings)
    drawn = node
    while drawn.children and True not in drawn.mask:
      drawn = drawn.heir
    if not forked or True not in drawn.mask:
      return value
    token = drawn.mask.index(True)
    own = _surprisal(drawn, token, unit)
    if (b, node.birth) not in trees:
      trees[b, node.birth] = [
          s for _, s in _surprisals(tree, b, node.birth, unit)]
    others = np.array(trees[b, node.birth])
    rank = (others < own).sum() + ((others == own).sum() + 1) / 2
    blom = statistics.NormalDist().inv_cdf(
        (rank - 0.375) / (len(others) + 0.25))
    return value - w * float(a2) * blom

  out = np.zeros((2, *np.shape(tree.tokens)))
  for b in range(len(out[0])):
    def advantage(node):
      step = oracles.member_above(node)
      if step is None:
        return 0.0
      return corrected(b, step) - np.mean(
          [corrected(b, sibling) for sibling in step.siblings])
    out[:, b] = oracles.credit(tree, lambda node, _: (
        advantage(node), oracles.node_weight(
            node, node_weighting, 'keep')))[:, b]
  return out


def selection_slope(tree, unit='token', node_values='own'):
  """Sums of Z Y and of Z^2 over the candidates of first trajectories."""
  covariance = variance = 0.0
  for b in range(len(tree.parents)):
    found = _surprisals(tree, b, 0, unit)
    if found:
      s = np.array([s for _, s in found])
      y = np.array([oracles.path_value(node, node_values) for node, _ in found])
      z = (s - s.mean()) / (s.std() + 1e-6)
      covariance += np.sum(z * (y - y.mean()))
      variance += np.sum(z * z)
  return covariance, variance
