"""Commands survive the way to tokens and back; nothing is confused."""

import random

import numpy as np
import pytest
import toy_environments as toys

from environments import base
from environments import codec as codecs

WORDS = 'go take put open key door shelf 1 2 3'.split()


def make_codec(unknown=(), **sizes):
  sizes = {'observation_length': 6, 'action_length': 3, 'max_commands': 8,
           **sizes}
  return codecs.TextCodec(toys.Phrasebook(), toys.Tokenizer(unknown), **sizes)


def draw_available(rng, count=8):
  return tuple(sorted({
      ' '.join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(count)
  }))


@pytest.mark.parametrize('seed', range(10))
def test_every_row_decodes_to_its_command_and_nothing_else_does(seed):
  rng = random.Random(seed)
  codec = make_codec()
  for _ in range(20):
    available = draw_available(rng)
    table = codec.encode_commands(available)
    assert table.dtype == np.int32 and table.shape == (8, 3)
    assert not table[len(available):].any()
    rows = [tuple(row) for row in table[:len(available)]]
    assert [codec.decode(available, row) for row in rows] == list(available)
    for _ in range(20):
      tokens = tuple(rng.randrange(12) for _ in range(3))
      expected = available[rows.index(tokens)] if tokens in rows else None
      assert codec.decode(available, tokens) == expected
  assert codec.command_collisions == 0


def test_padding_of_any_length_means_the_same():
  codec = make_codec()
  available = ('go', 'go door')
  tokens = codec.encode_commands(available)[0]
  for length in (1, 2, 3, 5):
    padded = np.zeros(length, np.int64)
    padded[:1] = tokens[:1]
    assert codec.decode(available, padded) == 'go'
  assert codec.decode(available, np.zeros(3, np.int32)) is None
  assert codec.decode(available, []) is None
  assert codec.decode((), tokens) is None


def test_tokens_of_more_than_a_byte_are_no_padding():
  # 256 and 65536 end in zero bytes; stripping padding must not confuse them.
  ids = {'a': 256, 'b': 1, 'c': 65536, 'd': 2**31 - 1}

  class Tokenizer:
    def encode(self, words):
      return [ids[word] for word in words]

  codec = codecs.TextCodec(toys.Phrasebook(), Tokenizer(), 4, 2, 20)
  available = tuple(sorted(ids) + ['a b', 'a c', 'b a', 'c a', 'c b', 'd c'])
  table = codec.encode_commands(available)
  assert codec.command_collisions == 0
  for row, command in zip(table, available):
    assert codec.decode(available, row) == command
    np.testing.assert_array_equal(
        row[:len(command.split())], [ids[word] for word in command.split()])


def test_unknown_words_collide_and_the_first_stays():
  codec = make_codec(unknown=('cat', 'dog'))
  available = ('feed cat', 'feed dog', 'go')
  table = codec.encode_commands(available)
  assert codec.command_collisions == 1
  assert np.count_nonzero(table.any(axis=1)) == 2
  assert codec.decode(available, table[0]) == 'feed cat'
  assert codec.decode(available, table[1]) == 'go'
  codec.encode_commands(available)
  assert codec.command_collisions == 1  # Remembered, not counted again.


@pytest.mark.parametrize('length', range(10))
def test_observation_is_padded_or_cut_and_counted(length):
  codec = make_codec(observation_length=6)
  text = ' '.join(WORDS[:length])
  tokens, kept = codec.encode_observation(base.TimeStep(text), '')
  assert tokens.shape == (6,) and tokens.dtype == np.int32
  assert kept == min(length, 6)
  assert codec.truncated_observations == (length > 6)
  expected = codec.encode_prompt(base.TimeStep(text))
  assert len(expected) == length
  assert tokens[:kept].tolist() == expected[:6] and not tokens[kept:].any()


def test_limits_are_told_with_the_flag_to_raise():
  codec = make_codec(max_commands=2)
  with pytest.raises(ValueError, match='3 admissible.*raise --max_commands'):
    codec.encode_commands(('a', 'b', 'c'))
  with pytest.raises(ValueError, match='4 tokens.*raise --max_action_tokens'):
    codec.encode_commands(('a b c d',))
  with pytest.raises(ValueError, match='0 tokens'):
    codec.encode_commands(('',))
  assert codec.encode_commands(('a', 'b')).all(axis=0)[0]


@pytest.mark.parametrize('name', ['observation_length', 'action_length',
                                  'max_commands', 'cache_size'])
def test_sizes_below_one_are_refused(name):
  with pytest.raises(ValueError, match=name):
    make_codec(**{name: 0})


def test_padding_token_from_the_tokenizer_is_refused():
  class Tokenizer:
    def encode(self, words):
      return [0] * len(words)

  codec = codecs.TextCodec(toys.Phrasebook(), Tokenizer(), 4, 2, 3)
  with pytest.raises(ValueError, match='padding token 0'):
    codec.encode_commands(('go',))


@pytest.mark.parametrize('cache_size', [1, 3, 1000])
def test_the_cache_is_bounded_and_changes_nothing(cache_size):
  rng = random.Random(0)
  phrasebook, asked = toys.Phrasebook(), []

  class Counting(toys.Phrasebook):
    def commands(self, available):
      asked.append(available)
      return phrasebook.commands(available)

  codec = codecs.TextCodec(
      Counting(), toys.Tokenizer(), 4, 3, 8, cache_size=cache_size)
  states = [draw_available(rng) for _ in range(10)]
  first = {state: codec.encode_commands(state).tolist() for state in states}
  for state in rng.choices(states, k=50):
    assert codec.encode_commands(state).tolist() == first[state]
    assert len(codec._tables) <= cache_size
  if cache_size >= 10:
    assert len(asked) == 10
  asked.clear()
  codec.decode(states[0], [1])
  codec.encode_commands(states[0])
  assert len(asked) <= 1


def test_tables_cannot_be_spoilt_by_whoever_gets_them():
  table = make_codec().encode_commands(('go',))
  with pytest.raises(ValueError, match='read-only'):
    table[0, 0] = 5
