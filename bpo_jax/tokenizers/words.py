"""A tokenizer with one id for every word of a fixed vocabulary.

It is all that a small policy on a text game needs.
"""

import collections
from collections.abc import Mapping, Sequence
import json
from typing import Any

from absl import logging

from bpo_jax.tokenizers import base

PAD = '<pad>'
UNKNOWN = '<unk>'
MULTIPLE = 32  # Rows of an embedding come in this many, for whole tiles.
_SPECIAL = (PAD, UNKNOWN)


class WordTokenizer:
  """One id per word: 0 is padding, 1 any unknown word, then the vocabulary.

  Attributes:
    unknown: how often each word that is not in the vocabulary was encoded.
  """

  pad_id = 0
  unknown_id = 1

  def __init__(self, vocabulary: Sequence[str]):
    """Takes the words in the order of their ids.

    Raises:
      ValueError: if a word comes twice, is empty, or has the name of a special
        token.
    """
    check_vocabulary(vocabulary)
    self._words = _SPECIAL + tuple(vocabulary)
    self._ids = {word: id_ for id_, word in enumerate(self._words)}
    self.unknown: collections.Counter[str] = collections.Counter()

  @property
  def vocabulary(self) -> tuple[str, ...]:
    """The words in the order of their ids, without the special tokens."""
    return self._words[len(_SPECIAL):]

  @property
  def vocab_size(self) -> int:
    """The number of ids, rounded up to a multiple of 32."""
    return -(-len(self._words) // MULTIPLE) * MULTIPLE

  def encode(self, words: Sequence[str]) -> list[int]:
    """Returns one id per word; an unknown word is counted and gets id 1.

    Raises:
      ValueError: if `words` is one string, whose characters are no words.
    """
    if isinstance(words, str):
      raise ValueError(
          f'encode expects a sequence of words, got the string {words!r}; '
          'split it first.'
      )
    return [self._id(word) for word in words]

  def decode(self, ids: Sequence[int]) -> list[str]:
    """Returns one word per id; ids that only round up the size are unknown.

    Raises:
      ValueError: if an id is outside [0, vocab_size).
    """
    return [self._word(int(id_)) for id_ in ids]

  def fingerprint(self) -> str:
    """Returns 16 hex digits that stand for the words and their order."""
    return base.digest(json.dumps(self._words))

  def to_dict(self) -> dict[str, Any]:
    """Returns JSON-able values that `from_dict` makes an equal tokenizer of."""
    return {
        'kind': 'word',
        'vocabulary': list(self.vocabulary),
        'fingerprint': self.fingerprint(),
    }

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> 'WordTokenizer':
    """Returns the tokenizer that `to_dict` described.

    Raises:
      ValueError: if it is of another kind, or would give other ids.
    """
    if values.get('kind') != 'word':
      raise ValueError(
          f"expected a tokenizer of kind 'word', got {values.get('kind')!r}."
      )
    tokenizer = cls(values['vocabulary'])
    if tokenizer.fingerprint() != values['fingerprint']:
      raise ValueError(
          f'expected a vocabulary of fingerprint {values["fingerprint"]}, got '
          f'{tokenizer.fingerprint()}: its words or their order were changed.'
      )
    return tokenizer

  def _id(self, word: str) -> int:
    id_ = self._ids.get(word)
    if id_ is not None:
      return id_
    if word not in self.unknown:
      logging.warning('Word %r is not in the vocabulary.', word)
    self.unknown[word] += 1
    return self.unknown_id

  def _word(self, id_: int) -> str:
    if not 0 <= id_ < self.vocab_size:
      raise ValueError(
          f'expected token ids in [0, {self.vocab_size}), got {id_}.'
      )
    return self._words[id_] if id_ < len(self._words) else UNKNOWN


def check_vocabulary(vocabulary: Sequence[str]) -> None:
  """Raises ValueError unless these are words, each of them there once."""
  counts = collections.Counter((*_SPECIAL, *vocabulary))
  twice = [word for word, count in counts.items() if count > 1]
  if twice:
    raise ValueError(
        f'every word of a vocabulary must be there once, but {twice} are there '
        f'twice ({", ".join(_SPECIAL)} are there from the start).'
    )
  wrong = [w for w in vocabulary if not isinstance(w, str) or not w]
  if isinstance(vocabulary, str) or wrong:
    raise ValueError(
        f'a vocabulary must be a sequence of non-empty words, got {wrong[:3]}.'
    )
