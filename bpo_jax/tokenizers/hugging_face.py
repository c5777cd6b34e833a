"""The tokenizer that a Hugging Face model directory holds."""

from collections.abc import Iterator, Mapping, Sequence
import functools
import importlib
import json
import os
import pathlib
from typing import Any

from bpo_jax.tokenizers import base
from bpo_jax.tokenizers import byte_level

_NAMES = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token',
          'cls_token', 'mask_token')


class HfTokenizer:
  """The tokenizer of a tokenizer.json, by the `tokenizers` library.

  Nothing is cut, padded or dropped at random, whatever the file asks for.

  Attributes:
    source: the file it is from.
    special_tokens: special tokens by what templates call them.
    eos_ids: the ids that end a text: the tokenizer's own, then the model's.
    bos_id: the id that begins a text; None if there is none.
    pad_id: the id of padding; where there is none, the first of `eos_ids`.
  """

  def __init__(
      self,
      values: Mapping[str, Any],
      source: str,
      special_tokens: Mapping[str, str] | None = None,
      ids: Mapping[str, Sequence[int]] | None = None,
  ):
    """Takes what `load` found.

    Args:
      values: the content of a tokenizer.json.
      source: the file it is from, for messages.
      special_tokens: spellings by name, such as `eos_token`.
      ids: what the model's settings give as `eos`, `bos` and `pad`.

    Raises:
      ImportError: if the library is not installed.
      ValueError: if it is no tokenizer, or lacks a token that it names.
    """
    self.source = source
    self.special_tokens = dict(special_tokens or {})
    decoder = _expect(dict, values.get('decoder'), source, 'decoder')
    self._decoder = decoder.get('type')
    model = _expect(dict, values.get('model'), source, 'model')
    if model.get('type') == 'BPE' and model.get('continuing_subword_prefix'):
      # The library cuts letters of several bytes in two, and then crashes.
      raise ValueError(
          f'{source}: model: expected no continuing_subword_prefix, got '
          f'{model["continuing_subword_prefix"]!r:.100}')
    self._text = json.dumps({**values, 'truncation': None, 'padding': None})
    self._plain = self._make()
    self._plain.encode_special_tokens = True
    for token in values.get('added_tokens') or ():
      self._check_added(token)
    ids = ids or {}
    self.eos_ids = self._named('eos', ids)
    self.bos_id = next(iter(self._named('bos', ids)), None)
    self.pad_id = (*self._named('pad', ids), *self.eos_ids, 0)[0]

  @functools.cached_property
  def vocab_size(self) -> int:
    """The largest id plus one."""
    return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """The ids of all special tokens."""
    added = self._plain.get_added_tokens_decoder().items()
    return frozenset(id_ for id_, token in added if token.special)

  def encode(self, text: str | Sequence[str], add_special: bool = False,
             parse_special: bool = False) -> list[int]:
    """Returns the ids of a text, as `TextTokenizer.encode` says.

    What a vocabulary without all 256 bytes cannot spell is dropped, as by the
    library; SmolLM2's is one.
    """
    tokenizer = self._parsing if parse_special else self._plain
    text = base.utf8(base.joined(text)).decode()
    return tokenizer.encode(text, add_special_tokens=add_special).ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids; an id that no token has reads as nothing.

    Raises:
      ValueError: if an id is negative.
    """
    return self._plain.decode(base.checked(ids), skip_special_tokens=False)

  def split(self, text: str) -> list[int | str]:
    """Returns the special tokens of a text as ids, and the text between."""
    text = base.utf8(text).decode()
    found = self._parsing.encode(text, add_special_tokens=False)
    spans = ((span, id_) for id_, span in zip(found.ids, found.offsets)
             if id_ in self.special_ids)
    return list(base.cut(text, spans))

  def token_bytes(self, id_: int) -> bytes:
    """Returns the bytes of one token; none for an id that no token has.

    Raises:
      ValueError: if the tokenizer is not of the byte-level kind.
    """
    if self._decoder != 'ByteLevel':
      raise ValueError(
          f'{self.source}: expected a decoder of type ByteLevel, as Qwen, '
          f'Llama 3 and SmolLM2 have, got {self._decoder}: its tokens are no '
          'bytes.'
      )
    token = self._plain.id_to_token(int(id_)) or ''
    if all(letter in byte_level.BYTE_OF for letter in token):
      return bytes(byte_level.BYTE_OF[letter] for letter in token)
    return token.encode()  # An added token is spelled as it is.

  def fingerprint(self) -> str:
    """Returns 16 hex digits that stand for the file and the ids of ends."""
    facts = [self.eos_ids, self.bos_id, self.pad_id, self.special_tokens]
    return base.digest(self._text + json.dumps(facts, sort_keys=True))

  def to_dict(self) -> dict[str, Any]:
    """Returns JSON-able values that are equal for equal tokenizers."""
    return {'kind': 'hugging_face', 'fingerprint': self.fingerprint()}

  @functools.cached_property
  def _parsing(self) -> Any:
    """The same tokenizer, but it takes a spelled special token for one."""
    return self._make()

  def _make(self) -> Any:
    library = _library()
    try:
      tokenizer = library.Tokenizer.from_str(self._text)
    except Exception as error:  # The library has no narrower type.
      raise ValueError(
          f'{self.source}: expected a tokenizer that the tokenizers library '
          f'reads, got one of which it says: {error}'
      ) from error
    if getattr(tokenizer.model, 'dropout', None):
      tokenizer.model.dropout = None
    return tokenizer

  def _check_added(self, token: Mapping[str, Any]) -> None:
    got = self._plain.token_to_id(token['content'])
    if got != token['id']:
      raise ValueError(
          f'{self.source}: expected the added token {token["content"]!r} to '
          f'have id {token["id"]}, but the vocabulary gives it {got}; ids must '
          'follow on one another.'
      )

  def _named(self, name: str, ids: Mapping[str, Sequence[int]]) -> tuple:
    """Returns the ids of `eos`, `bos` or `pad`, each once."""
    found = []
    spelled = self.special_tokens.get(f'{name}_token')
    if spelled is not None:
      found.append(self._plain.token_to_id(spelled))
      if found[0] is None:
        raise ValueError(
            f'{self.source}: expected {name}_token {spelled!r}, which the '
            'settings beside it name, among its tokens; it is not there.'
        )
    for id_ in ids.get(name, ()):
      if id_ < self.vocab_size and self._plain.id_to_token(id_) is not None:
        found.append(id_)
      elif name == 'eos':
        raise ValueError(
            f'{self.source}: expected a token of id {id_}, which the model '
            'settings beside it give as eos_token_id; there is none.'
        )
    return tuple(dict.fromkeys(found))


def load(directory: str | os.PathLike[str]) -> HfTokenizer:
  """Returns the tokenizer of a Hugging Face model directory.

  Reads tokenizer.json and, as transformers 4 and 5 write them, the special
  tokens of tokenizer_config.json and special_tokens_map.json and the ids of
  generation_config.json or else config.json.

  Args:
    directory: the model directory.

  Raises:
    ImportError: if the library is not installed.
    ValueError: if a file is missing or wrong; says which, and how.
  """
  folder = pathlib.Path(directory)
  path = folder / 'tokenizer.json'
  if not path.is_file():
    there = sorted(p.name for p in folder.glob('*')) if folder.is_dir() else []
    raise ValueError(
        f'{path}: expected the file of a fast tokenizer, which transformers '
        f'writes with save_pretrained; the directory has {there[:20]}.'
    )
  values = read_json(path)
  beside = folder / 'tokenizer_config.json'
  settings = read_json(beside, optional=True)
  if 'added_tokens_decoder' not in settings:  # As transformers has it.
    legacy = read_json(folder / 'special_tokens_map.json', optional=True)
    settings = {**settings, **legacy}
  values = {**values, 'added_tokens': _added(values, settings, folder)}
  special_tokens = {
      name: text for name in _NAMES
      if (text := _spelling(settings.get(name), beside, name)) is not None
  }
  return HfTokenizer(values, str(path), special_tokens, _model_ids(folder))


def read_json(
    path: pathlib.Path, optional: bool = False) -> dict[str, Any]:
  """Returns the object in a JSON file; {} if it may and does not exist.

  Raises:
    ValueError: if the file cannot be read, or holds no JSON object.
  """
  if optional and not path.is_file():
    return {}
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(
        f'{path}: expected a JSON file, but reading it fails: {error}'
    ) from error
  if not isinstance(values, dict):
    raise ValueError(
        f'{path}: expected a JSON object, got a {type(values).__name__}.')
  return values


def _library() -> Any:
  """Returns the tokenizers library."""
  try:
    return importlib.import_module('tokenizers')
  except ImportError as error:
    raise ImportError(
        "a Hugging Face tokenizer needs the extra 'hf': pip install "
        "'bpo-jax[hf]'"
    ) from error


def _added(
    values: Mapping[str, Any], settings: Mapping[str, Any],
    folder: pathlib.Path,
) -> list[dict[str, Any]]:
  """Returns the added tokens of tokenizer.json and of the settings beside it.

  What the settings call special is, if it is a token at all.
  """
  file = folder / 'tokenizer.json'
  beside = folder / 'tokenizer_config.json'
  entries = _expect(list, values.get('added_tokens'), file, 'added_tokens')
  added = {_content(token, file): dict(token) for token in entries}
  table = settings.get('added_tokens_decoder')
  table = _expect(dict, table, beside, 'added_tokens_decoder')
  for id_, token in table.items():
    id_ = int(id_) if id_.isdecimal() else id_
    fields = {**_expect(dict, token, beside, 'added_tokens_decoder'), 'id': id_}
    new = byte_level.added_token(_content(fields, beside), id_) | fields
    old = added.setdefault(new['content'], new)
    old['special'] = old.get('special', False) or new['special']
  vocabulary = _expect(dict, values.get('model'), file, 'model').get('vocab')
  for content in _special_spellings(settings, beside):
    if content in added:
      added[content]['special'] = True
    elif isinstance(vocabulary, dict) and content in vocabulary:
      id_ = vocabulary[content]
      added[content] = byte_level.added_token(content, id_, special=True)
  return sorted(added.values(), key=lambda token: token['id'])


def _special_spellings(
    settings: Mapping[str, Any], file: pathlib.Path) -> Iterator[str | None]:
  """Yields what tokenizer_config.json names as special, in either spelling."""
  for name, value in settings.items():
    if name.endswith('_token') and isinstance(value, (str, dict)):
      yield _spelling(value, file, name)
    elif name in ('extra_special_tokens', 'additional_special_tokens'):
      if isinstance(value, dict):  # By name, as transformers 5 writes it.
        value = list(value.values())
      for each in _expect(list, value, file, name):
        yield _spelling(each, file, name)


def _spelling(value: Any, file: pathlib.Path, name: str) -> str | None:
  """Returns the text of a token that is a string or an AddedToken's fields."""
  if value is None or isinstance(value, str):
    return value
  if isinstance(value, dict) and isinstance(value.get('content'), str):
    return value['content']
  raise ValueError(
      f'{file}: {name}: expected a string, or an object with a string as '
      f'content, got {value!r:.100}'
  )


