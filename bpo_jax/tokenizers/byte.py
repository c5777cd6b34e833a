"""A tokenizer with one id for every byte, which reads any text."""

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any

from bpo_jax.tokenizers import base
from bpo_jax.tokenizers import words


class ByteTokenizer:
  """One id per byte of UTF-8: 0 is padding, then special tokens, then bytes."""

  pad_id = 0

  def __init__(self, special: Sequence[str] = ('<eos>',)):
    """Takes the special tokens in the order of their ids; the first ends texts.

    Raises:
      ValueError: if there is none, or one that comes twice or is empty.
    """
    if isinstance(special, str) or not special:
      raise ValueError(
          'special: expected a sequence of at least the token that ends a '
          f'text, got {special!r}'
      )
    words.check_vocabulary(special)
    self._special = (words.PAD, *special)
    self._pattern = re.compile(
        '|'.join(map(re.escape, sorted(special, key=len, reverse=True))))

  @property
  def vocab_size(self) -> int:
    """The number of ids, rounded up to a multiple of 32."""
    return -(-(len(self._special) + 256) // words.MULTIPLE) * words.MULTIPLE

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The id that ends a text."""
    return (1,)

  @property
  def special_tokens(self) -> Mapping[str, str]:
    """What ends a text and what pads it, by their names in templates."""
    return {'eos_token': self._special[1], 'pad_token': words.PAD}

  @property
  def special_ids(self) -> frozenset[int]:
    """The ids below the bytes."""
    return frozenset(range(len(self._special)))

  def encode(self, text: str | Sequence[str], add_special: bool = False,
             parse_special: bool = False) -> list[int]:
    """Returns an id per byte; there is nothing for `add_special` to add."""
    del add_special
    if parse_special:
      return [id_ for part in self.split(base.joined(text))
              for id_ in ([part] if isinstance(part, int)
                          else self.encode(part))]
    first = len(self._special)
    return [first + byte for byte in base.utf8(base.joined(text))]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text; ids that only round up the size read as nothing."""
    parts = map(self.token_bytes, base.checked(ids))
    return b''.join(parts).decode('utf-8', 'replace')

  def split(self, text: str) -> list[int | str]:
    """Returns the special tokens of a text as ids, and the text between."""
    spans = ((match.span(), self._special.index(match.group()))
             for match in self._pattern.finditer(text))
    return list(base.cut(text, spans))

  def token_bytes(self, id_: int) -> bytes:
    """Returns one byte, or the spelling of a special token."""
    if id_ < len(self._special):
      return self._special[id_].encode()
    byte = id_ - len(self._special)
    return bytes([byte]) if byte < 256 else b''

  def fingerprint(self) -> str:
    """Returns 16 hex digits that stand for the special tokens."""
    return base.digest(json.dumps(['byte', *self._special]))

  def to_dict(self) -> dict[str, Any]:
    """Returns JSON-able values that are equal for equal tokenizers."""
    return {'kind': 'byte', 'special': list(self._special[1:]),
            'fingerprint': self.fingerprint()}
