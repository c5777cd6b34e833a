"""absl flags made from config dataclasses, one flag per field.

A binary is three lines:

  config_flags.define(configs.TrainConfig)

  def main(_):
    config = config_flags.read(configs.TrainConfig)

  if __name__ == '__main__':
    config_flags.run(main)

A flag has its field's name, type, default, range and help text. A value or a
name that is wrong ends the program with one line that says what was expected.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
import typing
from typing import Any, Literal, TypeVar

from absl import app
from absl import flags
from experiments import config_fields

Config = TypeVar('Config')
_BOOLEANS = {
    'true': True, 't': True, '1': True, 'yes': True,
    'false': False, 'f': False, '0': False, 'no': False,
}
# Exit statuses, as shells have them.
_USAGE_ERROR = 2
INTERRUPTED = 130

# The flags belong to the binary that calls `define`: its --help lists them.
flags.disclaim_key_flags()


def define(
    config_class: type, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
  """Defines a flag for every field of a config.

  Args:
    config_class: a frozen dataclass of `config_fields.field`s.
    flag_values: where the flags go.

  Raises:
    ValueError: if a field's own default is not one of its values.
  """
  annotations = config_fields.annotations_of(config_class)
  for spec in dataclasses.fields(config_class):
    _define_field(spec, annotations[spec.name], flag_values)


def read(
    config_class: type[Config], flag_values: flags.FlagValues = flags.FLAGS
) -> Config:
  """Returns the config that the flags spell out.

  Raises:
    flags.IllegalFlagValueError: if values that are right one by one do not go
      together, by the config's own `__post_init__`. `run` prints it.
  """
  values = {spec.name: flag_values[spec.name].value
            for spec in dataclasses.fields(config_class)}
  try:
    return config_class(**values)
  except ValueError as error:
    raise flags.IllegalFlagValueError(str(error)) from error


def run(main: Callable[[Sequence[str]], Any]) -> None:
  """Parses the command line and calls `main`; a wrong flag is one clear line.

  Never returns: it exits with 0, with 2 after a wrong flag, with 130 after
  Ctrl-C, or with the status that `main` returns.
  """
  app.run(lambda argv: _run_main(main, argv), flags_parser=parse)


def parse(
    argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> list[str]:
  """Parses a command line, or prints one line to stderr and exits with 2."""
  try:
    rest = flag_values(argv)
  except flags.UnrecognizedFlagError as error:
    _exit(_unknown_flag(error.flagname, list(flag_values)))
  except flags.Error as error:
    _exit(str(error))
  if rest[1:]:
    _exit(f'Unexpected argument {rest[1]!r}: write --name=value.'
          + config_fields.near(rest[1].split('=')[0], list(flag_values)))
  return rest


def to_dict(config: Any) -> dict[str, Any]:
  """Returns the config as JSON-able values, in the order of its fields."""
  return {
      spec.name: _plain(getattr(config, spec.name))
      for spec in dataclasses.fields(config)
  }


def from_dict(config_class: type[Config], values: Mapping[str, Any]) -> Config:
  """Returns the config whose `to_dict` gave `values`.

  Raises:
    ValueError: if a name is unknown or missing, or a value is not allowed.
  """
  annotations = config_fields.annotations_of(config_class)
  unknown = sorted(set(values) - set(annotations))
  if unknown:
    raise ValueError(
        f'{config_class.__name__} has no field {unknown[0]}.'
        + config_fields.near(unknown[0], list(annotations))
    )
  required = [
      spec.name for spec in dataclasses.fields(config_class)
      if spec.default is dataclasses.MISSING and spec.name not in values
  ]
  if required:
    raise ValueError(f'{config_class.__name__} needs {", ".join(required)}.')
  return config_class(
      **{n: _from_plain(value, annotations[n]) for n, value in values.items()}
  )


class _FieldParser(flags.ArgumentParser):
  """Parses the text of one flag into a value that its field allows."""

  def __init__(self, annotation: Any, metadata: Mapping[str, Any]):
    self._annotation = annotation
    self._metadata = metadata
    # What may be none is so unless the flag is given; help says it in a word.
    inner = config_fields.optional_of(annotation)
    self.syntactic_help = config_fields.describe(inner or annotation) + (
        '; unset unless given' if inner is not None else '')

  def parse(self, argument: Any) -> Any:
    value, annotation = argument, self._annotation
    if isinstance(argument, str):
      if argument in (self._metadata.get('choices') or ()):
        # A choice called none is that choice; the default is then ''.
        annotation = config_fields.optional_of(annotation) or annotation
      is_refused = self._metadata.get('not_blank') and not argument.strip()
      value = argument if is_refused else _from_text(argument, annotation)
    fault = config_fields.find_fault(value, self._annotation, self._metadata)
    if fault:
      raise ValueError(fault)
    return value

  def flag_type(self) -> str:
    return self.syntactic_help


class _FieldSerializer(flags.ArgumentSerializer):
  """Writes a value as the text that parses back into it."""

  def __init__(self, metadata: Mapping[str, Any]):
    self._none = '' if 'none' in (metadata.get('choices') or ()) else 'none'

  def serialize(self, value: Any) -> str:
    return self._none if value is None else _to_text(value)


class _FieldFlag(flags.Flag):
  """A flag that takes None by name, and --name / --noname where it is bool."""

  def __init__(self, annotation: Any, spec: dataclasses.Field):
    default = spec.default
    super().__init__(
        _FieldParser(annotation, spec.metadata),
        _FieldSerializer(spec.metadata), spec.name,
        None if default is dataclasses.MISSING else default, _help_text(spec),
        boolean=bool in (annotation, config_fields.optional_of(annotation)),
    )


def _define_field(
    spec: dataclasses.Field,
    annotation: Any,
    flag_values: flags.FlagValues,
) -> None:
  try:
    flag = _FieldFlag(annotation, spec)
  except flags.IllegalFlagValueError as error:
    raise ValueError(f'the default of {error}') from error
  flags.DEFINE_flag(flag, flag_values)
  if spec.default is dataclasses.MISSING:
    flags.mark_flag_as_required(spec.name, flag_values)


def _help_text(spec: dataclasses.Field) -> str:
  metadata = spec.metadata
  limits = [
      f'{word} {metadata[key]}'
      for key, word in (('min', 'at least'), ('max', 'at most'))
      if metadata.get(key) is not None
  ]
  if metadata.get('choices') is not None:
    limits.append('one of ' + ', '.join(map(str, metadata['choices'])))
  text = metadata.get('help', '')
  return f'{text} ({"; ".join(limits)})' if limits else text


def _from_text(text: str, annotation: Any) -> Any:
  """Returns the value written in `text`, or `text` where it is no such value.

  Text that does not parse is returned for `find_fault` to name.
  """
  inner = config_fields.optional_of(annotation)
  if inner is not None:
    is_none = text.strip().lower() in ('none', '')
    return None if is_none else _from_text(text, inner)
  if typing.get_origin(annotation) is tuple:
    parts = [part.strip() for part in text.split(',')] if text.strip() else []
    elements = config_fields.tuple_elements(annotation, len(parts))
    if len(elements) != len(parts):
      return text
    return tuple(map(_from_text, parts, elements))
  if typing.get_origin(annotation) is Literal:
    named = {str(value): value for value in typing.get_args(annotation)}
    return named.get(text, text)
  if annotation is bool:
    return _BOOLEANS.get(text.strip().lower(), text)
  try:
    return annotation(text)
  except ValueError:
    return text


def _to_text(value: Any) -> str:
  if isinstance(value, tuple):
    return ','.join(map(_to_text, value))
  if value is None or isinstance(value, bool):
    return str(value).lower()
  return str(value)


def _plain(value: Any) -> Any:
  if isinstance(value, tuple):
    return [_plain(element) for element in value]
  return value


def _from_plain(value: Any, annotation: Any) -> Any:
  inner = config_fields.optional_of(annotation)
  if inner is not None and value is not None:
    return _from_plain(value, inner)
  if typing.get_origin(annotation) is tuple and isinstance(value, list):
    elements = config_fields.tuple_elements(annotation, len(value))
    if len(elements) != len(value):
      return tuple(value)
    return tuple(map(_from_plain, value, elements))
  return value


def _run_main(main: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> Any:
  try:
    return main(argv)
  except flags.Error as error:
    return _exit(str(error))
  except KeyboardInterrupt:
    print('\nStopped before it was done.', file=sys.stderr)
    return INTERRUPTED


def _unknown_flag(name: str, names: Sequence[str]) -> str:
  """Names the flags that are spelled like `name`."""
  if name.startswith('no') and name[2:] in names:
    return f'--{name}: flag {name[2:]} is not true or false; give it a value.'
  close = config_fields.near(name, list(names))
  return f'Unknown flag --{name}.' + (close or ' See --help for all flags.')


def _exit(message: str) -> typing.NoReturn:
  line = ' '.join(message.split())
  print(f'error: {line}', file=sys.stderr)
  sys.exit(_USAGE_ERROR)
