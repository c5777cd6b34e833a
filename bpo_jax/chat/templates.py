"""Chat templates: where a model directory keeps them, and rendering them.

A template comes with a model and so from anywhere; it is only ever rendered by
`renderer`, in a process of its own with a limit on all that it can use up.
"""

from collections.abc import Iterable, Mapping, Sequence
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any, NamedTuple

from bpo_jax.tokenizers import hugging_face

_RENDERER = pathlib.Path(__file__).with_name('renderer.py')
_MAX_TEMPLATE = 1_000_000  # Characters; the largest known have some 20,000.
_KEPT = ('TZ', 'LD_LIBRARY_PATH')  # Of the environment; Python may need them.


class Limits(NamedTuple):
  """What rendering may use up.

  Attributes:
    cpu_seconds: time on the processor, all renderings of one call together.
    seconds: time by the clock, for a machine that is busy with other things.
    memory_bytes: address space of the process.
    characters: length of all that is rendered in one call.
  """

  cpu_seconds: int = 5
  seconds: float = 30.0
  memory_bytes: int = 1 << 28
  characters: int = 10_000_000


class Template(NamedTuple):
  """A chat template and the file it is from, which messages name."""

  text: str
  source: str


class Rendering(NamedTuple):
  """What became of one conversation: a text, or the template's complaint."""

  text: str
  error: str | None = None


def load_template(
    directory: str | os.PathLike[str], name: str = 'default') -> Template:
  """Returns the chat template of a Hugging Face model directory.

  As in transformers 5: the templates of chat_template.jinja (`default`) and
  additional_chat_templates/<name>.jinja, if there is any of them; else what
  tokenizer_config.json has as `chat_template`, a string or a list of names and
  templates; else that of chat_template.json, which processors used to write.

  Args:
    directory: the model directory.
    name: which template, where there are several.

  Raises:
    ValueError: if there is no such template, or a file is wrong.
  """
  folder = pathlib.Path(directory)
  found = _of_files(folder) or _of_settings(folder)
  if name in found:
    template = found[name]
    if len(template.text) > _MAX_TEMPLATE:
      raise ValueError(
          f'{template.source}: expected a chat template of at most '
          f'{_MAX_TEMPLATE} characters, got {len(template.text)}'
      )
    return template
  raise ValueError(
      f'{folder}: expected a chat template named {name!r} in '
      'chat_template.jinja, in tokenizer_config.json or in chat_template.json; '
      f'got {sorted(found) or "none"}. A base model has none: give that of its '
      'instruct variant.'
  )


def render(
    template: Template,
    contexts: Sequence[Mapping[str, Any]],
    now: str | None = None,
    limits: Limits = Limits(),
) -> list[Rendering]:
  """Renders a template once for each context, in one process of its own.

  Args:
    template: what to render.
    contexts: JSON-able variables by name, `messages` among them.
    now: the ISO date and time that the template is told it is; None for the
      clock's.
    limits: what all the contexts may use up together.

  Returns:
    A rendering per context: a template may refuse one and render the next.

  Raises:
    ImportError: if jinja2 is not installed.
    ValueError: if the template runs away or brings the process down; names the
      file and what happened.
  """
  request = json.dumps({
      'template': template.text, 'contexts': list(contexts), 'now': now,
      **limits._asdict(),
  })
  output = _run(template, request, limits)
  return [Rendering(a.get('text', ''), a.get('error'))
          for a in json.loads(output)['answers']]


def context(
    messages: Iterable[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns what transformers gives to a template for a conversation.

  Args:
    messages: `role` and `content` of each turn.
    add_generation_prompt: whether the assistant is to speak next.
    special_tokens: spellings by name, such as `eos_token`.
    variables: what the template knows besides, such as `enable_thinking`.
  """
  return {
      'tools': None, 'documents': None, **special_tokens, **(variables or {}),
      'messages': [dict(message) for message in messages],
      'add_generation_prompt': add_generation_prompt,
  }


def _of_files(folder: pathlib.Path) -> dict[str, Template]:
  """Returns the templates that are files, by name."""
  extra = sorted((folder / 'additional_chat_templates').glob('*.jinja'))
  paths = {path.stem: path for path in extra}
  if (folder / 'chat_template.jinja').is_file():
    paths['default'] = folder / 'chat_template.jinja'
  return {name: Template(_read(path), str(path))
          for name, path in paths.items()}


def _of_settings(folder: pathlib.Path) -> dict[str, Template]:
  """Returns the templates that stand in JSON files, by name."""
  for file in ('tokenizer_config.json', 'chat_template.json'):
    path = folder / file
    value = hugging_face.read_json(path, optional=True).get('chat_template')
    if value is not None:
      return {name: Template(text, f'{path}: chat_template')
              for name, text in _named(value, path).items()}
  return {}


def _named(value: Any, path: pathlib.Path) -> dict[str, str]:
  if isinstance(value, str):
    return {'default': value}
  if isinstance(value, list):
    try:
      value = {each['name']: each['template'] for each in value}
    except (TypeError, KeyError):
      value = None
  if isinstance(value, dict) and all(
      isinstance(text, str) for text in value.values()):
    return value
  raise ValueError(
      f'{path}: chat_template: expected a string, or a list of objects with '
      '`name` and `template`'
  )


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(
        f'{path}: expected a chat template in UTF-8, but reading it fails: '
        f'{error}'
    ) from error


def _run(template: Template, request: str, limits: Limits) -> bytes:
  """Returns what the renderer answers; it has ended by then, come what may."""
  process = subprocess.Popen(
      [sys.executable, '-I', '-S', '-X', 'utf8', str(_RENDERER), *_libraries()],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      env={name: os.environ[name] for name in _KEPT if name in os.environ},
      cwd=os.path.sep, start_new_session=True,
  )
  with process:
    try:
      output, complaint = process.communicate(
          request.encode(), timeout=limits.seconds)
    except subprocess.TimeoutExpired:
      raise ValueError(
          f'{template.source}: the chat template runs away: it took longer '
          f'than {limits.seconds} s.'
      ) from None
    finally:
      process.kill()
  if process.returncode:
    raise ValueError(
        f'{template.source}: the chat template '
        + _cause(process.returncode, complaint, limits)
    )
  return output


def _cause(code: int, complaint: bytes, limits: Limits) -> str:
  """Returns what brought the renderer down, in words."""
  if code == -signal.SIGXCPU:
    return f'runs away: it took over {limits.cpu_seconds} s of processor time.'
  last = complaint.decode('utf-8', 'replace').strip().rpartition('\n')[2]
  if 'MemoryError' in last:
    return f'takes more memory than {limits.memory_bytes} bytes.'
  if code < 0:
    last = f'it died of {signal.Signals(-code).name}'
  return f'cannot be rendered: {last[:300]}'


def _libraries() -> list[str]:
  """Returns the directories of jinja2 and of what it imports."""
  found = [importlib.util.find_spec(name) for name in ('jinja2', 'markupsafe')]
  if None in found:
    raise ImportError(
        "chat templates need the extra 'hf': pip install -e '.[hf]'")
  return list(dict.fromkeys(
      str(pathlib.Path(spec.origin).parents[1]) for spec in found))
