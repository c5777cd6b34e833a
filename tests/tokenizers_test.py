"""Tests of the word tokenizer."""

import json

from bpo_jax import tokenizers
import pytest

_WORDS = ['open', 'drawer', '1', 'Ärger', 'go to']


@pytest.mark.parametrize('num_words', [0, 1, 29, 30, 31, 62, 63])
def test_round_trip_and_size(num_words):
  words = [f'word{i}' for i in range(num_words)]
  tokenizer = tokenizers.WordTokenizer(words)
  ids = tokenizer.encode(words)
  assert ids == list(range(2, num_words + 2))
  assert tokenizer.decode(ids) == words
  size = tokenizer.vocab_size
  assert size % 32 == 0 and num_words + 2 <= size < num_words + 2 + 32
  assert not tokenizer.unknown


def test_specials_come_first():
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  assert tokenizer.decode([tokenizer.pad_id, tokenizer.unknown_id]) == [
      '<pad>', '<unk>']
  assert (tokenizer.pad_id, tokenizer.unknown_id) == (0, 1)


def test_unknown_words_are_counted_and_warned_of_once(caplog):
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  ids = tokenizer.encode(['fridge', 'open', 'fridge', 'Open'])
  assert ids == [1, 2, 1, 1]
  assert tokenizer.unknown == {'fridge': 2, 'Open': 1}
  assert [r.getMessage() for r in caplog.records] == [
      "Word 'fridge' is not in the vocabulary.",
      "Word 'Open' is not in the vocabulary."]


def test_ids_beyond_the_words():
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  assert tokenizer.decode([7, 31]) == ['<unk>', '<unk>']
  for wrong in (-1, 32):
    with pytest.raises(ValueError, match=rf'\[0, 32\), got {wrong}'):
      tokenizer.decode([wrong])


@pytest.mark.parametrize('vocabulary, match', [
    (['a', 'b', 'a'], "'a'.* twice"),
    (['a', '<pad>'], '<pad>'),
    (['a', ''], 'non-empty words'),
    (['a', 3], 'non-empty words'),
    ('abc', 'sequence of non-empty words'),
])
def test_refuses_a_vocabulary(vocabulary, match):
  with pytest.raises(ValueError, match=match):
    tokenizers.WordTokenizer(vocabulary)


def test_refuses_a_string_for_words():
  with pytest.raises(ValueError, match='split it first'):
    tokenizers.WordTokenizer(_WORDS).encode('open')


def test_json_round_trip():
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  text = json.dumps(tokenizer.to_dict())
  again = tokenizers.WordTokenizer.from_dict(json.loads(text))
  assert again.vocabulary == tokenizer.vocabulary == tuple(_WORDS)
  assert again.fingerprint() == tokenizer.fingerprint()


def test_fingerprint_tells_order_and_boundaries():
  prints = {
      tokenizers.WordTokenizer(words).fingerprint()
      for words in (['a', 'b'], ['b', 'a'], ['ab'], ['a b'], ['a'], [])
  }
  assert len(prints) == 6


@pytest.mark.parametrize('change, match', [
    ({'vocabulary': ['drawer', 'open']}, 'order were changed'),
    ({'kind': 'byte'}, "kind 'word', got 'byte'"),
])
def test_from_dict_refuses(change, match):
  values = tokenizers.WordTokenizer(['open', 'drawer']).to_dict()
  with pytest.raises(ValueError, match=match):
    tokenizers.WordTokenizer.from_dict(values | change)
