"""Turns what an environment says into tokens of fixed shape, and back.

An agent acts by naming one of the admissible commands, token by token. A codec
puts these commands in a table of tokens that masks what can be sampled, and
finds the command again from the tokens that were. Where any token may be drawn
there is no table, and no command is too long for it.
"""

from collections.abc import Mapping, Sequence
import collections
from typing import Protocol

import numpy as np

from environments import base

PAD = 0  # The token that fills up; no word is encoded by it.


class Phrasebook(Protocol):
  """How an environment's long sentences are put in few words."""

  def prompt(self, timestep: base.TimeStep) -> Sequence[str]:
    """Returns the words for the task and its first observation."""

  def observation(self, timestep: base.TimeStep, action: str) -> Sequence[str]:
    """Returns the words for what `action` led to."""

  def commands(
      self, available: tuple[str, ...]
  ) -> Mapping[tuple[str, ...], str]:
    """Returns each admissible command by the words the agent calls it by."""


class Tokenizer(Protocol):
  """Gives every word a token above zero."""

  def encode(self, words: Sequence[str]) -> Sequence[int]:
    """Returns a token per word."""


class _Table:
  """The admissible commands of one state, in both directions."""

  __slots__ = ('tokens', 'command_of')

  def __init__(self, tokens: np.ndarray, command_of: dict[bytes, str]):
    self.tokens = tokens  # [max_commands, action_length] int32, read only
    self.command_of = command_of  # by the bytes of its row of tokens


