"""Random models of each family, as directories of published models are."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax.models import transformer

VOCABULARY = 96
LLAMA_3 = {
    'rope_type': 'llama3', 'factor': 4.0, 'low_freq_factor': 1.0,
    'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}
# What differs from family to family, in the keys of config.json.
FAMILIES = {
    'qwen2': {'model_type': 'qwen2', 'tie_word_embeddings': False},
    'qwen2-tied': {'model_type': 'qwen2', 'tie_word_embeddings': True},
    'qwen3': {'model_type': 'qwen3', 'tie_word_embeddings': True,
              'head_dim': 12},
    'llama3': {'model_type': 'llama', 'tie_word_embeddings': False,
               'rope_scaling': LLAMA_3, 'rms_norm_eps': 1e-5},
    'smollm2': {'model_type': 'llama', 'tie_word_embeddings': True,
                'rope_theta': 1e5, 'num_attention_heads': 3,
                'num_key_value_heads': 1, 'hidden_size': 24},
}


def config_json(family='qwen2', **overrides):
  """Returns what config.json says of a tiny model, as transformers 4 has it."""
  return {
      'vocab_size': VOCABULARY, 'hidden_size': 32, 'num_hidden_layers': 2,
      'num_attention_heads': 4, 'num_key_value_heads': 2,
      'intermediate_size': 40, 'rms_norm_eps': 1e-6, 'rope_theta': 5e3,
      'hidden_act': 'silu', 'max_position_embeddings': 128,
      **FAMILIES[family], **overrides}


def random_params(config, seed=0):
  """Returns parameters none of which is 0 or 1, norms and biases included."""
  shapes = jax.eval_shape(
      lambda: transformer.init_params(config, jax.random.key(0)))
  rng = np.random.default_rng(seed)
  draw = lambda path, leaf: rng.normal(
      loc=float(path[-1].key == 'scale'), scale=0.2, size=leaf.shape
  ).astype('f')
  return jax.tree_util.tree_map_with_path(draw, shapes)


def published(params, prefix='model.'):
  """Returns parameters under the names and in the layout of the files."""
  blocks = params['blocks']
  tensors = {
      f'{prefix}embed_tokens.weight': params['embedding']['embedding'],
      f'{prefix}norm.weight': params['final_norm']['scale']}
  if 'output' in params:
    tensors['lm_head.weight'] = params['output']
  for i in range(len(blocks['attention_norm']['scale'])):
    layer = f'{prefix}layers.{i}'
    tensors[f'{layer}.input_layernorm.weight'] = (
        blocks['attention_norm']['scale'][i])
    tensors[f'{layer}.post_attention_layernorm.weight'] = (
        blocks['mlp_norm']['scale'][i])
    for ours, theirs in (('gate', 'gate'), ('up', 'up'), ('down', 'down')):
      tensors[f'{layer}.mlp.{theirs}_proj.weight'] = (
          blocks[ours]['kernel'][i].T)
    for ours, theirs in (('query', 'q'), ('key', 'k'), ('value', 'v'),
                         ('out', 'o')):
      p, name = blocks['attention'], f'{layer}.self_attn.{theirs}'
      tensors[f'{name}_proj.weight'] = p[ours]['kernel'][i].T
      if 'bias' in p[ours]:
        tensors[f'{name}_proj.bias'] = p[ours]['bias'][i]
      if f'{ours}_norm' in p:
        tensors[f'{name}_norm.weight'] = p[f'{ours}_norm']['scale'][i]
  return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def write(directory, values, tensors, num_shards=1, dtype='float32'):
  """Writes a model directory; tensors in turn go to each of its shards."""
  from safetensors import numpy as safetensors_numpy
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(values))
  tensors = {n: x.astype(jnp.dtype(dtype)) for n, x in tensors.items()}
  if num_shards == 1:
    safetensors_numpy.save_file(tensors, directory / 'model.safetensors')
    return
  names, weight_map = sorted(tensors), {}
  for i in range(num_shards):
    file = f'model-{i + 1:05}-of-{num_shards:05}.safetensors'
    part = {name: tensors[name] for name in names[i::num_shards]}
    safetensors_numpy.save_file(part, directory / file)
    weight_map |= dict.fromkeys(part, file)
  (directory / 'model.safetensors.index.json').write_text(
      json.dumps({'metadata': {}, 'weight_map': weight_map}))
