"""Recursive float64 versions of credit by values, by steps and by weights."""

import numpy as np
import oracles


def credit(tree, of_tree):
  """Returns [2, B, N, T]: of_tree(b, root)(node, token) at action tokens."""
  out = np.zeros((2, *np.shape(tree.tokens)))
  for b, root in enumerate(oracles.roots(tree)):
    per_token = root and of_tree(b, root)
    for node in oracles.walk(root):
      for t in np.flatnonzero(node.mask):
        out[:, b, node.index, t] = per_token(node, t)
  out[0][out[1] == 0] = 0
  return out


def over_paths(tree, of_path, weight):
  """Credit of every path: weight(leaf), and of_path(b, leaf) {(n, t): A}."""
  def of_tree(b, root):
    paths = [(weight(leaf), of_path(b, leaf)) for leaf in root.leaves]

    def per_token(node, t):
      terms = [(w, path[node.index, t]) for w, path in paths
               if (node.index, t) in path]
      total = sum(w for w, _ in terms)
      return sum(w * a for w, a in terms) / total, total
    return per_token
  return credit(tree, of_tree)


def action_tokens(leaf):
  """Returns [(node, token)] of the actions on the path to a leaf."""
  return [(node, t) for node in leaf.path for t in np.flatnonzero(node.mask)]


def length_weight(path_weighting):
  """Returns what a path weighs, by its leaf."""
  return lambda leaf: (1.0 if path_weighting == 'token' else
                       1.0 / max(len(action_tokens(leaf)), 1))


def path_gae(leaf, values, discount, lambda_):
  """Sums of temporal differences along one path, {(n, t): A}."""
  tokens = action_tokens(leaf)
  rewards = np.zeros(len(tokens))
  for depth, node in enumerate(leaf.path):
    received = sum(sum(above.mask) for above in leaf.path[:depth + 1]) - 1
    if received >= 0:
      rewards[received] += node.reward
  v = np.array([float(values[n.index, t]) for n, t in tokens] + [0.0])
  delta = rewards + discount * v[1:] - v[:-1]
  return {(n.index, t): sum((discount * lambda_) ** (j - i) * delta[j]
                            for j in range(i, len(tokens)))
          for i, (n, t) in enumerate(tokens)}


def ppo_gae(tree, values, discount=1.0, lambda_=0.95):
  """The mean over the paths through a token."""
  return over_paths(
      tree, lambda b, leaf: path_gae(leaf, values[b], discount, lambda_),
      lambda leaf: 1.0)


def tree_gae(tree, values, discount=1.0, lambda_=0.95):
  """A mean over children at every branching is one by split weights."""
  return over_paths(
      tree, lambda b, leaf: path_gae(leaf, values[b], discount, lambda_),
      oracles.split_weight)


def vineppo(tree, node_values='own'):
  """Differences between the values of branch points."""
  def sampled(member):
    return np.mean([oracles.path_value(s, node_values)
                    for s in member.siblings])

  def ahead(node):
    while node.children:
      node = node.heir
      if node.siblings:
        return sampled(node)
    return node.total

  def per_token(node, _):
    member = oracles.member_above(node)
    advantage = ahead(node) - sampled(member) if member else 0.0
    return advantage, float(node.birth == 0)
  return oracles.credit(tree, per_token)


def standardise(values, scale='std', epsilon=1e-6):
  """Mean and standard deviation of a list; 0 for one value."""
  if len(values) < 2:
    return [0.0] * len(values)
  spread = np.std(values, ddof=1) + epsilon if scale == 'std' else 1.0
  return [(v - np.mean(values)) / spread for v in values]


def leave_one_out(values):
  """Each value less the mean of the others."""
  if len(values) < 2:
    return [0.0]
  return [v - (sum(values) - v) / (len(values) - 1) for v in values]


def grpo_dropped(tree, scale='std', epsilon=1e-6, zero_variance='drop'):
  """Groups of equal returns weigh nothing."""
  del zero_variance
  out = oracles.grpo(tree, scale, epsilon=epsilon)
  for b, root in enumerate(oracles.roots(tree)):
    totals = [leaf.total for leaf in root.leaves] if root else [0.0]
    out[:, b] *= max(totals) - min(totals) > epsilon
  return out


def dr_grpo(tree, zero_variance='keep'):
  """No spread and no length."""
  if zero_variance == 'drop':
    return grpo_dropped(tree, 'none')
  return oracles.grpo(tree, 'none')


def steps(root):
  """Returns the nodes with actions."""
  return [node for node in oracles.walk(root) if any(node.mask)]


def discounted_return(node, discount):
  """Mean over the leaves below of the discounted rewards from a node on."""
  returns = []
  for leaf in node.leaves:
    factor, total = 1.0, node.reward
    for below in leaf.path[len(node.path):]:
      factor *= discount if any(below.mask) else 1.0
      total += factor * below.reward
    returns.append(total)
  return np.mean(returns)


def _with_steps(tree, episode, step, path_weighting):
  """A_E from a list of returns, A_S from step(b, root) -> {index: A}."""
  by_step = [root and step(b, root)
             for b, root in enumerate(oracles.roots(tree))]

  def of_path(b, leaf):
    leaves = leaf.path[0].leaves
    own = episode([x.total for x in leaves])[leaves.index(leaf)]
    return {(n.index, t): own + by_step[b].get(n.index, 0.0)
            for n, t in action_tokens(leaf)}
  return over_paths(tree, of_path, length_weight(path_weighting))


def gigpo(tree, omega=1.0, discount=0.95, scale='std', epsilon=1e-6,
          path_weighting='token'):
  """Groups of steps by the anchor of the state they are taken in."""
  def step(b, root):
    groups = {}
    for node in steps(root):
      anchor = int(tree.anchor[b, node.parent.index]) if node.parent else -1
      if anchor != -1:
        groups.setdefault(anchor, []).append(node)
    return {
        node.index: omega * advantage for group in groups.values()
        for node, advantage in zip(group, standardise(
            [discounted_return(n, discount) for n in group], scale, epsilon))}
  return _with_steps(
      tree, lambda values: standardise(values, scale, epsilon), step,
      path_weighting)


def istar(tree, implicit_rewards, alpha=1.0, episode='grpo', epsilon=1e-6,
          path_weighting='token'):
  """All steps of a tree normalised together."""
  def step(b, root):
    nodes = steps(root)
    rewards = [np.sum(np.float64(implicit_rewards[b, n.index])[n.mask])
               for n in nodes]
    return {node.index: alpha * a for node, a in zip(
        nodes, standardise(rewards, 'std', epsilon))}
  paths = leave_one_out if episode == 'rloo' else standardise
  return _with_steps(tree, paths, step, path_weighting)


def iapo(tree, entropy_share=0.5, epsilon=1e-6, path_weighting='token'):
  """A path's advantage shared out by entropy."""
  def of_path(_, leaf):
    leaves, tokens = leaf.path[0].leaves, action_tokens(leaf)
    own = standardise([x.total for x in leaves], 'std', epsilon)[
        leaves.index(leaf)]
    entropies = np.array([node.entropies[t] for node, t in tokens])
    weights = np.ones(len(tokens))
    if len(tokens) and entropies.mean() > 0:
      weights += entropy_share * (entropies / entropies.mean() - 1)
    return {(node.index, t): own * w for (node, t), w in zip(tokens, weights)}
  return over_paths(tree, of_path, length_weight(path_weighting))
