"""Byte-level BPE vocabularies, and the tokenizer.json that they make."""

from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any, NamedTuple

from bpo_jax import checks

_CONTROL, _USER_DEFINED = 3, 4  # Token types of a GGUF.


def _byte_level(use_regex: bool) -> dict[str, Any]:
  """Returns the step that spells each byte as one letter."""
  return {'type': 'ByteLevel', 'add_prefix_space': False,
          'trim_offsets': True, 'use_regex': use_regex}


def _split_words(digits: str) -> tuple[dict[str, Any], ...]:
  """Returns the steps of Qwen and Llama 3, which differ in digits alone."""
  words = (
      r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
      + r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
  )
  split = {'type': 'Split', 'pattern': {'Regex': words},
           'behavior': 'Isolated', 'invert': False}
  return split, _byte_level(False)


class _Cut(NamedTuple):
  """How a family cuts a text before it merges."""

  steps: tuple[dict[str, Any], ...]
  normalizer: dict[str, Any] | None = None
  ignore_merges: bool = False  # A word of the vocabulary is taken whole.


_DIGITS = {'type': 'Digits', 'individual_digits': True}
_PRE = {
    'gpt-2': _Cut((_byte_level(True),)),
    'smollm': _Cut((_DIGITS, _byte_level(True))),
    'qwen2': _Cut(_split_words(r'\p{N}'), normalizer={'type': 'NFC'}),
    'llama-bpe': _Cut(_split_words(r'\p{N}{1,3}'), ignore_merges=True),
}


def _letters() -> dict[str, int]:
  """Returns GPT-2's letter of each byte, inverted: printable ones as they are.

  The others follow from U+0100 on, in their order.
  """
  shown = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
  hidden = [byte for byte in range(256) if byte not in shown]
  return ({chr(byte): byte for byte in shown}
          | {chr(0x100 + place): byte for place, byte in enumerate(hidden)})


BYTE_OF = _letters()


def write_json(
    path: str | os.PathLike[str],
    tokens: Sequence[str],
    merges: Sequence[str],
    token_types: Sequence[int] | None = None,
    pre: str = 'gpt-2',
    bos_id: int | None = None,
) -> None:
  """Writes the tokenizer.json of a byte-level BPE vocabulary, as of a GGUF.

  Args:
    path: the file to write.
    tokens: the spelling of each id, bytes as GPT-2 writes them.
    merges: pairs of tokens with a space between, the first merged first.
    token_types: of each id, as GGUF counts them: 3 is a special token, 4 one
      that is added but may stand in a text; None if all are normal.
    pre: how a text is cut before merging, by GGUF's name for it.
    bos_id: what `add_special` puts before a text; None for nothing.

  Raises:
    ValueError: if `pre` is unknown, lengths differ, or a token comes twice.
  """
  checks.one_of('pre', pre, tuple(_PRE))
  types = [1] * len(tokens) if token_types is None else list(token_types)
  vocabulary = {token: id_ for id_, token in enumerate(tokens)}
  if not len(types) == len(tokens) == len(vocabulary):
    raise ValueError(
        f'{path}: expected as many types as tokens, each token once, got '
        f'{len(types)} types of {len(tokens)} tokens, {len(vocabulary)} of '
        'them distinct.'
    )
  values = {
      'version': '1.0', 'truncation': None, 'padding': None,
      'added_tokens': [
          added_token(token, id_, type_ == _CONTROL)
          for (token, id_), type_ in zip(vocabulary.items(), types)
          if type_ in (_CONTROL, _USER_DEFINED)
      ],
      'normalizer': _PRE[pre].normalizer,
      'pre_tokenizer': {
          'type': 'Sequence', 'pretokenizers': list(_PRE[pre].steps)},
      'post_processor': _begin(tokens, bos_id),
      'decoder': _byte_level(use_regex=True),
      'model': _model(vocabulary, merges, _PRE[pre].ignore_merges),
  }
  text = json.dumps(values, ensure_ascii=False)
  pathlib.Path(path).write_text(text, encoding='utf-8')


def _model(vocabulary: dict[str, int], merges: Sequence[str],
           ignore_merges: bool) -> dict[str, Any]:
  return {
      'type': 'BPE', 'dropout': None, 'unk_token': None,
      'continuing_subword_prefix': None, 'end_of_word_suffix': None,
      'fuse_unk': False, 'byte_fallback': False,
      'ignore_merges': ignore_merges, 'vocab': vocabulary,
      'merges': list(merges),
  }


def added_token(
    content: str, id_: int, special: bool = False) -> dict[str, Any]:
  """Returns the entry of a token that is found before a text is cut."""
  return {'id': id_, 'content': content, 'single_word': False, 'lstrip': False,
          'rstrip': False, 'normalized': False, 'special': special}


def _begin(tokens: Sequence[str], bos_id: int | None) -> dict | None:
  """Returns the step that puts a token before a text."""
  if bos_id is None:
    return None
  bos = tokens[bos_id]
  first = [{'SpecialToken': {'id': bos, 'type_id': 0}}]
  sequences = [{'Sequence': {'id': name, 'type_id': 0}} for name in 'AB']
  return {
      'type': 'TemplateProcessing',
      'single': first + sequences[:1], 'pair': first + sequences,
      'special_tokens': {bos: {'id': bos, 'ids': [bos_id], 'tokens': [bos]}},
  }
