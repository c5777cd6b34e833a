"""Rows of the contract: credit by values, by steps and by weights."""

import estimator_cases
import oracles_steps

from bpo_jax import advantages

_VALUES = dict(arrays=dict(values='token'), contrast=False)
_IMPLICIT = dict(arrays=dict(implicit_rewards='token'))

Case = estimator_cases.Case

CASES = {
    'dr_grpo': Case(
        advantages.dr_grpo, oracles_steps.dr_grpo, path_weights='token'),
    'dr_grpo-drop': Case(
        advantages.dr_grpo, oracles_steps.dr_grpo, dict(zero_variance='drop'),
        path_weights=estimator_cases.unless_equal),
    'grpo-drop': Case(
        advantages.grpo, oracles_steps.grpo_dropped,
        dict(zero_variance='drop'), path_weights=estimator_cases.unless_equal),
    'ppo_gae': Case(
        advantages.ppo_gae, oracles_steps.ppo_gae, path_weights='token',
        **_VALUES),
    'ppo_gae-discount': Case(
        advantages.ppo_gae, oracles_steps.ppo_gae,
        dict(discount=0.8, lambda_=0.6), path_weights='token', **_VALUES),
    'tree_gae': Case(
        advantages.tree_gae, oracles_steps.tree_gae,
        dict(discount=0.8, lambda_=0.6), path_weights='split', **_VALUES),
    'vineppo': Case(
        advantages.vineppo, oracles_steps.vineppo, path_weights='first'),
    'vineppo-means': Case(
        advantages.vineppo, oracles_steps.vineppo,
        dict(node_values='split_mean'), path_weights='first'),
    # A discounted return tells how far its reward was, so that equal returns
    # of paths are no equal returns of steps.
    'gigpo': Case(
        advantages.gigpo, oracles_steps.gigpo, contrast=False,
        path_weights='token'),
    'gigpo-paper': Case(
        advantages.gigpo, oracles_steps.gigpo,
        dict(omega=0.7, scale='none', path_weighting='sequence'),
        contrast=False, path_weights='sequence'),
    'gigpo-undiscounted': Case(
        advantages.gigpo, oracles_steps.gigpo, dict(discount=1.0),
        path_weights='token'),
    # Its steps are compared by a reward of their own.
    'istar': Case(
        advantages.istar, oracles_steps.istar, contrast=False,
        path_weights='token', **_IMPLICIT),
    'istar-rloo': Case(
        advantages.istar, oracles_steps.istar,
        dict(alpha=0.3, episode='rloo', path_weighting='sequence'),
        contrast=False, path_weights='sequence', **_IMPLICIT),
    'iapo': Case(advantages.iapo, oracles_steps.iapo, path_weights='token'),
    'iapo-all': Case(
        advantages.iapo, oracles_steps.iapo,
        dict(entropy_share=1.0, path_weighting='sequence'),
        path_weights='sequence'),
}
