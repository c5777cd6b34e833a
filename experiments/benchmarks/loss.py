"""What the loss and gradient of one policy update cost, beside tunix and TRL.

The bar: at least as fast as each of them, and under half of the smallest peak
memory among them. All are given one model, an embedding and an unembedding of
32,000 tokens with nothing between, and one batch of 8 rows of 128 prompt and
384 completion tokens, and return a clipped surrogate, its gradient in both
arrays and the mean entropy; they must agree on the numbers.

  python -m experiments.benchmarks.loss
  python -m experiments.benchmarks.loss --quick --out=loss.json

The peers are those of the extra `bench`, each by its own functions:
* tunix: grpo_loss_fn, which calls compute_per_token_logps.
* trl: GRPOTrainer._compute_loss; the log-probs come from the fused head that
  the trainer gives its model, where this version has one.
* trl_logits: the same loss of TRL's selective_log_softmax over full logits.

A peer that is absent is named, and counts as a bar not reached. Every side has
a process of its own and the steps of all take turns; the ratio is the median of
theirs over ours, round by round. Peak memory is the largest resident size of
the process (Linux's VmHWM) less the resident size when parameters and batch
were in place and nothing had been computed or compiled; so it has the gradients
in it, 64 MB at width 256, and what compilation took. `--quick` has two rows,
the first width alone and at most three rounds.
"""

from collections.abc import Callable, Sequence
import collections
import contextlib
import importlib
import inspect
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types as python_types
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import log_probs
from bpo_jax import objectives
from experiments.benchmarks import report

MIN_RATIO = 1.0  # Theirs over ours, seconds.
MAX_MEMORY_SHARE = 0.5  # Ours over the smallest of theirs.
MAX_DIFFERENCE = 1e-3  # Relative to the largest entry of the gradient.
NUM_PROMPT = 128
CLIP_EPSILON = 0.2
PAD = 0  # No token of the batch is padding.

flags.adopt_module_key_flags(report)
_WIDTHS = flags.DEFINE_multi_integer(
    'width', [256, 576], 'Widths of the model, D.', lower_bound=1)
_NUM_ROUNDS = flags.DEFINE_integer(
    'num_rounds', 5, 'Timed steps of every side.', lower_bound=1)
_SIDE = flags.DEFINE_string(
    'side', None, 'For the processes that are started: whose steps to take.')
_BATCH = flags.DEFINE_string(
    'batch', None, 'For the processes that are started: model and batch.')


class Batch(NamedTuple):
  """A model and what it is to learn from; R rows, T = 128 + 384 tokens."""

  embedding: np.ndarray  # [V, D] float32
  unembedding: np.ndarray  # [V, D] float32
  tokens: np.ndarray  # [R, T] int32, never PAD
  advantages: np.ndarray  # [R] float32
  old_log_probs: np.ndarray  # [R, T - 128] float32, near the model's


class Result(NamedTuple):
  """What a step returns."""

  loss: float
  entropy: float
  to_embedding: np.ndarray  # [V, D] float32
  to_unembedding: np.ndarray  # [V, D] float32


Step = Callable[[], Any]  # Takes one step and waits for it.
Read = Callable[[Any], Result]  # Of what a step gave.


def make_batch(num_rows: int, num_completion: int, vocab_size: int, width: int,
               seed: int = 0) -> Batch:
  """Returns a batch whose ratios are clipped here and there."""
  rng = np.random.default_rng(seed)
  embedding = rng.standard_normal((vocab_size, width), np.float32)
  unembedding = rng.standard_normal((vocab_size, width), np.float32)
  unembedding *= 2 / np.sqrt(width)
  tokens = rng.integers(
      1, vocab_size, (num_rows, NUM_PROMPT + num_completion), np.int32)
  old = np.empty((num_rows, num_completion), np.float32)
  for row, log_probs_ in zip(tokens, old):
    logits = embedding[row[NUM_PROMPT - 1:-1]] @ unembedding.T
    peak = logits.max(axis=1)
    total = np.exp(logits - peak[:, None]).sum(axis=1)
    chosen = logits[np.arange(num_completion), row[NUM_PROMPT:]]
    log_probs_[:] = chosen - peak - np.log(total)
  old += 0.2 * rng.standard_normal(old.shape, np.float32)
  advantages = rng.standard_normal(num_rows, np.float32)
  return Batch(embedding, unembedding, tokens, advantages, old)


