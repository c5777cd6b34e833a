"""Credit estimators: a tree in, advantages and weights per token out.

Nearly all contrast returns of whole paths (`returns.centred_values`), so what
was received before a branch cancels; the critics compare with a value head. A
leaf that is not terminal counts with what it received so far. Nothing here
carries a gradient.

`group_relative` compares whole paths, `branch_relative` siblings, `critic`
uses values, `steps` credits steps and tokens, `contrast` holds the systems that
mix first trajectories and forks, `search` those that search trees.

Which tokens share an advantage. A sibling group is two nodes or more of one
parent. A token takes the advantage of its nearest group member on the way up,
its own node included: sibling k's advantage holds for the whole of its
continuation, until a later branch point refines it. A node outside every group
lies on the prefix, before the first branch point.

Which weights. Two readings of a tree that holds every token once:
* 'uniform': every token weighs 1. The K continuations of one state together
  weigh K times what led there, so the expected step is not the policy gradient.
* 'split': a child carries 1 / (number of children) of its parent's weight, the
  root's being 1, so that all leaves together weigh 1: the policy gradient.
"""

from bpo_jax.advantages.branch_relative import baseline_sums
from bpo_jax.advantages.branch_relative import bpo
from bpo_jax.advantages.branch_relative import bpo_rb
from bpo_jax.advantages.branch_relative import PrefixCredit
from bpo_jax.advantages.contrast import appo
from bpo_jax.advantages.contrast import arpo_hard
from bpo_jax.advantages.contrast import arpo_soft
from bpo_jax.advantages.contrast import branpo
from bpo_jax.advantages.contrast import cbpo
from bpo_jax.advantages.contrast import gcpo
from bpo_jax.advantages.critic import lambda_returns
from bpo_jax.advantages.critic import ppo_gae
from bpo_jax.advantages.critic import tree_gae
from bpo_jax.advantages.critic import vineppo
from bpo_jax.advantages.group_relative import dr_grpo
from bpo_jax.advantages.group_relative import grpo
from bpo_jax.advantages.group_relative import rloo
from bpo_jax.advantages.search import selection_slope
from bpo_jax.advantages.search import sipo
from bpo_jax.advantages.search import spo_tree
from bpo_jax.advantages.search import tree_grpo
from bpo_jax.advantages.search import treerl
from bpo_jax.advantages.steps import gigpo
from bpo_jax.advantages.steps import iapo
from bpo_jax.advantages.steps import istar
