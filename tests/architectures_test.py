"""config.json in all its spellings, and what in it is refused."""

import published_models as models
import pytest

from bpo_jax.models import architectures

every_family = pytest.mark.parametrize('family', models.FAMILIES)


@every_family
def test_both_spellings_say_the_same(family):
  values = models.config_json(family)
  new = dict(values)
  rope = {'rope_type': 'default', **(new.pop('rope_scaling', None) or {})}
  new['rope_parameters'] = {**rope, 'rope_theta': new.pop('rope_theta')}
  config = architectures.from_json(values)
  assert architectures.from_json(new) == config
  if 'rope_scaling' in values:  # As the first Llama 3.1 files had it.
    old = {**values['rope_scaling'], 'type': 'llama3'}
    del old['rope_type']
    assert architectures.from_json({**values, 'rope_scaling': old}) == config


@every_family
def test_a_config_written_is_read_back(family):
  config = architectures.from_json(models.config_json(family))
  assert architectures.from_json(architectures.to_json(config)) == config


def test_what_is_unsaid_is_as_transformers_has_it():
  values = models.config_json('llama3')
  for key in ('num_key_value_heads', 'rope_theta', 'rope_scaling',
              'tie_word_embeddings', 'hidden_act'):
    del values[key]
  config = architectures.from_json({**values, 'head_dim': None})
  assert config.num_kv_heads == 4 and config.head_dim == 8
  assert config.rope_theta == 1e4 and config.rope_scaling is None
  assert not config.tied
  qwen = models.config_json('qwen3')
  del qwen['head_dim']
  assert architectures.from_json(qwen).head_dim == 128
  scaled = {key: value for key, value in models.LLAMA_3.items()
            if not key.startswith('original')}
  config = architectures.from_json({**values, 'rope_scaling': scaled})
  assert config.rope_scaling.original_positions == 128


@pytest.mark.parametrize('family, overrides, message', [
    ('qwen2', {'model_type': 'mistral'}, 'llama, qwen2, qwen3; got .mistral'),
    ('qwen2', {'model_type': None}, 'model_type: expected one of'),
    ('qwen2', {'model_type': ['llama']}, 'model_type: expected one of'),
    ('qwen2', {'use_sliding_window': True}, 'use_sliding_window: .* got True'),
    ('llama3', {'sliding_window': 4096}, 'sliding_window: .* None, got 4096'),
    ('qwen2', {'layer_types': ['full_attention', 'sliding_attention']},
     "layer_types: .* got 'sliding_attention'"),
    ('qwen2', {'layer_types': 5}, 'layer_types: expected a list .* got 5'),
    ('qwen2', {'rope_theta': 10**400}, r'theta: .*up to 3.4e\+38, got 10'),
    ('qwen2', {'rms_norm_eps': 10**400}, 'rms_norm_eps: .*up to'),
    ('qwen2', {'rms_norm_eps': 1e39}, 'rms_norm_eps: .*up to'),
    ('qwen2', {'rope_scaling': {'rope_theta': 10**400}}, 'rope_theta: .*up to'),
    ('llama3', {'rope_scaling': {**models.LLAMA_3, 'low_freq_factor': 4.0}},
     'low_freq_factor: expected less than high_freq_factor 4.0, got 4.0'),
    ('qwen2', {'hidden_act': 'gelu'}, "hidden_act: expected silu, got 'gelu'"),
    ('llama3', {'mlp_bias': True}, 'mlp_bias: expected False'),
    ('llama3', {'attention_bias': True}, 'attention_bias: expected False'),
    ('qwen3', {'attention_bias': True}, 'attention_bias: expected False'),
    ('qwen2', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor: .* 0.5'),
    ('qwen2', {'rope_parameters': {'partial_rotary_factor': 0.5}},
     'rope_parameters: partial_rotary_factor: expected 1.0, got 0.5'),
    ('qwen2', {'rope_parameters': {'full_attention': {}}}, 'one set of'),
    ('qwen2', {'rope_scaling': {'type': 'yarn', 'factor': 4.0}},
     "rope_type: .* got 'yarn'"),
    ('llama3', {'rope_scaling': {**models.LLAMA_3, 'factor': None}},
     'factor: expected a positive number .*, got None'),
    ('qwen2', {'quantization_config': {'bits': 4}}, 'quantization_config'),
    ('qwen2', {'hidden_size': None}, 'hidden_size: expected a whole number'),
    ('qwen2', {'vocab_size': 2**40}, 'vocab_size: expected a whole number'),
    ('qwen2', {'num_hidden_layers': True}, 'num_hidden_layers: .* got True'),
    ('qwen2', {'tie_word_embeddings': 'no'}, 'tie_word_embeddings'),
    ('qwen2', {'rms_norm_eps': '1e-6'}, 'rms_norm_eps'),
    ('qwen2', {'num_key_value_heads': 3}, 'num_kv_heads'),
])
def test_what_the_network_does_not_compute_is_told(
    family, overrides, message):
  with pytest.raises(ValueError, match=f'here/config.json: .*{message}'):
    architectures.from_json(
        models.config_json(family, **overrides), 'here/config.json')
