"""Branching Policy Optimization: policy gradients on trees of rollouts."""

from bpo_jax import advantages
from bpo_jax import algorithms
from bpo_jax import branching
from bpo_jax import checkpoint
from bpo_jax import checks
from bpo_jax import designs
from bpo_jax import golden
from bpo_jax import learner
from bpo_jax import masked
from bpo_jax import metrics
from bpo_jax import models
from bpo_jax import objectives
from bpo_jax import options
from bpo_jax import packing
from bpo_jax import predictors
from bpo_jax import preferences
from bpo_jax import returns
from bpo_jax import rollout
from bpo_jax import sampling
from bpo_jax import siblings
from bpo_jax import tokenizers
from bpo_jax import tree
from bpo_jax import types
from bpo_jax import variance
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
    'checkpoint',
    'checks',
    'designs',
    'golden',
    'learner',
    'masked',
    'metrics',
    'models',
    'objectives',
    'options',
    'packing',
    'predictors',
    'preferences',
    'returns',
    'rollout',
    'sampling',
    'siblings',
    'tokenizers',
    'tree',
    'types',
    'variance',
    'walks',
)
