"""Slow, recursive float64 versions of the branch policies.

Each takes a tree and the policy's options and returns, for every tree of the
batch, the slots of its plan as (node, offset, count) and its budget.
"""

import math

import numpy as np
import oracles

from bpo_jax.branching import decisions as decisions_lib


class Token:
  """One action token: its node, its place, and what may be forked there."""

  def __init__(self, tree, b, node, offset):
    self.node, self.offset = node, offset
    self.head = head(node)
    self.position = sum(n.length for n in node.path[:-1]) + offset
    self.host = node if offset else node.parent
    self.entropy = node.entropies[offset]
    self.surprisal = -float(tree.behaviour_log_probs[b, node.index, offset])
    self.is_start = offset == 0 or not node.mask[offset - 1]
    self.is_fork_point = self.host is not None and (
        offset > 0 or self.host.heir is node)
    self.slot = (node.index, offset)

  @property
  def siblings(self):
    """Other continuations of the state before the token."""
    return 0 if self.offset else len(self.host.children) - 1


def head(node):
  """The node with which a node's trajectory began."""
  while node.parent is not None and node.parent.heir is node:
    node = node.parent
  return node


def last(node):
  """The leaf at which a node's trajectory ends."""
  while node.children:
    node = node.heir
  return node


def tokens(tree, b, root, birth=None):
  """Action tokens of a stage, in node and token order."""
  stage = birth if np.ndim(birth) == 0 else birth[b]
  return [Token(tree, b, node, t)
          for node in sorted(oracles.walk(root), key=lambda n: n.index)
          if stage is None or node.birth == stage
          for t, inside in enumerate(node.mask) if inside]


def trajectories(all_tokens):
  """Tokens of every trajectory in the order they were drawn, by head."""
  chains = {}
  for token in sorted(all_tokens, key=lambda x: x.position):
    chains.setdefault(token.head.index, []).append(token)
  return dict(sorted(chains.items()))


def forest(tree, birth=None):
  """Yields the number, root and tokens of every tree."""
  for b, root in enumerate(oracles.roots(tree)):
    yield b, root, tokens(tree, b, root, birth)


def decisions(all_tokens, unit='action'):
  """Tokens before which a tree may be forked."""
  return [x for x in all_tokens
          if x.is_fork_point and (unit == 'token' or x.is_start)]


def greedy(ranked, num_slots, min_spacing=0, cap=None):
  """Slots taken from ranked tokens."""
  return oracles.greedy(
      [(x.node, x.offset, x.position, x.host) for x in ranked], num_slots,
      min_spacing, cap)


def ranked(candidates, score, noise=None):
  """Candidates, the best first; of equals the larger noise, then the first."""
  tie = lambda x: 0 if noise is None else noise[x.slot]
  return sorted(candidates, key=lambda x: (-score(x), -tie(x)))


def noise(tree, key):
  """The policy's own draws, [B, N, T]; None without a key."""
  if key is None:
    return [None] * len(tree.parents)
  return np.asarray(decisions_lib.noise(np.shape(tree.tokens), key))


def counted(slots, num_forks):
  """Slots with a number of forks at each."""
  return [(*slot, num_forks) for slot in slots]


def merged(picks):
  """Slots of single picks, the same place once with its number."""
  return [(*slot, picks.count(slot)) for slot in dict.fromkeys(picks)]


def z_scores(values):
  """Population z-scores; 0 where all are equal."""
  values = np.asarray(values, np.float64)
  if len(values) == 0 or np.ptp(values) == 0:
    return np.zeros(len(values))
  return (values - values.mean()) / values.std()


def fresh(tree, b, root):
  """The slot of a fresh rollout, or None."""
  first = [x for x in decisions(tokens(tree, b, root)) if x.head is root]
  return min(first, key=lambda x: x.position).slot if first else None


def rollouts_left(root, num_rollouts):
  """Forks until a tree has so many leaves."""
  return max(num_rollouts - (len(root.leaves) if root else 0), 0)


def with_fresh(tree, b, root, picks, budget):
  """Picks and as many fresh rollouts as the budget has left."""
  slot = fresh(tree, b, root)
  spare = budget - len(picks) if slot else 0
  return merged(picks + [slot] * spare)


