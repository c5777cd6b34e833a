"""The network once more: float64, one row, one query at a time."""

import jax
import numpy as np


def logits(config, params, tokens, positions=None, mask=None):
  """Returns [C, V] logits of one row, as the papers have it.

  Args:
    config: of the network.
    params: its parameters, any float type.
    tokens: [C].
    positions: [C]; None for 0, 1, ...
    mask: [C, C] bool, True where token i sees token j; None for all before.
  """
  c, size = config, len(tokens)
  positions = np.arange(size) if positions is None else positions
  mask = np.tril(np.ones((size, size), bool)) if mask is None else mask
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  embedding = params['embedding']['embedding']
  scale = np.sqrt(c.width) if c.scale_embeddings else 1.0
  x = [embedding[t] * scale for t in tokens]
  for layer in range(c.num_layers):
    p = jax.tree.map(lambda leaf, i=layer: leaf[i], params['blocks'])
    x = _block(c, p, x, positions, mask)
  output = embedding if c.tied else params['output']
  return np.stack([output @ _norm(h, params['final_norm'], c) for h in x])


def frequency(config, i):
  """Returns radians a position of pair i, as Llama 3.1 was published."""
  c = config
  plain = c.rope_theta ** (-2 * i / c.head_dim)
  s = c.rope_scaling
  if s is None:
    return plain
  wavelength = 2 * np.pi / plain
  if wavelength < s.original_positions / s.high_frequency_factor:
    return plain
  if wavelength > s.original_positions / s.low_frequency_factor:
    return plain / s.factor
  smooth = (s.original_positions / wavelength - s.low_frequency_factor) / (
      s.high_frequency_factor - s.low_frequency_factor)
  return (1 - smooth) * plain / s.factor + smooth * plain


def _norm(x, p, config):
  return x / np.sqrt(np.mean(x * x) + config.norm_epsilon) * p['scale']


def _turn(config, x, position):
  half = len(x) // 2
  out = np.empty_like(x)
  for i in range(half):
    angle = position * frequency(config, i)
    cos, sin = np.cos(angle), np.sin(angle)
    out[i] = x[i] * cos - x[i + half] * sin
    out[i + half] = x[i] * sin + x[i + half] * cos
  return out


def _heads(c, p, name, h):
  y = _linear(p[name], h).reshape(-1, c.head_dim)
  if c.qk_norm and name != 'value':
    y = np.stack([_norm(head, p[f'{name}_norm'], c) for head in y])
  return y


def _linear(p, x):
  return x @ p['kernel'] + p.get('bias', 0.0)


def _block(c, p, x, positions, mask):
  y = [_norm(h, p['attention_norm'], c) for h in x]
  queries, keys = (
      [[_turn(c, head, t) for head in _heads(c, p['attention'], name, h)]
       for h, t in zip(y, positions)] for name in ('query', 'key'))
  values = [_heads(c, p['attention'], 'value', h) for h in y]
  after = []
  for i, h in enumerate(x):
    heads = []
    for head in range(c.num_heads):
      group = head // (c.num_heads // c.num_kv_heads)
      seen = np.flatnonzero(mask[i])
      scores = np.array([queries[i][head] @ keys[j][group] for j in seen])
      scores = np.exp(scores / np.sqrt(c.head_dim))
      weights = scores / scores.sum()
      heads.append(sum(w * values[j][group] for w, j in zip(weights, seen)))
    h = h + _linear(p['attention']['out'], np.concatenate(heads))
    z = _norm(h, p['mlp_norm'], c)
    gate = _linear(p['gate'], z)
    gate = gate / (1 + np.exp(-gate))
    after.append(h + _linear(p['down'], gate * _linear(p['up'], z)))
  return after
