"""Want of memory outside of micro-batches and episodes."""

import jax
import jax.numpy as jnp
import optax
import pytest
import tiny_agents as tiny

from bpo_jax import learner


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')
def test_moments_that_do_not_go_in_are_told():
  def init(params):
    del params
    return jax.jit(jnp.sort)(jnp.broadcast_to(jnp.float32(1), (1 << 44,)))

  optimizer = optax.GradientTransformation(init, None)
  params = tiny.params_of(tiny.model())
  with pytest.raises(MemoryError, match='moments .*lora_rank=16'):
    learner.init_state(params, optimizer, jax.random.key(0))