def scored(score, unit='action', spaced=True):
  """Returns the oracle of a policy that takes the largest scores."""
  def oracle(tree, num_branch_points=4, num_forks=3, min_spacing=64, birth=0,
             key=None, **options):
    draws = noise(tree, key)
    return [(counted(greedy(
        ranked(decisions(all_tokens, unit), score(tree, b, root, **options),
               draws[b]),
        num_branch_points, min_spacing if spaced else 0), num_forks),
        num_branch_points * num_forks)
        for b, root, all_tokens in forest(tree, birth)]
  return oracle


def _entropy(sign):
  def score(tree, b, root, statistic='first_token'):
    del tree, b, root
    return lambda x: sign * oracles.action_entropy(
        x.node, x.offset, statistic)
  return score


top_entropy = scored(_entropy(1))
lowest_entropy = scored(_entropy(-1))
# Noise breaks the ties of equal scores, which is a random order.
random = scored(lambda tree, b, root: lambda x: 0)


def causal_threshold(tree, threshold, num_branch_points=4, num_forks=1,
                     max_per_path=None, min_spacing=64, birth=0):
  """First above a threshold."""
  return [(counted(greedy(
      [x for x in decisions(all_tokens) if x.entropy > threshold],
      num_branch_points, min_spacing, max_per_path), num_forks),
      num_branch_points * num_forks)
      for _, _, all_tokens in forest(tree, birth)]


def oracle_value_gap(tree, values, num_branch_points=4, num_forks=3,
                     min_spacing=64, birth=0, key=None):
  """Largest change of the value."""
  def gap(b):
    return lambda x: max(
        abs(child.reward + float(values[b, child.index])
            - float(values[b, x.host.index])) for child in x.host.children)
  draws = noise(tree, key)
  return [(counted(greedy(
      ranked([x for x in decisions(all_tokens) if x.offset == 0], gap(b),
             draws[b]),
      num_branch_points, min_spacing), num_forks),
      num_branch_points * num_forks)
      for b, _, all_tokens in forest(tree, birth)]


def equally_spaced(tree, num_branch_points=4, num_forks=3, birth=0):
  """Nearest to equal distances on every trajectory."""
  result = []
  for b, root, all_tokens in forest(tree, birth):
    free = decisions(all_tokens)
    chains = [chain for chain in trajectories(tokens(tree, b, root)).values()
              if any(x.head is chain[0].head for x in free)]
    picks = []
    for slot in range(num_branch_points if chains else 0):
      turn, index = slot % len(chains), slot // len(chains) + 1
      share = len(range(turn, num_branch_points, len(chains)))
      chain = chains[turn]
      end = last(chain[0].node)
      start, stop = chain[0].position, sum(n.length for n in end.path)
      away = lambda x: abs(
          (x.position - start) * (share + 1) - (stop - start) * index)
      mine = [x for x in free if x.head is chain[0].head]
      if mine:
        best = min(mine, key=away)
        picks.append(best.slot)
        free.remove(best)
    result.append((counted(picks, num_forks), num_branch_points * num_forks))
  return result


def appo_score(tree, current_log_probs=None, whitespace_mask=None,
               variant='released', influence_decay=None, num_branch_points=8,
               num_forks=1, birth=0, key=None):
  """Z(H) Z(Omega), the fork one token on."""
  gamma = influence_decay or (1.0 if variant == 'released' else 2 ** (-1 / 64))
  draws, result = noise(tree, key), []
  for b, _, all_tokens in forest(tree, birth):
    scores, targets = {}, []
    for chain in trajectories(all_tokens).values():
      omega, future = [], 0.0
      for x in reversed(chain):
        ratio = 0.0 if current_log_probs is None else (
            float(current_log_probs[(b, *x.slot)]) + x.surprisal)
        future = ratio + gamma * future
        omega.append(np.clip(np.exp(np.clip(future, -20, 20)), 0.8, 1.2))
      omega = omega[::-1]
      z_entropy = z_scores([x.entropy for x in chain])
      z_omega = z_scores(omega) if np.ptp(omega) else np.ones(len(chain))
      for i, x in enumerate(chain[1:]):
        skipped = whitespace_mask is not None and whitespace_mask[
            (b, *chain[i].slot)]
        if z_entropy[i] > 0 and z_omega[i] > 0 and not skipped:
          scores[x.slot] = round(z_entropy[i] * z_omega[i], 5)
          targets.append(x)
    targets.sort(key=lambda x: x.slot)
    best = greedy(ranked(targets, lambda x: scores[x.slot], draws[b]),
                  num_branch_points)
    result.append((counted(best, num_forks), num_branch_points * num_forks))
  return result