def ours(batch: Batch) -> tuple[Step, Read]:
  """Ours; only the states that predict a completion token are scored."""
  params = jax.tree.map(jnp.asarray, batch[:2])
  data = jax.tree.map(jnp.asarray, batch[2:])

  def loss(params, tokens, advantages, old_log_probs):
    embedding, unembedding = params
    hidden = embedding[tokens[:, NUM_PROMPT - 1:-1]]
    log_probs_, entropies = log_probs.token_log_probs(
        hidden, unembedding, tokens[:, NUM_PROMPT:])
    surrogate = objectives.clipped_surrogate(
        log_probs_, old_log_probs, advantages[:, None], CLIP_EPSILON,
        CLIP_EPSILON)
    return -jnp.mean(surrogate), jnp.mean(entropies)

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
  step = lambda: jax.block_until_ready(gradient(params, *data))
  return step, lambda out: Result(
      float(out[0][0]), float(out[0][1]), *map(np.asarray, out[1]))


def tunix(batch: Batch) -> tuple[Step, Read]:
  """tunix's loss function, jitted with its gradient as its trainer does."""
  nnx = importlib.import_module('flax.nnx')
  algo_core = importlib.import_module('tunix.rl.algo_core')
  common = importlib.import_module('tunix.rl.common')
  learner = importlib.import_module('tunix.rl.grpo.grpo_learner')

  class Model(nnx.Module):

    def __init__(self):
      self.embedding = nnx.Param(jnp.asarray(batch.embedding))
      self.unembedding = nnx.Param(jnp.asarray(batch.unembedding))

    def __call__(self, tokens, positions, cache, attention_mask):
      hidden = self.embedding[...][tokens]
      return jnp.einsum('rtd,vd->rtv', hidden, self.unembedding[...]), None

  config = learner.GRPOConfig(beta=0.0, epsilon=CLIP_EPSILON)
  config.temperature = 1.0  # Its learner sets it so.
  graph, state = nnx.split(Model())
  completion = jnp.asarray(batch.tokens[:, NUM_PROMPT:])
  prompt = jnp.asarray(batch.tokens[:, :NUM_PROMPT])
  example = common.TrainExample(
      prompt_ids=prompt, prompt_mask=prompt != PAD, completion_ids=completion,
      completion_mask=completion != PAD,
      advantages=jnp.asarray(batch.advantages), ref_per_token_logps=None,
      old_per_token_logps=jnp.asarray(batch.old_log_probs))

  def loss(state, example):
    return algo_core.grpo_loss_fn(
        nnx.merge(graph, state), example, config, pad_id=PAD, eos_id=-1)

  gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
  step = lambda: jax.block_until_ready(gradient(state, example))
  return step, lambda out: Result(
      float(out[0][0]), float(out[0][1]['entropy']),
      *(np.asarray(out[1][name][...]) for name in ('embedding', 'unembedding')))


def trl(batch: Batch) -> tuple[Step, Read]:
  """TRL's loss with the log-probs that its trainer computes."""
  trainer = importlib.import_module('trl.trainer.grpo_trainer')
  model = _torch_model(batch)
  if hasattr(trainer, 'add_fused_lm_head'):
    trainer.add_fused_lm_head(model, outputs=('log_probs', 'entropy'))
  method = inspect.unwrap(  # Of what reports to a profiler.
      trainer.GRPOTrainer._get_per_token_logps_and_entropies)
  return _trl(trainer, model, batch, method)


def trl_logits(batch: Batch) -> tuple[Step, Read]:
  """TRL's loss with its own log-probs and entropies of full logits."""
  torch = importlib.import_module('torch')
  trainer = importlib.import_module('trl.trainer.grpo_trainer')
  utils = importlib.import_module('trl.trainer.utils')

  def compute(trainer, model, ids, attention_mask, keep, *args, **kwargs):
    logits = model(ids, logits_to_keep=keep + 1).logits[:, :-1]
    log_probs_ = utils.selective_log_softmax(logits, ids[:, -keep:])
    with torch.no_grad():
      entropies = utils.entropy_from_logits(logits)
    return log_probs_, entropies, None

  return _trl(trainer, _torch_model(batch), batch, compute)


