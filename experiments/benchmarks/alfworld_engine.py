"""How fast the ALFWorld engine reads and plays games, on one core.

Bars: 15,000 steps a second with admissible commands, of a random admissible
policy over many games that were never played before; 10 milliseconds to parse
a game.

  python -m experiments.benchmarks.alfworld_engine --data=$ALFWORLD_DATA

Games are parsed from text that is already in memory. Seconds are processor
time of this process, so that others on the machine count less. `--quick` has
200 games, not 2,000.
"""

from collections.abc import Sequence
import random
import time

from absl import app
from absl import flags

from environments.alfworld import engine
from environments.alfworld import environment
from environments.alfworld import game as game_lib
from experiments.benchmarks import report

MIN_STEPS_PER_SECOND = 15_000
MAX_PARSE_MILLISECONDS = 10.0

flags.adopt_module_key_flags(report)
_DATA = flags.DEFINE_string(
    'data', None, 'Folder json_2.1.1 of ALFWorld, or the one that it is in.',
    required=True)
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
  """Measures games of the folder and holds the engine to both bars."""
  report.begin(argv)
  texts = read_texts(_DATA.value, 200 if report.QUICK.value else 2000)
  print(f'measuring {len(texts)} games', flush=True)
  figures = measure(texts, _NUM_STEPS.value)
  report.finish(figures, shortfalls(figures))


if __name__ == '__main__':
  app.run(main)
