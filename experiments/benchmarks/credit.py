"""How fast credit is given to 65,536 leaves in trees of 16, on one core.

The bar: 20 milliseconds for each of grpo, rloo and bpo, under jit, the median
of repeated calls. grpo and rloo get trees of 16 paths from the prompt; bpo one
backbone with five branch points of four siblings. Every leaf ends in a node of
`--num_tokens` tokens, and credit goes to each of them.

  python -m experiments.benchmarks.credit
  python -m experiments.benchmarks.credit --quick --out=credit.json

The advantage functions of verl, tunix and trl run on the same rewards where
they are installed, calls of both sides taking turns, and must give the same
numbers; ratios are of medians, theirs to ours. One core is a limit that this
script sets itself: the process is bound to one, and its processor time is
printed beside the time on the clock.
"""

# pylint: disable=wrong-import-position
import os

# Both must stand before the first import of JAX.
if hasattr(os, 'sched_setaffinity'):
  os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ['XLA_FLAGS'] = ' '.join(
    [os.environ.get('XLA_FLAGS', ''), '--xla_cpu_multi_thread_eigen=false',
     'intra_op_parallelism_threads=1'])
