"""The turns of a conversation as tokens, which are appended and stay.

A chat template renders a whole conversation at once. A rollout cannot: what
the policy drew stays as it was drawn, and the next turn goes behind it. So the
text that the template puts between the turns is found once, by rendering
conversations of known words, and kept as tokens. Then conversations of awkward
words are rendered whole, to prove that appending gives the same.

Two things are never the same, by intent. What a user says is text even where it
spells a special token. And the tokens of a reply are those that were drawn,
where encoding its text again may give others.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
from typing import Any, Literal

from bpo_jax import checks
from bpo_jax import tokenizers
from bpo_jax.chat import frames as frames_lib
from bpo_jax.chat import probes
from bpo_jax.chat import templates

AlteredReplies = Literal['refuse', 'keep']
Message = Mapping[str, Any]  # `role` and `content`: text, or ids as drawn.


class Turns:
  """The pieces of a conversation as tokens; `Turns.of` finds them.

  A conversation is `opening`, then what the policy draws up to one of
  `stop_ids`, then `next_turn`, and so on.

  Attributes:
    end_of_turn: the id by which the template ends a reply; the policy draws it.
    stop_ids: all ids that end a reply, `end_of_turn` first.
  """

  def __init__(
      self,
      renderer: frames_lib.Renderer,
      frames: frames_lib.Frames,
      altered_replies: AlteredReplies,
  ):
    """Takes what `of` has; proves nothing.

    Raises:
      ValueError: if a reply has no token that ends it.
    """
    self._renderer = renderer
    self._tokenizer = renderer.tokenizer
    self._frames = frames
    self._keeps = altered_replies == 'keep'
    split = self._tokenizer.split
    self._opening = split(frames.opening or '')
    self._system = [split(text) for text in frames.system or ()]
    self._prompt = split(frames.prompt)
    self._between = split(frames.between)
    if not isinstance((self._between or [''])[0], int):
      renderer.refuse(
          f'goes on with {frames.between!r} after a reply: expected a special '
          'token there, for the policy to end its turn with.'
      )
    self.end_of_turn = self._between[0]
    self.stop_ids = tuple(
        dict.fromkeys((self.end_of_turn, *self._tokenizer.eos_ids)))

  @classmethod
  def of(
      cls,
      tokenizer: tokenizers.TextTokenizer,
      template: templates.Template,
      variables: Mapping[str, Any] | None = None,
      now: str | None = None,
      altered_replies: AlteredReplies = 'refuse',
  ) -> 'Turns':
    """Finds the pieces of a template and proves that appending them is right.

    Args:
      tokenizer: the model's.
      template: the model's, as `load_template` returns it.
      variables: what the template knows besides the conversation, such as
        `enable_thinking`.
      now: the ISO date and time that a template with a date in it is told, so
        that a run is the same tomorrow.
      altered_replies: what to do with a template that renders replies of the
        past otherwise than they were prompted and drawn, trimmed or without
        their thoughts: refuse it, or keep them as they were all the same.

    Raises:
      ImportError: if jinja2 is not installed.
      ValueError: if appending turns does not give the tokens of the
        conversation rendered whole; says from which token on, and what each
        gives. Or if the template fails or runs away.
    """
    checks.one_of('altered_replies', altered_replies, AlteredReplies)
    renderer = frames_lib.Renderer(tokenizer, template, variables or {}, now)
    frames = frames_lib.find(renderer, altered_replies == 'keep')
    turns = cls(renderer, frames, altered_replies)
    turns._prove()
    return turns

  def opening(self, system: str | None, user: str) -> list[int]:
    """Returns the tokens up to where the first reply begins.

    Args:
      system: what the system says; None for what the template says then.
      user: what the user says first.

    Raises:
      ValueError: if the template takes no system's words, or demands them.
    """
    self._check_system(system)
    said = self._frames.said
    if system is None:
      start = self._opening
    else:
      before, after = self._system
      start = [*before, said('system', system), *after]
    return self._encode([*start, said('user', user), *self._prompt])

  def next_turn(self, user: str, ended: bool = True) -> list[int]:
    """Returns the tokens from the end of a reply to where the next begins.

    Args:
      user: what the user says.
      ended: whether the reply ends with `end_of_turn`; where it does not, for
        it was cut or ended by another of `stop_ids`, the turn begins with it.
    """
    between = self._between[1:] if ended else self._between
    said = self._frames.said('user', user)
    return self._encode([*between, said, *self._prompt])

  def reply_text(self, ids: Sequence[int]) -> str:
    """Returns the text of a reply without its end, for the environment."""
    stop = len(ids) - (len(ids) > 0 and ids[-1] in self.stop_ids)
    return self._tokenizer.decode(ids[:stop])

  def verify(self, messages: Sequence[Message], ids: Sequence[int]) -> str:
    """Checks the tokens of a conversation against rendering it whole.

    Args:
      messages: the conversation; the content of an assistant's is its text or,
        where it was drawn, its ids.
      ids: its tokens, up to a prompt to reply or to the end of a reply.

    Returns:
      Where encoding the rendered text would give other tokens, and which: it
      would where a reply was drawn otherwise than its text is encoded, or a
      user spelled a special token. Empty where it gives the very same.

    Raises:
      ValueError: if the template renders another text than the tokens have, or
        the tokens are not `opening`, replies and `next_turn`s.
    """
    conversation, drawn = self._read(messages)
    self._check_system(conversation.system)
    expected = self._append(conversation, drawn)
    ids = list(ids)
    cut = not conversation.awaits_reply and ids == expected[:-1]
    if ids != expected and not cut:
      told = frames_lib.difference(
          self._tokenizer, expected, ids, ('appending turns', 'what came'))
      raise ValueError(f'ids: expected the tokens of turns; {told}')
    self._check_text(conversation)
    whole = self._frames.text(conversation)
    encoded = self._tokenizer.encode(whole, parse_special=True)
    return frames_lib.difference(self._tokenizer, encoded[:len(ids)], ids)

  def _prove(self) -> None:
    """Renders awkward conversations whole and compares with appending.

    Raises:
      ValueError: if the text differs, or the tokens where they should not.
    """
    spellings = self._spellings()
    for text in spellings:
      if self._tokenizer.special_ids & {*self._tokenizer.encode(text)}:
        raise ValueError(
            f'the tokenizer takes {text!r} in a text for a special token: '
            'whoever says it would end a turn')
    without = self._frames.opening is not None
    said = list(probes.awkward_texts(spellings, bool(self._system), without))
    replied = [] if self._keeps else list(
        probes.awkward_replies(spellings, without))
    renderings = self._renderer([*said, *replied])
    for conversation, rendering in zip(said, renderings):
      self._compare_text(conversation, rendering)
      self._compare_tokens(conversation)
    for conversation, rendering in zip(replied, renderings[len(said):]):
      self._compare_text(
          conversation, rendering,
          " Give altered_replies='keep' to keep replies as they were drawn.")

  def _compare_text(
      self, conversation: probes.Conversation, rendering: templates.Rendering,
      advice: str = '') -> None:
    """Raises ValueError unless a rendering is what appending gives."""
    refuse = self._renderer.refuse
    if rendering.error:
      refuse(f'fails on {conversation.messages()}: {rendering.error}.{advice}')
    expected = self._frames.whole(conversation)
    if told := self._renderer.difference(rendering.text, expected):
      refuse('does not render a conversation as its turns appended, '
             f'{told}; the conversation is {conversation.messages()}.{advice}')

  def _compare_tokens(self, conversation: probes.Conversation) -> None:
    """Raises ValueError unless encoding the whole gives the same tokens."""
    split, encode = self._tokenizer.split, self._tokenizer.encode
    if any(isinstance(part, int) for _, words in conversation.turns()
           for part in split(words)):
      return  # It spells a special token.
    whole = encode(self._frames.text(conversation), parse_special=True)
    appended = self._append(conversation, map(encode, conversation.replies))
    if told := frames_lib.difference(self._tokenizer, whole, appended):
      self._renderer.refuse(
          'lets tokens reach across the border of a turn, so that those of '
          f'the whole are not those of its turns, {told}; the conversation is '
          f'{conversation.messages()}.')

  def _check_text(self, conversation: probes.Conversation) -> None:
    """Raises ValueError unless the template renders what the turns say."""
    if self._keeps:  # Only what stands around the replies of the past.
      turns = len(conversation.users)
      replies = probes.known(False, turns).replies
      conversation = conversation._replace(replies=replies)
    rendering, = self._renderer([conversation])
    self._compare_text(conversation, rendering)

  def _append(self, conversation: probes.Conversation,
              replies: Iterable[Sequence[int]]) -> list[int]:
    """Returns the ids of a conversation with the ids of its replies."""
    first, *others = conversation.users
    ids = self.opening(conversation.system, first)
    for reply, user in itertools.zip_longest(replies, others):
      ids += [*reply, self.end_of_turn]
      if user is not None:
        ids += self.next_turn(user)
    return ids

  def _read(self, messages: Sequence[Message]
            ) -> tuple[probes.Conversation, list[list[int]]]:
    """Returns the conversation in words, and the ids of its replies."""
    roles = [message['role'] for message in messages]
    system = roles[:1] == ['system']
    turns = itertools.cycle(('user', 'assistant'))
    if roles[system:] != list(itertools.islice(turns, len(roles) - system)) or (
        len(roles) == system):
      raise ValueError(
          'messages: expected a system or none, then user and assistant in '
          f'turn, got {roles}')
    contents = [message['content'] for message in messages]
    said = contents[system + 1::2]
    drawn = [self._ids(reply) for reply in said]
    replies = [reply if isinstance(reply, str) else self._tokenizer.decode(ids)
               for reply, ids in zip(said, drawn)]
    return probes.Conversation(
        contents[0] if system else None, tuple(contents[system::2]),
        tuple(replies)), drawn

  def _ids(self, reply: str | Sequence[int]) -> list[int]:
    """Returns the ids of a reply without its end."""
    if isinstance(reply, str):
      return self._tokenizer.encode(reply)
    reply = list(reply)
    return reply[:-1] if reply[-1:] == [self.end_of_turn] else reply

  def _check_system(self, system: str | None) -> None:
    if system is None and self._frames.opening is None:
      self._renderer.refuse('demands a system message.')
    if system is not None and not self._system:
      self._renderer.refuse('takes no system message.')

  def _spellings(self) -> list[str]:
    """Returns the special tokens that a template uses, as text."""
    pieces = itertools.chain(
        self._opening, *self._system, self._prompt, self._between)
    ids = {part for part in pieces if isinstance(part, int)}
    named = self._tokenizer.special_tokens.values()
    return sorted({*named, *(self._tokenizer.decode([id_]) for id_ in ids)})

  def _encode(self, parts: Iterable[int | str]) -> list[int]:
    """Returns the ids of special tokens and of the text between them.

    Text that meets is encoded in one: tokens may reach across what the
    template says and what a user does.
    """
    ids = []
    for is_text, group in itertools.groupby(
        parts, lambda part: isinstance(part, str)):
      ids += self._tokenizer.encode(''.join(group)) if is_text else group
    return ids