def _best_per_backbone(candidates, limit):
  """The first `limit` below each child of the root, of ranked candidates."""
  kept, taken = [], {}
  for x in candidates:
    backbone = x.node.path[1].index if len(x.node.path) > 1 else 0
    if limit is None or taken.get(backbone, 0) < limit:
      kept.append(x)
    taken[backbone] = taken.get(backbone, 0) + 1
  return kept


def tree_grpo_random(tree, num_branch_points=4, max_per_backbone=2,
                     num_forks=1, birth=None, key=None):
  """Random decisions below the root, so many of each of its children."""
  draws = noise(tree, key)
  return [(counted(greedy(_best_per_backbone(
      ranked([x for x in decisions(all_tokens) if x.position > root.length],
             lambda x: 0, draws[b]),
      max_per_backbone), num_branch_points), num_forks),
      num_branch_points * num_forks)
      for b, root, all_tokens in forest(tree, birth)]


def treerl_surprisal(tree, num_branch_points=12, max_per_backbone=2,
                     num_forks=2, min_spacing=0, birth=0, key=None):
  """Most surprising tokens."""
  draws = noise(tree, key)
  return [(counted(greedy(_best_per_backbone(
      ranked(decisions(all_tokens, 'token'), lambda x: x.surprisal, draws[b]),
      max_per_backbone), num_branch_points, min_spacing), num_forks),
      num_branch_points * num_forks)
      for b, _, all_tokens in forest(tree, birth)]


def _cuts(node, by_slot, per_segment, probability, number=0, since=0):
  """Pairs (cuts before on the segment, token to fork before) from a node on.

  `since` cutpoints have come since the last cut; as many as make a segment wait
  for the next action token.
  """
  if node is None:
    return []
  if node.siblings:
    number = since = 0
  found = []
  for t, inside in enumerate(node.mask):
    if inside and since == per_segment:
      if (node.index, t) in by_slot:
        found.append((number, by_slot[node.index, t]))
      number, since = number + 1, 0
    since += inside and math.exp(node.log_probs[t]) < probability
  for child in node.children:
    found += _cuts(child, by_slot, per_segment, probability, number, since)
  return found


def spo_cutpoints(tree, cutpoints_per_segment=5, cutpoint_probability=0.9,
                  num_branch_points=6, num_forks=5, max_per_path=1,
                  birth=None):
  """After every so many unlikely tokens since the path branched last."""
  result = []
  for _, root, all_tokens in forest(tree, birth):
    cuts = _cuts(root, {x.slot: x for x in all_tokens}, cutpoints_per_segment,
                 cutpoint_probability)
    cuts = sorted((number, x.slot, x) for number, x in cuts)
    best = greedy([x for *_, x in cuts], num_branch_points, 0, max_per_path)
    result.append((counted(best, num_forks), num_branch_points * num_forks))
  return result


def sipo(tree, sibling_penalty=1.0, unit='token', num_branch_points=4,
         num_forks=2, min_spacing=0, birth=0, key=None):
  """Surprisal less siblings."""
  draws, result = noise(tree, key), []
  for b, _, all_tokens in forest(tree, birth):
    free = decisions(all_tokens, unit)
    of_token = {x.slot: x.surprisal for x in all_tokens}

    def surprisal(x):
      total, t = 0.0, x.offset
      while (x.node.index, t) in of_token:
        total, t = total + of_token[x.node.index, t], t + 1
        if unit == 'token':
          break
      return total
    scores = (z_scores([surprisal(x) for x in free])
              - sibling_penalty * z_scores([x.siblings for x in free]))
    table = {x.slot: score for x, score in zip(free, scores)}
    best = greedy(ranked(free, lambda x: table[x.slot], draws[b]),
                  num_branch_points, min_spacing)
    result.append((counted(best, num_forks), num_branch_points * num_forks))
  return result


def _first_of_path(tree, b, root, x):
  """The chain that begins with the first action token of a token's path."""
  chains = trajectories(tokens(tree, b, root))
  for node in x.node.path:
    if any(node.mask):
      chain = chains[head(node).index]
      return [y for y in chain if y.position >= sum(
          n.length for n in node.path[:-1])]
  return []


def _window(chain, x, size, vocab_size, per_action=False, mean=True):
  """Entropy from a token on, over log|V|."""
  start = [y.slot for y in chain].index(x.slot)
  window = [chain[start].entropy]
  for y in chain[start + 1:start + size]:
    if per_action and y.is_start:
      break
    window.append(y.entropy)
  return (np.mean(window) if mean else np.sum(window)) / math.log(vocab_size)


