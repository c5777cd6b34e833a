"""Turns of a conversation in place of words: the codec of language models.

What the environment says is a user's turn and what the agent does is a reply,
framed as the model's chat template has it. Turns are appended as tokens: what
the policy drew stays as it was drawn.
"""

from collections.abc import Sequence
from typing import Protocol
import unicodedata

import numpy as np

from environments import base
from environments import codec

_UNTOLD = ' [...]'  # Where an observation was cut.


class Turns(Protocol):
  """The pieces of a conversation as tokens, such as `bpo_jax.chat.Turns`."""

  end_of_turn: int  # The token that ends a reply.
  stop_ids: Sequence[int]  # All that do.

  def opening(self, system: str | None, user: str) -> Sequence[int]:
    """Returns the tokens up to where the first reply begins."""

  def next_turn(self, user: str, ended: bool = True) -> Sequence[int]:
    """Returns the tokens from the end of a reply to where the next begins."""

  def reply_text(self, ids: Sequence[int]) -> str:
    """Returns the text of a reply without its end."""


class TextTokenizer(Protocol):
  """Puts any text in tokens, and back."""

  def encode(self, text: str) -> Sequence[int]:
    """Returns the tokens of a text; no special token is among them."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of tokens."""


class Conversation:
  """The phrasebook of an agent that reads and writes plain text.

  Attributes:
    system: what the agent is told before all else; None for what the template
      says then.
    list_commands: whether each turn lists the admissible commands.
  """

  def __init__(self, system: str | None, list_commands: bool):
    self.system = system
    self.list_commands = list_commands

  def prompt(self, timestep: base.TimeStep) -> tuple[str]:
    """Returns what the user says first."""
    return (self._told(timestep),)

  def observation(self, timestep: base.TimeStep, action: str) -> tuple[str]:
    """Returns what the user says of what `action` led to."""
    del action  # The agent has said it.
    return (self._told(timestep),)

  def action(self, command: str, available: Sequence[str]) -> tuple[str]:
    """Returns the words of a command: the command."""
    del available
    return (command,)

  def commands(self, available: Sequence[str]) -> dict[tuple[str], str]:
    """Returns each admissible command by its words."""
    return {(command,): command for command in available}

  def _told(self, timestep: base.TimeStep) -> str:
    told = timestep.observation.strip()
    if self.list_commands and timestep.available:
      told += '\nAvailable actions: ' + ', '.join(timestep.available)
    return told


class _Replies:
  """Puts a reply in tokens as the policy would draw it, its end included."""

  def __init__(self, turns: Turns, tokenizer: TextTokenizer):
    self._turns = turns
    self._tokenizer = tokenizer

  def encode(self, words: Sequence[str]) -> list[int]:
    text, = words
    return [*self._tokenizer.encode(text), self._turns.end_of_turn]


def _plain(text: str) -> str:
  """Returns a text as it is compared with others, however it was spelled."""
  return ' '.join(unicodedata.normalize('NFC', text).casefold().split())


class ChatCodec(codec.TextCodec):
  """Observations as a user's turns, commands as replies that end their turn.

  Attributes:
    observation_length: tokens that a user's turn is cut to, its frame included.
    action_length: the most tokens of a reply, its end included.
  """

  def __init__(
      self,
      conversation: Conversation,
      turns: Turns,
      tokenizer: TextTokenizer,
      observation_length: int,
      action_length: int,
      max_commands: int,
      constrained: bool = True,
  ):
    """Makes a codec with an empty cache.

    Args:
      conversation: what is said.
      turns: how the model's template frames it.
      tokenizer: the model's.
      observation_length: tokens that a user's turn is cut to, frame included.
      action_length: the most tokens of a reply, its end included.
      max_commands: the most commands of a state; of no use where replies are
        free.
      constrained: whether replies are drawn from the table of commands; if not,
        they are free.

    Raises:
      ValueError: if a size is below one, or a turn cannot hold its frame.
    """
    super().__init__(
        conversation, _Replies(turns, tokenizer), observation_length,
        action_length, max_commands, constrained=constrained)
    self._conversation, self._turns = conversation, turns
    self._text = tokenizer
    frame = len(turns.next_turn(_UNTOLD, ended=False))
    if frame >= observation_length:
      raise ValueError(
          f'observation_length: expected more than the {frame} tokens that the'
          f' chat template puts around a turn, got {observation_length}; raise'
          ' --observation_length')

  def encode_prompt(self, timestep: base.TimeStep) -> list[int]:
    """Returns the tokens up to where the first reply begins, uncut."""
    told, = self._conversation.prompt(timestep)
    return list(self._turns.opening(self._conversation.system, told))

  def encode_observation(
      self,
      timestep: base.TimeStep,
      action: str,
      action_tokens: Sequence[int] | None = None,
  ) -> tuple[np.ndarray, int]:
    """Returns [observation_length] int32 tokens and how many are no padding.

    Args:
      timestep: what the action led to.
      action: the command that was understood.
      action_tokens: the reply as it was drawn, without padding; None for one
        that ended its turn. One that did not has it ended by the next turn.
    """
    ended = action_tokens is None or self._ended(action_tokens)
    told, = self._conversation.observation(timestep, action)
    tokens = self._turns.next_turn(told, ended)
    if len(tokens) > self.observation_length:
      self.truncated_observations += 1
      tokens = self._cut(told, ended)
    return self._padded(tokens)

  def decode(
      self, available: tuple[str, ...], action_tokens: np.ndarray
  ) -> str | None:
    """Returns the admissible command that a reply names; None if none.

    A reply in other tokens than the command's own, or with blanks around it, or
    in capitals, names it all the same. Where actions are free-form it is the
    action.

    Args:
      available: the admissible commands; none where actions are free-form.
      action_tokens: the reply as it was drawn, without padding: token 0 is one
        like all others.
    """
    text = self._turns.reply_text(np.asarray(action_tokens).tolist())
    if not available:
      return text or None
    if self.constrained:
      command = super().decode(available, action_tokens)
      if command is not None:
        return command
    said = _plain(text)
    named = [name for name in available if _plain(name) == said]
    return text if text in named else next(iter(named), None)

  def _ended(self, action_tokens: Sequence[int]) -> bool:
    return len(action_tokens) > 0 and (
        int(action_tokens[-1]) == self._turns.end_of_turn)

  def _cut(self, told: str, ended: bool) -> Sequence[int]:
    """Returns a turn that tells as much of a text as goes into its tokens."""
    ids = list(self._text.encode(told))
    room = self.observation_length
    while True:  # Tokens may grow together where a text is cut: try again.
      ids = ids[:room]
      text = self._text.decode(ids).rstrip('\N{REPLACEMENT CHARACTER}')
      tokens = self._turns.next_turn(text + _UNTOLD, ended)
      excess = len(tokens) - self.observation_length
      if excess <= 0:
        return tokens
      room = max(0, len(ids) - excess)
