"""Branch policies: a tree in, a `BranchPlan` out.

All are pure and keyed, have static shapes, never exceed their budget, and say
in `BranchPlan.unspent` what they left of it.
"""

import typing

from bpo_jax.branching.decisions import Statistic
from bpo_jax.branching.schedules import causal_threshold
from bpo_jax.branching.schedules import top_entropy
from bpo_jax.types import BranchPlan

STATISTICS = typing.get_args(Statistic)
