"""Branching Policy Optimization: policy gradients on trees of rollouts."""

from bpo_jax import advantages
from bpo_jax import algorithms
from bpo_jax import branching
from bpo_jax import masked
from bpo_jax import objectives
from bpo_jax import returns
from bpo_jax import siblings
from bpo_jax import tree
from bpo_jax import types
from bpo_jax import walks
from bpo_jax.tree import Tree
from bpo_jax.tree import TreeBuilder
from bpo_jax.types import BranchPlan
from bpo_jax.types import Credit
from bpo_jax.version import __version__

__all__ = (
    'BranchPlan',
    'Credit',
    'Tree',
    'TreeBuilder',
    '__version__',
    'advantages',
    'algorithms',
    'branching',
    'masked',
    'objectives',
    'returns',
    'siblings',
    'tree',
    'types',
    'walks',
)