def cbpo_allocation(tree, num_rollouts=16, boundary_interval=64,
                    entropy_window=20, vocab_size=151_936,
                    base_probability=0.2, entropy_gain=2.0, num_candidates=3,
                    probability_decay=0.2, max_forks_per_point=3,
                    max_forks_per_path=4, min_probability=0.25, birth=0):
  """Greedy argmax of decayed probabilities."""
  result = []
  for b, root, all_tokens in forest(tree, birth):
    p_raw, free = {}, []
    for chain in trajectories(all_tokens).values():
      mine = []
      for x in chain:
        before = sum(sum(n.mask) for n in x.node.path[:-1]) + sum(
            x.node.mask[:x.offset])
        if not before or before % boundary_interval or not x.is_fork_point:
          continue
        first = _first_of_path(tree, b, root, x)
        rise = (_window(chain, x, entropy_window, vocab_size)
                - _window(first, first[0], entropy_window, vocab_size))
        p_raw[x.slot] = np.clip(base_probability + entropy_gain * rise, 0, 1)
        mine.append(x)
      mine.sort(key=lambda x: (-p_raw[x.slot], x.slot))
      free += mine[:num_candidates]
    free.sort(key=lambda x: x.slot)
    picks, budget = [], rollouts_left(root, num_rollouts)

    def probability(x):
      at_point = picks.count(x.slot)
      on_path = sum(y.head is x.head for s in picks for y in free
                    if y.slot == s)
      if at_point >= max_forks_per_point or on_path >= max_forks_per_path:
        return 0.0
      return p_raw[x.slot] / (
          (1 + on_path) ** probability_decay
          * (1 + at_point) ** probability_decay)
    while len(picks) < budget and free:
      best = max(free, key=probability)
      if probability(best) <= min_probability:
        break
      picks.append(best.slot)
    result.append((with_fresh(tree, b, root, picks, budget), budget))
  return result


def arpo_after_tool(tree, num_rollouts=16, entropy_window=20,
                    vocab_size=151_936, entropy_weight=0.2, fork_threshold=0.5,
                    mean_entropy=False, birth=0, key=None):
  """By chance after observations, turn by turn."""
  draws, result = noise(tree, key), []
  for b, root, all_tokens in forest(tree, birth):
    chains = trajectories(tokens(tree, b, root))
    asked = []
    for x in decisions(all_tokens):
      first = _first_of_path(tree, b, root, x)
      turn = sum(n.num_actions for n in x.node.path[:-1]) + x.node.spans[
          x.offset]
      options = (entropy_window, vocab_size, True, mean_entropy)
      rise = (_window(chains[x.head.index], x, *options)
              - _window(first, first[0], *options))
      u = float(draws[b][x.slot])
      if turn and np.clip(u - entropy_weight * rise, 0, 1) <= fork_threshold:
        asked.append((turn, x.slot))
    budget = rollouts_left(root, num_rollouts)
    picks = [slot for _, slot in sorted(asked)][:budget]
    result.append((with_fresh(tree, b, root, picks, budget), budget))
  return result


def trace_budget(tree, values, num_rollouts=16, success_threshold=0.8,
                 birth=0):
  """Greedy on the marginal chance of mixed outcomes."""
  result = []
  for b, root, all_tokens in forest(tree, birth):
    budget, picks = rollouts_left(root, num_rollouts), []
    start = fresh(tree, b, root) if root else None
    at = lambda node: float(values[b, node.index])
    free = [x.slot for x in decisions(all_tokens) if x.offset == 0]
    by_slot = {x.slot: x for x in all_tokens}

    def chance(slot, forks):
      if slot == start:
        m, v = max(len(root.children), 1) + forks, at(root)
        return 1 - v ** m - (1 - v) ** m
      x = by_slot[slot]
      k, v = x.siblings + forks, at(x.host)
      right = last(x.node).total >= success_threshold
      return 1 - (v if right else 1 - v) ** k
    places = sorted({*free, start} - {None})
    while len(picks) < budget and places:
      gain = lambda slot: (chance(slot, picks.count(slot) + 1)
                           - chance(slot, picks.count(slot)))
      best = max(places, key=gain)
      if gain(best) <= 0:
        break
      picks.append(best)
    result.append((merged(picks), budget))
  return result