def _torch_model(batch):
  """Returns the model in torch, with what TRL asks of one."""
  torch = importlib.import_module('torch')
  config = importlib.import_module('transformers').PretrainedConfig()
  parameter = lambda x: torch.nn.Parameter(torch.from_numpy(x.copy()))

  class Body(torch.nn.Module):

    def __init__(self):
      super().__init__()
      self.weight = parameter(batch.embedding)

    def forward(self, input_ids, **kwargs):
      return python_types.SimpleNamespace(
          last_hidden_state=torch.nn.functional.embedding(
              input_ids, self.weight))

  class Model(torch.nn.Module):

    def __init__(self):
      super().__init__()
      self.config, self.base_model = config, Body()
      self.head = torch.nn.Linear(*batch.unembedding.T.shape, bias=False)
      self.head.weight = parameter(batch.unembedding)

    def get_output_embeddings(self):
      return self.head

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
      hidden = self.base_model(input_ids).last_hidden_state
      logits = self.head(hidden[:, -logits_to_keep:])
      return python_types.SimpleNamespace(logits=logits)

  return Model()


def _trl(trainer, model, batch, log_probs_method):
  """Returns steps of GRPOTrainer._compute_loss, without a trainer's set-up."""
  torch = importlib.import_module('torch')
  self = python_types.SimpleNamespace(
      accelerator=python_types.SimpleNamespace(
          autocast=contextlib.nullcontext, gather=lambda x: x,
          gather_for_metrics=lambda x: x, reduce=lambda x, **kwargs: x,
          num_processes=1, sync_gradients=True),
      args=python_types.SimpleNamespace(
          delta=None, use_bias_correction_kl=False, steps_per_generation=1),
      aux_loss_enabled=False, beta=0.0, current_gradient_accumulation_steps=1,
      epsilon_low=CLIP_EPSILON, epsilon_high=CLIP_EPSILON,
      importance_sampling_level='token', loss_type='grpo', model=model,
      off_policy_mask_threshold=None, temperature=1.0, top_entropy_quantile=1.0,
      use_vllm=False, vllm_importance_sampling_correction=False,
      _entropy_bonus_enabled=False, _metrics=collections.defaultdict(
          lambda: collections.defaultdict(list)))
  self._get_per_token_logps_and_entropies = python_types.MethodType(
      log_probs_method, self)
  tokens = torch.from_numpy(batch.tokens.astype(np.int64))
  prompt, completion = tokens[:, :NUM_PROMPT], tokens[:, NUM_PROMPT:]
  inputs = dict(
      prompt_ids=prompt, prompt_mask=torch.ones_like(prompt),
      completion_ids=completion, completion_mask=torch.ones_like(completion),
      advantages=torch.from_numpy(batch.advantages),
      old_per_token_logps=torch.from_numpy(batch.old_log_probs))

  def step():
    model.zero_grad(set_to_none=True)
    loss = trainer.GRPOTrainer._compute_loss(self, model, inputs)
    loss.backward()
    return loss

  return step, lambda loss: Result(
      loss.item(), self._metrics['train']['entropy'][-1],
      model.base_model.weight.grad.numpy(), model.head.weight.grad.numpy())


SIDES = {f.__name__: f for f in (ours, tunix, trl, trl_logits)}


def resident_megabytes(peak: bool) -> float:
  """Returns the resident size of this process, or the largest it had."""
  text = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
  name = 'VmHWM' if peak else 'VmRSS'
  return int(re.search(rf'{name}:\s*(\d+)', text)[1]) * 1024 / 1e6


def serve(side: str, path: str) -> None:
  """Takes a step for every line that comes in; says what it took.

  The answers are lines of JSON: first {'ready'} or {'absent'}, then {'seconds',
  'megabytes'} for each line; the results of the last step lie in a file beside
  the batch when the input ends.
  """
  with np.load(path) as arrays:
    batch = Batch(**arrays)
  # What libraries print must not come between the answers.
  answers = os.fdopen(os.dup(sys.stdout.fileno()), 'w')
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  say = lambda **values: print(json.dumps(values), file=answers, flush=True)
  try:
    step, read = SIDES[side](batch)
  except ImportError as error:
    say(absent=str(error))
    return
  before = resident_megabytes(peak=False)
  say(ready=True)
  out = None
  for _ in sys.stdin:
    start = time.perf_counter()
    out = step()
    seconds = time.perf_counter() - start
    say(seconds=seconds, megabytes=resident_megabytes(peak=True) - before)
  if out is not None:
    np.savez(f'{path}.{side}.npz', **read(out)._asdict())


