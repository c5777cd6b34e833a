"""Tests of configs' machinery and of the flags made from it."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Literal

from absl import flags
from experiments import config_flags
from experiments import configs
import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
field = configs.field


@dataclasses.dataclass(frozen=True)
class _Config:
  env: str = field('alfworld', 'Which environment.')
  algorithm: str = field('bpo', 'Which row.', choices=('bpo', 'grpo'))
  seed: int = field(0, 'Seed.', min=0)
  shuffle: bool = field(True, 'Whether to shuffle.')
  dtype: Literal['float32', 'bfloat16'] = field('float32', 'Of activations.')
  width: int | None = field(None, 'The model width; none: by the model.')
  layers: tuple[int, ...] = field((2, 3), 'Sizes.', min=1)
  span: tuple[int, float] = field((1, 0.5), 'A pair.')
  names: tuple[str, ...] = field((), 'Names.')
  parts: tuple[str, ...] = field(
      ('actor',), 'Some of several.', choices=('actor', 'critic'))
  extras: tuple[str, ...] | None = field(
      None, 'Some, none by name too.', choices=('none', 'all'))
  norm: str | None = field(None, 'One.', choices=('none', 'rms'))
  sizes: tuple[int, ...] = field((2,), 'Some.', choices=(2, 4))
  learning_rate: float = field(1e-3, 'Step size.', min=0.0, max=1.0)
  clip: float | None = field(None, 'Largest gradient norm.', min=0.0)

  def __post_init__(self):
    configs.check(self)
    if self.env == 'alfworld' and self.seed == 13:
      raise ValueError('seed 13 brings alfworld bad luck.')


def _parse(*arguments, config_class=_Config):
  flag_values = flags.FlagValues()
  config_flags.define(config_class, flag_values)
  config_flags.parse(['binary', *arguments], flag_values)
  return config_flags.read(config_class, flag_values)


def test_defaults_are_the_config_s_own():
  assert _parse() == _Config()


@pytest.mark.parametrize('argument, name, value', [
    ('--env=webshop', 'env', 'webshop'),
    ('--env=', 'env', ''),
    ('--algorithm=grpo', 'algorithm', 'grpo'),
    ('--seed=7', 'seed', 7),
    ('--noshuffle', 'shuffle', False),
    ('--shuffle=false', 'shuffle', False),
    ('--shuffle', 'shuffle', True),
    ('--dtype=bfloat16', 'dtype', 'bfloat16'),
    ('--width=64', 'width', 64),
    ('--width=none', 'width', None),
    ('--layers=4', 'layers', (4,)),
    ('--layers=4, 5,6', 'layers', (4, 5, 6)),
    ('--layers=', 'layers', ()),
    ('--span=3,0.25', 'span', (3, 0.25)),
    ('--names=a,b', 'names', ('a', 'b')),
    ('--parts=actor', 'parts', ('actor',)),
    ('--parts=critic,actor', 'parts', ('critic', 'actor')),
    ('--parts=', 'parts', ()),
    ('--extras=none', 'extras', ('none',)),
    ('--extras=all', 'extras', ('all',)),
    ('--extras=none,all', 'extras', ('none', 'all')),
    ('--extras=', 'extras', None),
    ('--norm=none', 'norm', 'none'),
    ('--norm=rms', 'norm', 'rms'),
    ('--norm=', 'norm', None),
    ('--sizes=4', 'sizes', (4,)),
    ('--learning_rate=0.5', 'learning_rate', 0.5),
    ('--clip=1', 'clip', 1.0),
])
def test_values(argument, name, value):
  config = _parse(argument)
  assert getattr(config, name) == value
  assert config == dataclasses.replace(_Config(), **{name: value})


@pytest.mark.parametrize('argument, words', [
    ('--seed=abc', ['seed=abc', 'expected int', "got 'abc'"]),
    ('--seed=1.5', ['seed=1.5', 'expected int']),
    ('--seed=-1', ['seed=-1', 'at least 0', 'got -1']),
    ('--seed', ['Missing value', '--seed']),
    ('--shuffle=maybe', ['shuffle=maybe', 'true or false']),
    ('--dtype=float16', ['dtype', 'one of float32, bfloat16']),
    ('--algorithm=gprpo', ['one of bpo, grpo', 'Did you mean grpo']),
    ('--layers=1,x', ['layers', 'int values', "'x'"]),
    ('--layers=2,0', ['layers', 'at least 1', 'got 0']),
    ('--span=1', ['span', 'int,float']),
    ('--parts=acto', ['one of actor, critic', 'Did you mean actor']),
    ('--sizes=3', ['sizes', 'one of 2, 4', 'got 3']),
    ('--learning_rate=2', ['learning_rate', 'at most 1']),
    ('--learning_rate=nan', ['learning_rate', 'nan']),
    ('--learning_rte=1', ['learning_rte', 'Did you mean learning_rate']),
    ('--sead=1', ['sead', 'Did you mean seed']),
    ('--nosead', ['nosead']),
    ('--noseed', ['noseed', 'give it a value']),
    ('--zzzzz=1', ['zzzzz', '--help']),
    ('seed=1', ["'seed=1'", '--name=value', 'seed']),
])
def test_wrong_flags_are_one_clear_line(argument, words, capsys):
  with pytest.raises(SystemExit) as status:
    _parse(argument)
  shown = capsys.readouterr()
  assert status.value.code == 2
  assert shown.err.startswith('error: ') and shown.err.count('\n') == 1
  assert not shown.out
  for word in words:
    assert word in shown.err, shown.err


def test_what_has_no_default_is_required():
  @dataclasses.dataclass(frozen=True)
  class Eval:
    workdir: str = field(help='Where the run is.')
    games: int = field(5, 'How many.')

  config = _parse('--workdir=x', config_class=Eval)
  assert config == Eval('x', 5)
  with pytest.raises(SystemExit):
    _parse(config_class=Eval)


def test_a_bad_default_is_found_at_once():
  @dataclasses.dataclass(frozen=True)
  class Bad:
    rate: float = field(2.0, 'A rate.', max=1.0)

  with pytest.raises(ValueError, match='default of .*rate=2.0: .*at most 1.0'):
    config_flags.define(Bad, flag_values=flags.FlagValues())


@pytest.mark.parametrize('values, match', [
    ({'seed': True}, '_Config.seed: expected int, got True'),
    ({'seed': -1}, '_Config.seed: expected at least 0'),
    ({'env': None}, '_Config.env: expected text, got None'),
    ({'layers': [2]}, r'_Config.layers: .*got \[2\]'),
    ({'span': (1, 2, 3)}, '_Config.span: expected int,float'),
])
def test_a_config_checks_itself(values, match):
  with pytest.raises(ValueError, match=match):
    _Config(**values)


def test_text_that_must_say_something():
  @dataclasses.dataclass(frozen=True)
  class Named:
    name: str | None = field(None, 'A name.', not_blank=True)
    note: str | None = field(None, 'A note.')
    __post_init__ = configs.check

  assert _parse('--name=x', '--note=', config_class=Named) == Named('x', None)
  assert _parse('--name=none', config_class=Named) == Named()
  for blank in ('', ' '):
    with pytest.raises(SystemExit):
      _parse(f'--name={blank}', config_class=Named)
    with pytest.raises(ValueError, match='Named.name: expected some text'):
      Named(blank)


def test_dict_round_trip_keeps_the_order():
  config = _parse('--layers=7', '--clip=2')
  plain = config_flags.to_dict(config)
  assert list(plain) == [spec.name for spec in dataclasses.fields(_Config)]
  again = config_flags.from_dict(_Config, json.loads(json.dumps(plain)))
  assert again == config


@pytest.mark.parametrize('values, match', [
    ({'sede': 1}, 'no field sede. Did you mean seed'),
    ({'seed': 'x'}, "seed: expected int, got 'x'"),
    ({'span': [1, 2.0, 3]}, 'span: expected int,float'),
    ({'dtype': 'float16'}, 'dtype: expected one of float32, bfloat16'),
])
def test_from_dict_refuses(values, match):
  with pytest.raises(ValueError, match=match):
    config_flags.from_dict(_Config, values)


_BINARY = textwrap.dedent('''
    """A binary for the test."""
    import dataclasses
    from experiments import config_flags
    from experiments import configs

    @dataclasses.dataclass(frozen=True)
    class Config:
      learning_rate: float = configs.field(0.1, 'Step size.', min=0.0)
      updates: int = configs.field(3, 'How many.')

      def __post_init__(self):
        configs.check(self)
        if self.updates == 13:
          raise ValueError('13 updates with this rate diverge.')

    def main(_):
      print(config_flags.read(Config))
      if config_flags.read(Config).updates == 14:
        raise KeyboardInterrupt

    config_flags.define(Config)
    if __name__ == '__main__':
      config_flags.run(main)
''')


def test_as_a_binary(tmp_path):
  path = tmp_path / 'binary.py'
  path.write_text(_BINARY)

  def run(*arguments):
    done = subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True,
        env=os.environ | {'PYTHONPATH': str(_REPOSITORY)}, check=False)
    return done.returncode, done.stdout, done.stderr

  assert run('--learning_rate=0.5') == (
      0, 'Config(learning_rate=0.5, updates=3)\n', '')
  status, _, error = run('--learning_rte=1')
  assert status == 2 and error.count('\n') == 1 and 'learning_rate' in error
  status, _, error = run('--updates=13')
  assert (status, error) == (2, 'error: 13 updates with this rate diverge.\n')
  status, _, error = run('--updates=14')
  assert (status, error) == (130, '\nStopped before it was done.\n')
  _, text, _ = run('--help')
  assert 'learning_rate' in text and 'Step size. (at least 0.0)' in text


def test_every_choice_is_itself_and_every_default_can_be_written():
  flag_values = flags.FlagValues()
  config_flags.define(configs.TrainConfig, flag_values=flag_values)
  num_choices = 0
  for spec in dataclasses.fields(configs.TrainConfig):
    flag = flag_values[spec.name]
    flag.parse(flag.serializer.serialize(spec.default))
    assert flag.value == spec.default
    for choice in spec.metadata['choices'] or ():
      flag.parse(str(choice))
      assert flag.value == choice
      num_choices += 1
  assert num_choices > 10


@pytest.mark.parametrize('value', ['nan', 'inf', '-inf', '1e999'])
def test_numbers_are_finite(value, capsys):
  with pytest.raises(SystemExit):
    _parse(f'--clip={value}')
  assert 'expected a finite number' in capsys.readouterr().err
