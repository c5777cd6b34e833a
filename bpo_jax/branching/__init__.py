"""Branch policies: a tree in, a `BranchPlan` out.

All are pure and keyed, have static shapes, never exceed their budget, and say
in `BranchPlan.unspent` what they left of it.
"""

from bpo_jax.branching.adaptive import adaptive
from bpo_jax.branching.budgets import arpo_after_tool
from bpo_jax.branching.budgets import branpo_tail
from bpo_jax.branching.budgets import cbpo_allocation
from bpo_jax.branching.budgets import trace_budget
from bpo_jax.branching.decisions import Statistic
from bpo_jax.branching.schedules import causal_threshold
from bpo_jax.branching.schedules import equally_spaced
from bpo_jax.branching.schedules import lowest_entropy
from bpo_jax.branching.schedules import oracle_value_gap
from bpo_jax.branching.schedules import random
from bpo_jax.branching.schedules import top_entropy
from bpo_jax.branching.stages import recursive
from bpo_jax.branching.tokens import appo_score
from bpo_jax.branching.tokens import sipo
from bpo_jax.branching.tokens import spo_cutpoints
from bpo_jax.branching.tokens import tree_grpo_random
from bpo_jax.branching.tokens import treerl_surprisal
