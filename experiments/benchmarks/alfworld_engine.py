"""How fast the ALFWorld engine reads and plays games, on one core.

Bars: 15,000 steps a second with admissible commands, of a random admissible
policy over many games that were never played before; 10 milliseconds to parse
a game.

  python -m experiments.benchmarks.alfworld_engine --data=$ALFWORLD_DATA

Games are parsed from text that is already in memory. Seconds are processor
time of this process, so that others on the machine count less.
"""

from collections.abc import Sequence
import json
import pathlib
import random
import sys
import time

from absl import app
from absl import flags

from environments.alfworld import engine
from environments.alfworld import environment
from environments.alfworld import game as game_lib

MIN_STEPS_PER_SECOND = 15_000
MAX_PARSE_MILLISECONDS = 10.0

_DATA = flags.DEFINE_string(
    'data', None, 'Folder json_2.1.1 of ALFWorld, or the one that it is in.',
    required=True)
_OUT = flags.DEFINE_string('out', None, 'JSON file to write the figures to.')
_QUICK = flags.DEFINE_bool(
    'quick', False, 'Fewer games, so that it ends within a minute.')
_NUM_STEPS = flags.DEFINE_integer(
    'num_steps', 50, 'Steps after which a game is left.', lower_bound=1)


def read_texts(data: str, num_games: int) -> list[tuple[str, str]]:
  """Returns (text, path) of games spread evenly over all splits."""
  games = environment.AlfworldEnvironment(data)
  paths = [games.path(task_id) for split in games.splits()
           for task_id in games.tasks(split).ids]
  chosen = paths[::max(1, len(paths) // num_games)][:num_games]
  return [(path.read_text(encoding='utf-8'), str(path)) for path in chosen]


def play(game: game_lib.Game, rng: random.Random, num_steps: int) -> int:
  """Plays at random until the goal or the limit; returns the steps taken."""
  state = engine.initial(game)
  commands = engine.admissible(game, state)
  for step in range(num_steps):
    state, _ = engine.step(game, state, rng.choice(commands))
    commands = engine.admissible(game, state)
    if engine.won(game, state):
      return step + 1
  return num_steps


def measure(texts: Sequence[tuple[str, str]], num_steps: int,
            batch: int = 16) -> dict[str, float]:
  """Returns the figures; a few games are alive at a time, as in training."""
  rng = random.Random(0)
  parsing = playing = 0.0
  steps = 0
  game_lib.parse(*texts[0])  # Rules and grammar are compiled once per process.
  for start in range(0, len(texts), batch):
    begin = time.process_time()
    games = [game_lib.parse(*text) for text in texts[start:start + batch]]
    parsed = time.process_time()
    steps += sum(play(game, rng, num_steps) for game in games)
    playing += time.process_time() - parsed
    parsing += parsed - begin
  return {
      'num_games': len(texts), 'num_steps': steps,
      'parse_milliseconds': 1e3 * parsing / len(texts),
      'steps_per_second': steps / playing}


def shortfalls(figures: dict[str, float]) -> list[str]:
  """Returns a sentence for each bar that the figures do not reach."""
  found = []
  if figures['steps_per_second'] < MIN_STEPS_PER_SECOND:
    found.append(f'steps_per_second is below {MIN_STEPS_PER_SECOND}')
  if figures['parse_milliseconds'] >= MAX_PARSE_MILLISECONDS:
    found.append(f'parse_milliseconds is not below {MAX_PARSE_MILLISECONDS}')
  return found


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  texts = read_texts(_DATA.value, 200 if _QUICK.value else 2000)
  figures = measure(texts, _NUM_STEPS.value)
  if _OUT.value:
    text = json.dumps(figures, indent=2) + '\n'
    pathlib.Path(_OUT.value).write_text(text, encoding='utf-8')
  for name, value in figures.items():
    print(f'{name}: {value:,.2f}' if isinstance(value, float)
          else f'{name}: {value}')
  short = shortfalls(figures)
  print('\n'.join(short) or 'ok')
  sys.exit(1 if short else 0)


if __name__ == '__main__':
  app.run(main)