class Worker:
  """A process of its own for one side."""

  def __init__(self, side: str, path: str):
    """Starts it; `absent` is why it has nothing to run, or None."""
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'experiments.benchmarks.loss', f'--side={side}',
         f'--batch={path}'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    self._result = pathlib.Path(f'{path}.{side}.npz')
    self.absent = self._answer().get('absent')

  def _answer(self):
    """Waits for a line; raises RuntimeError when the process has ended."""
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(
          f'{" ".join(self._process.args)} ended with {self._process.wait()};'
          ' what it printed is above')
    return json.loads(line)

  def step(self) -> dict[str, float]:
    """Returns the seconds of one step and the peak megabytes so far."""
    print(file=self._process.stdin, flush=True)
    return self._answer()

  def close(self) -> Result:
    """Ends the process and returns what its last step gave."""
    self._process.communicate()
    with np.load(self._result) as arrays:
      return Result(**arrays)


def measure(batch: Batch, num_rounds: int, sides: Sequence[str] = tuple(SIDES)
            ) -> tuple[dict[str, float], dict[str, str]]:
  """Returns the figures of one model, and why each absent side is absent."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'batch.npz')
    np.savez(path, **batch._asdict())
    workers = {side: Worker(side, path) for side in sides}
    absent = {side: worker.absent for side, worker in workers.items()
              if worker.absent}
    workers = {side: worker for side, worker in workers.items()
               if not worker.absent}
    for worker in workers.values():
      worker.step()  # Compiles.
    rounds = [{side: worker.step() for side, worker in workers.items()}
              for _ in range(num_rounds)]
    results = {side: worker.close() for side, worker in workers.items()}
  return _figures(rounds, results), absent


def _figures(rounds, results) -> dict[str, float]:
  """Returns the figures of all sides, of what they answered round by round."""
  figures, ours_ = {}, results['ours']
  for side, result in results.items():
    seconds = [answers[side]['seconds'] for answers in rounds]
    figures[f'{side}_seconds'] = statistics.median(seconds)
    figures[f'{side}_least_seconds'] = min(seconds)
    figures[f'{side}_megabytes'] = rounds[-1][side]['megabytes']
    if side != 'ours':
      figures[f'{side}_ratio'] = statistics.median(
          answers[side]['seconds'] / answers['ours']['seconds']
          for answers in rounds)
      figures[f'{side}_difference'] = difference(ours_, result)
  theirs = [figures[f'{side}_megabytes'] for side in results if side != 'ours']
  if theirs:
    figures['memory_share'] = figures['ours_megabytes'] / min(theirs)
  return figures


def difference(ours_: Result, theirs: Result) -> float:
  """Returns the largest difference, relative to the largest entry."""
  return max(
      float(np.abs(x - y).max() / np.abs(x).max())
      for x, y in zip(ours_, theirs))


def shortfalls(figures: dict[str, float]) -> list[str]:
  """Returns a sentence for each bar that the figures do not reach."""
  short = []
  for name, value in figures.items():
    if name.endswith('_ratio') and not value >= MIN_RATIO:
      short.append(f'{name} is below {MIN_RATIO}')
    if name.endswith('_difference') and not value < MAX_DIFFERENCE:
      short.append(f'{name} is not below {MAX_DIFFERENCE}')
    if name.endswith('memory_share') and not value < MAX_MEMORY_SHARE:
      short.append(f'{name} is not below {MAX_MEMORY_SHARE}')
  return short


def main(argv: Sequence[str]) -> None:
  """Measures width by width, or is one of the processes that are started."""
  report.begin(argv)
  if _SIDE.value:
    serve(_SIDE.value, _BATCH.value)
    return
  num_rows, widths, num_rounds = 8, _WIDTHS.value, _NUM_ROUNDS.value
  if report.QUICK.value:
    num_rows, widths, num_rounds = 2, widths[:1], min(num_rounds, 3)
  figures, absent = {'num_rows': num_rows}, {}
  for width in widths:
    print(f'measuring width {width}, a few minutes', flush=True)
    batch = make_batch(num_rows, 384, 32_000, width)
    of_width, absent = measure(batch, num_rounds)
    figures |= {f'd{width}_{name}': x for name, x in of_width.items()}
  report.finish(figures, shortfalls(figures) + [
      f'{side} is not compared ({why}): pip install bpo-jax[bench]'
      for side, why in absent.items()])


if __name__ == '__main__':
  app.run(main)
