"""Want of memory outside of micro-batches and episodes."""

import jax
import optax
import pytest
import tiny_agents as tiny

from bpo_jax import learner
from bpo_jax.models import transformer


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')
@pytest.mark.parametrize('adapters, advice', [
    (None, 'adapters, such as lora_rank=16.*; a smaller network'),
    (transformer.LoraConfig(2, 4.0), 'What to change.*: a smaller network')])
def test_moments_that_do_not_go_in_are_told(adapters, advice):
  optimizer = optax.GradientTransformation(tiny.exhaust, None)
  params = tiny.params_of(tiny.model(lora=adapters))
  with pytest.raises(MemoryError, match=f'moments .*{advice}'):
    learner.init_state(params, optimizer, jax.random.key(0))