class TextCodec:
  """Text to int32 tokens and back, for one phrasebook and one tokenizer.

  Attributes:
    observation_length: tokens an observation is cut to.
    action_length: the most tokens of a command.
    max_commands: the most commands of a state.
    constrained: whether actions are drawn from the table of commands.
    truncated_observations: how many observations were cut.
    command_collisions: how many commands had the tokens of an earlier one and
      so cannot be chosen. Unknown words are the usual cause.
  """

  def __init__(
      self,
      phrasebook: Phrasebook,
      tokenizer: Tokenizer,
      observation_length: int,
      action_length: int,
      max_commands: int,
      cache_size: int = 16_384,
      constrained: bool = True,
  ):
    """Makes a codec with an empty cache.

    Args:
      phrasebook: puts text in words.
      tokenizer: puts words in tokens.
      observation_length: tokens an observation is cut to.
      action_length: the most tokens of a command.
      max_commands: the most commands of a state.
      cache_size: how many tables of commands to remember, about 4 KB each.
      constrained: whether actions are drawn from the table of commands, which
        else stays empty.

    Raises:
      ValueError: if a size is below one.
    """
    sizes = dict(
        observation_length=observation_length, action_length=action_length,
        max_commands=max_commands, cache_size=cache_size,
    )
    for name, size in sizes.items():
      if size < 1:
        raise ValueError(f'{name} must be at least 1, got {size}')
    self.observation_length = observation_length
    self.action_length = action_length
    self.max_commands = max_commands
    self.constrained = constrained
    self.truncated_observations = 0
    self.command_collisions = 0
    self._phrasebook = phrasebook
    self._tokenizer = tokenizer
    self._cache_size = cache_size
    self._row_size = 4 * action_length  # bytes
    self._no_commands = np.zeros((max_commands, action_length), np.int32)
    self._no_commands.flags.writeable = False
    self._tables: collections.OrderedDict[tuple[str, ...], _Table] = (
        collections.OrderedDict()
    )
    self._rows: dict[tuple[str, ...], bytes] = {}

  def encode_prompt(self, timestep: base.TimeStep) -> list[int]:
    """Returns the tokens of the task and its first observation, uncut."""
    return list(self._tokenizer.encode(self._phrasebook.prompt(timestep)))

  def encode_observation(
      self,
      timestep: base.TimeStep,
      action: str,
      action_tokens: Sequence[int] | None = None,
  ) -> tuple[np.ndarray, int]:
    """Returns [observation_length] int32 tokens and how many are no padding.

    Args:
      timestep: what the action led to.
      action: the command.
      action_tokens: as the policy drew it, without padding; of no use here,
        where words stand alone.
    """
    del action_tokens
    words = self._phrasebook.observation(timestep, action)
    tokens = self._tokenizer.encode(words)
    if len(tokens) > self.observation_length:
      self.truncated_observations += 1
      tokens = tokens[:self.observation_length]
    return self._padded(tokens)

  def _padded(self, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
    """Returns the tokens of an observation, 0-padded, and their number."""
    padded = np.zeros(self.observation_length, np.int32)
    padded[:len(tokens)] = tokens
    return padded, len(tokens)

  def encode_action(self, words: Sequence[str]) -> list[int]:
    """Returns the tokens of a command's words, with what belongs to an action.

    They are those of the table's row, where there is one, without padding.
    """
    return list(self._tokenizer.encode(words))

  def encode_commands(self, available: tuple[str, ...]) -> np.ndarray:
    """Returns [max_commands, action_length] int32, read only.

    A row per command, in the phrasebook's order and padded with 0; all-zero
    rows fill up. Where actions are not constrained, they are all that there is.

    Raises:
      ValueError: if there are too many commands, or one with too many tokens.
    """
    if not self.constrained:
      return self._no_commands
    return self._table(available).tokens

  def decode(
      self, available: tuple[str, ...], action_tokens: np.ndarray
  ) -> str | None:
    """Returns the admissible command of these tokens; None if none has them.

    Args:
      available: the admissible commands.
      action_tokens: [any length] int32; 0 on padding.
    """
    tokens = np.asarray(action_tokens, np.int32)
    if not self.constrained:
      return self._named(available, np.trim_zeros(tokens, 'b').tolist())
    row = tokens.tobytes().rstrip(b'\0').ljust(self._row_size, b'\0')
    return self._table(available).command_of.get(row)

  def _named(self, available: tuple[str, ...], tokens: list[int]) -> str | None:
    """Returns the first command of these tokens, looked up without a table."""
    commands = self._phrasebook.commands(available)
    return next((command for words, command in commands.items()
                 if tokens and self.encode_action(words) == tokens), None)

  def _table(self, available: tuple[str, ...]) -> _Table:
    """Returns the remembered table, or makes it and forgets the stalest."""
    table = self._tables.get(available)
    if table is None:
      table = self._make_table(available)
      self._tables[available] = table
      if len(self._tables) > self._cache_size:
        self._tables.popitem(last=False)
    else:
      self._tables.move_to_end(available)
    return table

  def _make_table(self, available: tuple[str, ...]) -> _Table:
    commands = self._phrasebook.commands(available)
    rows = [self._rows.get(words) or self._row(words) for words in commands]
    command_of = dict(zip(rows, commands.values()))
    if len(command_of) < len(rows):  # Some collide: the first is to stay.
      self.command_collisions += len(rows) - len(command_of)
      command_of = {}
      for row, command in zip(rows, commands.values()):
        command_of.setdefault(row, command)
    if len(command_of) > self.max_commands:
      raise ValueError(
          f'a state has {len(command_of)} admissible commands but '
          f'max_commands is {self.max_commands}; raise --max_commands'
      )
    size = self._row_size * self.max_commands
    flat = np.frombuffer(b''.join(command_of).ljust(size, b'\0'), np.int32)
    tokens = flat.reshape(self.max_commands, self.action_length)
    return _Table(tokens, command_of)

  def _row(self, words: tuple[str, ...]) -> bytes:
    """Returns, and remembers, the bytes of a command's row of the table."""
    tokens = self._tokenizer.encode(words)
    if not 0 < len(tokens) <= self.action_length:
      raise ValueError(
          f'the command {words} has {len(tokens)} tokens, expected 1 to '
          f'action_length = {self.action_length}; raise --max_action_tokens'
      )
    row = np.zeros(self.action_length, np.int32)
    row[:len(tokens)] = tokens
    if PAD in tokens:
      raise ValueError(f'the tokenizer gave {words} the padding token {PAD}')
    self._rows[words] = row.tobytes()
    return self._rows[words]