def _content(token: Any, file: pathlib.Path) -> str:
  """Returns the text of an added token that is well formed."""
  if isinstance(token, dict) and isinstance(token.get('content'), str) and (
      type(token.get('id')) is int):
    return token['content']
  raise ValueError(
      f'{file}: expected added tokens with a string as content and an integer '
      f'as id, got {token!r:.100}'
  )


def _expect(
    kind: type, value: Any, file: pathlib.Path | str, name: str) -> Any:
  """Returns a list or dict of a JSON file; an empty one for None."""
  if value is None:
    return kind()
  if isinstance(value, kind):
    return value
  raise ValueError(
      f'{file}: {name}: expected a {kind.__name__}, got {value!r:.100}')


def _model_ids(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
  """Returns the ids of ends that the settings for sampling give, by name."""
  generation = read_json(folder / 'generation_config.json', optional=True)
  config = read_json(folder / 'config.json', optional=True)
  found = {}
  for name in ('eos', 'bos', 'pad'):
    key = f'{name}_token_id'
    value = generation.get(key)
    value = config.get(key) if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id_) is int for id_ in ids):
      raise ValueError(
          f'{folder}: {key}: expected a token id or a list of them, got '
          f'{value!r:.100}'
      )
    found[name] = tuple(id_ for id_ in ids if id_ >= 0)  # -1 stands for none.
  return found
