"""Conversations to render: known words that show where a template puts what,
and awkward ones that show whether it leaves them alone.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

_SAY, _REPLY = 'Look around.', 'Open drawer 1.'
_BRIEF = 'Be brief.'
_TEXTS = (
    _SAY, '', ' ', '\n', ' before', 'after ', '\nbefore', 'after\n\n',
    '\r\n\tmixed \r\n', 'two\n\n\nlines  and  gaps', '\u0301 combining',
    'Ünïcode, 漢字, 🙂 and e\u0301', '\u00a0\u3000wide\u2003', '\ufeffmark',
    '{{ 7 * 7 }}{% if %}{# #}', '<b>&amp;"\'\\n</b>',
    "it's we'LL 0 12 345 6789", '<think>a</think>b', '[INST] a [/INST]',
    'None', '{"a": [1, null]}',
)
_REPLIES = (
    '', ' before', 'after ', '\nbefore', 'after\n', 'Thought: a\nAction: b 1',
    '漢字 🙂', '{"a": "<b>"}', '<think>\na\n</think>\n\nb', '</think>b',
    '<think>a',
)
_LONG = 9  # Turns; a template may treat the latest few differently.


class Conversation(NamedTuple):
  """What was said; the assistant has replied to all or to all but the last."""

  system: str | None
  users: tuple[str, ...]
  replies: tuple[str, ...]

  @property
  def awaits_reply(self) -> bool:
    """Whether the assistant is to speak next."""
    return len(self.users) > len(self.replies)

  def turns(self) -> Iterator[tuple[str, str]]:
    """Yields role and content of each turn."""
    if self.system is not None:
      yield 'system', self.system
    for turn, user in enumerate(self.users):
      yield 'user', user
      if turn < len(self.replies):
        yield 'assistant', self.replies[turn]

  def messages(self) -> list[dict[str, str]]:
    """Returns the turns as a template takes them."""
    return [{'role': role, 'content': text} for role, text in self.turns()]


def known(system: bool, turns: int, finished: bool = False) -> Conversation:
  """Returns a conversation of words that stand nowhere else."""
  return Conversation(
      'qzsystemqz' if system else None,
      tuple(f'qzuser{turn}qz' for turn in range(turns)),
      tuple(f'qzreply{turn}qz' for turn in range(turns - (not finished))),
  )


def spaced(system: bool) -> Conversation:
  """Returns a conversation of words with space around them."""
  return Conversation(
      ' \n system\n ' if system else None,
      (' \n user\n ', '\tuser ', '\n\nuser'), (' \n reply\n ', '\n\nreply '))


def awkward_texts(
    spellings: Iterable[str], with_system: bool, without_system: bool
) -> Iterator[Conversation]:
  """Yields conversations in which all but the assistant say odd things.

  Args:
    spellings: special tokens as text, which nobody is to draw by saying them.
    with_system: whether conversations may start with a system's words.
    without_system: whether they may start without.
  """
  system = None if without_system else _BRIEF
  spelled = [text for each in spellings for text in (each, f'a {each} b')]
  for text in (*_TEXTS, *spelled):
    yield Conversation(system, (text,) * 3, (_REPLY,) * 2)
    if with_system:
      yield Conversation(text, (text, _SAY), (_REPLY,))
  yield Conversation(system, (_SAY,) * _LONG, (_REPLY,) * (_LONG - 1))


def awkward_replies(
    spellings: Iterable[str], without_system: bool) -> Iterator[Conversation]:
  """Yields conversations in which the assistant says odd things, or the last.
  """
  system = None if without_system else _BRIEF
  yield Conversation(system, (_SAY,) * _LONG, (_REPLY,) * _LONG)
  for text in (*_REPLIES, *spellings):
    yield Conversation(system, (_SAY,) * 3, (text,) * 2)
    yield Conversation(system, (_SAY,) * 2, (_REPLY, text))
