"""What a chat template puts around what is said, found by rendering."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
from typing import Any, NamedTuple, NoReturn

from bpo_jax import tokenizers
from bpo_jax.chat import probes
from bpo_jax.chat import templates

_DATES = ('2001-02-03T04:05:06', '2031-11-23T21:22:23')
_SHOWN = 12  # Tokens of either side that a message shows.
_SIDES = ('rendering the whole', 'appending turns')


class Renderer(NamedTuple):
  """A template and all that it is rendered with but for the conversation."""

  tokenizer: tokenizers.TextTokenizer
  template: templates.Template
  variables: Mapping[str, Any]
  now: str | None

  def __call__(
      self, conversations: Sequence[probes.Conversation]
  ) -> list[templates.Rendering]:
    """Renders each conversation whole."""
    contexts = [
        templates.context(each.messages(), each.awaits_reply,
                          self.tokenizer.special_tokens, self.variables)
        for each in conversations
    ]
    return templates.render(self.template, contexts, self.now)

  def refuse(self, why: str) -> NoReturn:
    """Raises a ValueError that names the template's file."""
    raise ValueError(f'{self.template.source}: the chat template {why}')

  def difference(self, one: str, other: str,
                 sides: tuple[str, str] = _SIDES) -> str:
    """Returns where and how two texts differ, in tokens; '' if they do not."""
    if one == other:
      return ''
    ids = [self.tokenizer.encode(text, parse_special=True)
           for text in (one, other)]
    told = difference(self.tokenizer, *ids, sides)
    if told:
      return told
    place = _first_difference(one, other)  # A tokenizer may drop characters.
    shown = slice(place, place + 4 * _SHOWN)
    return (f'from character {place} on: {sides[0]} gives {one[shown]!r}, '
            f'{sides[1]} gives {other[shown]!r}')


class Frames(NamedTuple):
  """A template's own text, and whose words it trims.

  Attributes:
    opening: before the first user's words where no system speaks; None if the
      template demands a system.
    system: before and after a system's words; None if it takes none.
    prompt: from the end of a user's words to where a reply is to be drawn.
    past_prompt: the same before a reply of the past; a template may have put
      the beginning of a reply in `prompt`, and take it out later.
    between: from the end of a reply to the next user's words.
    tail: from the end of the last reply on.
    trimmed: the roles whose words lose the space around them.
  """

  opening: str | None
  system: tuple[str, str] | None
  prompt: str
  past_prompt: str
  between: str
  tail: str
  trimmed: frozenset[str] = frozenset()

  def said(self, role: str, words: str) -> str:
    """Returns the words of a role as the template shows them."""
    return words.strip() if role in self.trimmed else words

  def text(self, conversation: probes.Conversation) -> str:
    """Returns the text of a conversation as appending its turns gives it."""
    return ''.join(self._parts(conversation, self.prompt))

  def whole(self, conversation: probes.Conversation) -> str:
    """Returns the text of a conversation as it should be rendered whole."""
    return ''.join(self._parts(conversation, self.past_prompt))

  def _parts(self, conversation: probes.Conversation,
             past_prompt: str) -> Iterator[str]:
    if conversation.system is None:
      yield self.opening or ''
    else:
      before, after = self.system or ('', '')
      yield from (before, self.said('system', conversation.system), after)
    for turn, user in enumerate(conversation.users):
      if turn:
        yield self.between
      yield self.said('user', user)
      if turn < len(conversation.replies):
        yield past_prompt
        yield self.said('assistant', conversation.replies[turn])
      else:
        yield self.prompt
    if not conversation.awaits_reply:
      yield self.tail


def find(renderer: Renderer, altered_replies: bool) -> Frames:
  """Returns the frames of a template, as its shortest conversations show them.

  Args:
    renderer: renders conversations with it.
    altered_replies: whether `prompt` may begin a reply with more than
      `past_prompt` does.

  Raises:
    ValueError: if it fails, depends on the date, or does not show all that is
      said once and in order.
  """
  _check_date(renderer)
  asked = [probes.known(system, turns=2) for system in (False, True)]
  ended = [each._replace(users=each.users[:1]) for each in asked]
  spaced = [probes.spaced(system) for system in (False, True)]
  *found, spaced_plain, spaced_system = renderer([*asked, *ended, *spaced])
  if all(rendering.error for rendering in found[:2]):
    renderer.refuse(f'renders no conversation: {found[0].error}')
  gaps = [None if rendering.error else _gaps(renderer, conversation, rendering)
          for conversation, rendering in zip([*asked, *ended], found)]
  plain, system = gaps[:2]
  *_, past_prompt, between, prompt = plain or system
  *_, tail = gaps[2] or gaps[3] or ('',)
  if not (altered_replies and prompt.startswith(past_prompt)):
    past_prompt = prompt
  frames = Frames(
      opening=plain and plain[0], system=system and tuple(system[:2]),
      prompt=prompt, past_prompt=past_prompt, between=between, tail=tail)
  shown = spaced_system if system else spaced_plain
  return _with_trims(frames, spaced[system is not None], shown.text)


def difference(
    tokenizer: tokenizers.TextTokenizer,
    one: Sequence[int],
    other: Sequence[int],
    sides: tuple[str, str] = _SIDES,
) -> str:
  """Returns where and how two rows of ids differ; '' if they do not."""
  place = _first_difference(one, other)
  if place is None:
    return ''
  shown = slice(place, place + _SHOWN)
  one, other = list(one[shown]), list(other[shown])
  return (f'from token {place} on: {sides[0]} gives {tokenizer.decode(one)!r} '
          f'{one}, {sides[1]} gives {tokenizer.decode(other)!r} {other}')


def _first_difference(one: Sequence, other: Sequence) -> int | None:
  pairs = enumerate(itertools.zip_longest(one, other))
  return next((place for place, (a, b) in pairs if a != b), None)


def _gaps(renderer: Renderer, conversation: probes.Conversation,
          rendering: templates.Rendering) -> list[str]:
  """Returns the text before, between and after all that is said."""
  gaps, rest = [], rendering.text
  for role, words in conversation.turns():
    gap, found, rest = rest.partition(words)
    if not found or words in rest:
      renderer.refuse(
          f'shows the words of a turn ({role}) not once and in order: it '
          f'renders {conversation.messages()} as {rendering.text[:1000]!r}'
      )
    gaps.append(gap)
  return [*gaps, rest]


def _check_date(renderer: Renderer) -> None:
  """Refuses a template that says another thing on another day."""
  if renderer.now is not None or 'strftime_now' not in renderer.template.text:
    return
  conversations = [probes.known(system, turns=1) for system in (False, True)]
  for found in zip(*(renderer._replace(now=date)(conversations)
                     for date in _DATES)):
    texts = [rendering.text for rendering in found]
    if told := renderer.difference(*texts, _DATES):
      renderer.refuse(
          f'depends on the date, {told}; give it a fixed one with `now`, such '
          "as now='2024-07-26'."
      )


def _with_trims(
    frames: Frames, conversation: probes.Conversation, text: str) -> Frames:
  """Returns frames that trim the roles that a text has trimmed, if any does."""
  roles = list(dict.fromkeys(role for role, _ in conversation.turns()))
  for trims in itertools.product((False, True), repeat=len(roles)):
    trimmed = frozenset(itertools.compress(roles, trims))
    if frames._replace(trimmed=trimmed).whole(conversation) == text:
      # A reply stays as it was drawn.
      return frames._replace(trimmed=trimmed - {'assistant'})
  return frames