def _tail_forks(chain, success_threshold, solved, failed, long, counts):
  """The start to fork at in one rollout and how often, or None."""
  ends = [x for x in chain if x.is_start][::-1]
  forks_of = lambda x: [] if x.offset or x.host is None else [
      c for c in x.host.children if c.birth > x.host.heir.birth]
  if solved:
    steps, count = ends[:1], counts[0]
  elif failed:
    steps, count = [], counts[1]
    for x in ends[:3]:
      steps = [x]
      outcomes = [leaf.total >= success_threshold
                  for fork in forks_of(x) for leaf in fork.leaves]
      if not outcomes or any(outcomes):
        break
  elif long:
    steps, count = ends[1:2], counts[2]
  else:
    return None
  if not steps or steps[0].host is None or forks_of(steps[0]):
    return None
  if steps[0].offset == 0 and not any(steps[0].host.heir.mask[:1]):
    return None
  return steps[0], count


def branpo_tail(tree, success_threshold=0.8, num_branch_points=4,
                branches_when_solved=2, branches_when_failed=3,
                branches_when_long=6, birth=0):
  """One to three actions before the end."""
  counts = [branches - 1 for branches in (
      branches_when_solved, branches_when_failed, branches_when_long)]
  result = []
  for b, root, all_tokens in forest(tree, birth):
    stage = birth if np.ndim(birth) == 0 else birth[b]
    leaves = [leaf for leaf in (root.leaves if root else [])
              if stage is None or leaf.birth == stage]
    right = {leaf.index: leaf.total >= success_threshold for leaf in leaves}
    length = {leaf.index: sum(n.num_actions for n in leaf.path)
              for leaf in leaves}
    winners = [length[index] for index in right if right[index]]
    accuracy = np.mean(list(right.values())) if leaves else 0.0
    found = []
    for chain in trajectories(all_tokens).values():
      leaf = last(chain[0].node)
      if leaf.index not in right:
        continue
      here = right[leaf.index]
      fork = _tail_forks(
          chain, success_threshold, accuracy == 1,
          accuracy < 0.5 and not here,
          0.5 < accuracy < 1 and here
          and length[leaf.index] > np.mean(winners), counts)
      if fork:
        found.append(fork)
    found.sort(key=lambda fork: fork[0].slot)
    picks = []
    for x, count in found[:num_branch_points]:
      slot = x.slot if x.offset else (x.host.heir.index, 0)
      picks += [slot] * count
    result.append((merged(picks), num_branch_points * max(counts)))
  return result


def adaptive(tree, design, num_rollouts=16, num_branch_points=32, explore=0.0):
  """Trajectories from the root, then forks of all; the budget is what is used.

  Without explorers, and with bins of one depth, so that nothing is drawn.
  """
  assert design.depth_width == 1 and not explore
  forks, costs = int(design.num_siblings) - 1, design.costs.astype(float)
  each = 1 + forks * costs[design.bins].sum()
  wanted = int(num_rollouts / each + 1e-4)
  wanted = max(wanted + int(num_rollouts - wanted * each + 1e-4), 1)
  result = []
  for b, root, all_tokens in forest(tree):
    chains = [chain for chain in trajectories(all_tokens).values()
              if root in (chain[0].head, chain[0].head.parent)]
    if len(chains) < wanted:
      count = wanted - len(chains)
      result.append(([(*fresh(tree, b, root), count)], count))
      continue
    left, slots = max(num_rollouts - len(chains), 0), []
    found = [(x, depth) for chain in chains for depth, x in enumerate(
        x for x in chain if x.is_start)]
    for x, depth in sorted(found, key=lambda pair: pair[0].slot):
      if x.is_fork_point and 0 < depth < len(costs) and design.bins[depth]:
        left -= forks * costs[depth]
        if left < -1e-4 or len(slots) == num_branch_points:
          left += forks * costs[depth]
          break
        slots.append((*x.slot, forks))
    result.append((slots, forks * len(slots) + int(left + 1e-4)))
  return result


def recursive(oracle, depth):
  """The newest stage alone, while there is one to come."""
  def newest(tree, **options):
    stage = np.max(np.where(tree.node_mask, tree.birth, 0), axis=-1)
    return [([], budget) if stage[b] >= depth else (slots, budget)
            for b, (slots, budget) in enumerate(
                oracle(tree, birth=stage, **options))]
  return newest
