"""The program that renders chat templates, in a process of its own.

A template is a program of unknown origin. It runs in jinja2's sandbox, and the
sandbox in a process that has neither the caller's memory nor its environment,
and cannot take more time, memory or output than it is given.

Reads a JSON request from standard input and writes a JSON answer to standard
output. Run by path, it imports nothing of this library; its arguments are the
directories that hold what it does import.
"""

import datetime
import json
import resource
import sys
from typing import Any

_ERROR_LENGTH = 500  # Characters of a template's own message.


def _set_limits(request: dict[str, Any]) -> None:
  cpu, memory = request['cpu_seconds'], request['memory_bytes']
  limits = {
      'RLIMIT_CPU': (cpu, cpu + 1),  # A second apart, for the signal to tell.
      'RLIMIT_AS': (memory, memory),
      'RLIMIT_FSIZE': (0, 0),
      'RLIMIT_CORE': (0, 0),
  }
  for name, pair in limits.items():
    try:
      resource.setrlimit(getattr(resource, name), pair)
    except (ValueError, OSError):  # Not every system has every limit.
      pass


def _environment(now: datetime.datetime | None) -> Any:
  """Returns jinja2's sandbox with what transformers gives to templates."""
  # pylint: disable=import-outside-toplevel
  import jinja2
  from jinja2 import ext
  from jinja2 import nodes
  from jinja2 import sandbox

  class Generation(ext.Extension):
    """Lets `{% generation %}` stand around what the assistant says."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return nodes.Scope(body, lineno=line)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None,
             separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                      separators=separators, sort_keys=sort_keys)

  def strftime_now(form: str) -> str:
    return (now or datetime.datetime.now()).strftime(form)

  environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True,
      extensions=[Generation, ext.loopcontrols])
  environment.filters['tojson'] = tojson
  environment.globals.update(
      raise_exception=raise_exception, strftime_now=strftime_now)
  return environment


def _render(template: Any, context: dict[str, Any], room: int) -> str:
  """Returns the text; ValueError once it is longer than `room`."""
  parts = []
  for part in template.generate(context):
    parts.append(part)
    room -= len(part)
    if room < 0:
      raise ValueError('its text grows too long')
  return ''.join(parts)


def _answer(request: dict[str, Any]) -> list[dict[str, str]]:
  """Returns the text of each context, or what went wrong with it."""
  now = request['now'] and datetime.datetime.fromisoformat(request['now'])
  room = request['characters']
  answers = []
  try:
    template = _environment(now).from_string(request['template'])
  except Exception as error:
    return [_failure(error)] * len(request['contexts'])
  for context in request['contexts']:
    try:
      text = _render(template, context, room)
    except Exception as error:
      answers.append(_failure(error))
    else:
      answers.append({'text': text})
      room -= len(text)
  return answers


def _failure(error: Exception) -> dict[str, str]:
  line = getattr(error, 'lineno', None)
  where = f' in line {line}' if line else ''
  text = f'{type(error).__name__}{where}: {error}'
  return {'error': text[:_ERROR_LENGTH].removesuffix(': ')}


def main() -> None:
  """Answers the one request."""
  sys.path[:0] = sys.argv[1:]
  request = json.load(sys.stdin)
  _set_limits(request)
  json.dump({'answers': _answer(request)}, sys.stdout)


if __name__ == '__main__':
  main()
