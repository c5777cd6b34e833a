"""What tokenizers have in common: the Protocols, and text as it is drawn."""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
import hashlib
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
  """Turns words or text into ids below `vocab_size`, and ids back."""

  @property
  def pad_id(self) -> int:
    """The id of padding; it is always masked."""

  @property
  def vocab_size(self) -> int:
    """How many ids a model must provide for."""

  def encode(self, words: Sequence[str]) -> list[int]:
    """Returns the ids of words; a tokenizer of text joins them by spaces."""

  def decode(self, ids: Sequence[int]) -> Sequence[str]:
    """Returns one word per id; a tokenizer of text returns a string."""

  def fingerprint(self) -> str:
    """Returns text that is equal only for tokenizers that do the same."""

  def to_dict(self) -> dict[str, Any]:
    """Returns JSON-able values that are equal for equal tokenizers."""


class TextTokenizer(Tokenizer, Protocol):
  """A tokenizer of whole texts, with special tokens that no text spells."""

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The ids that end a text, the tokenizer's own first."""

  @property
  def special_tokens(self) -> Mapping[str, str]:
    """Special tokens by what templates call them, such as `bos_token`."""

  @property
  def special_ids(self) -> frozenset[int]:
    """The ids of all special tokens."""

  def encode(self, text: str | Sequence[str], add_special: bool = False,
             parse_special: bool = False) -> list[int]:
    """Returns the ids of a text.

    Args:
      text: the text, or words to join by spaces.
      add_special: whether to put what the tokenizer puts around a text, such
        as a beginning-of-text token.
      parse_special: whether a special token that is spelled in the text is one.
        Never for text of unknown origin.
    """

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, special tokens as they are spelled."""

  def split(self, text: str) -> list[int | str]:
    """Returns the special tokens of a text as ids, and the text between."""

  def token_bytes(self, id_: int) -> bytes:
    """Returns the UTF-8 bytes of one token; a character may span several."""


class TextStream:
  """The text of tokens as they are drawn, character by whole character."""

  def __init__(self, tokenizer: TextTokenizer):
    self._tokenizer = tokenizer
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  def push(self, id_: int) -> str:
    """Returns what is certain of the text with one more token."""
    return self._decoder.decode(self._tokenizer.token_bytes(id_))

  def finish(self) -> str:
    """Returns the rest: a replacement character if one was left unfinished."""
    return self._decoder.decode(b'', final=True)


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Raises ValueError if a model has no embedding for some of the ids."""
  if tokenizer.vocab_size > vocab_size:
    where = getattr(tokenizer, 'source', type(tokenizer).__name__)
    raise ValueError(
        f'{where}: expected ids below {vocab_size}, the rows of the '
        f'embedding, got ids up to {tokenizer.vocab_size - 1}; the tokenizer '
        'is of another model, or the embedding has to be enlarged.'
    )


def whitespace(tokenizer: Tokenizer) -> np.ndarray:
  """Returns which ids are white space alone, [vocab_size] bool."""
  return np.array([''.join(tokenizer.decode([id_])).isspace()
                   for id_ in range(tokenizer.vocab_size)])


def cut(
    text: str, spans: Iterable[tuple[tuple[int, int], int]]
) -> Iterator[int | str]:
  """Yields the ids of spans of a text, and the text between them."""
  place = 0
  for (start, stop), id_ in spans:
    if start > place:
      yield text[place:start]
    yield id_
    place = stop
  if place < len(text):
    yield text[place:]


def joined(text: str | Sequence[str]) -> str:
  """Returns a text, or words with spaces between."""
  return text if isinstance(text, str) else ' '.join(text)


def utf8(text: str) -> bytes:
  """Returns the bytes; half a surrogate pair, which has none, as '?'."""
  return text.encode('utf-8', 'replace')


def checked(ids: Sequence[int]) -> list[int]:
  """Returns host numbers.

  Raises:
    ValueError: if one is no id: negative, or beyond int32.
  """
  ids = [int(id_) for id_ in ids]
  wrong = [id_ for id_ in ids if not 0 <= id_ < 2**31]
  if wrong:
    raise ValueError(f'expected token ids from 0 to 2**31 - 1, got {wrong[:3]}')
  return ids


def digest(text: str) -> str:
  """Returns 16 letters that are equal for equal texts."""
  return hashlib.sha256(text.encode()).hexdigest()[:16]
