"""The sentences of a game file: read, checked and compiled to functions.

A grammar gives every action a command template and a feedback, and expands
symbols by productions: the first whose condition holds is said. Nothing of it
is evaluated as code. Compiled texts are functions of (game, state, values),
where `values` holds the numbers of the entities that the text's variables
stand for.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
import functools
import json
import re
from typing import Any, NamedTuple

from environments.alfworld import domain
from environments.alfworld import queries
from environments.alfworld import relations
from environments.alfworld import state as state_lib

Facts = relations.Facts
Values = queries.Values
Scope = queries.Scope
Text = Callable[[Facts, state_lib.State, Values], str]


class Production(NamedTuple):
  """One way to say a symbol: `rhs`, if `condition` holds or is empty."""

  rhs: str
  condition: str


class Document(NamedTuple):
  """A grammar as it is written.

  Attributes:
    symbols: the productions of each symbol, in order.
    templates: the command template by lower-case action.
    feedback: the feedback text by lower-case action.
  """

  symbols: Mapping[str, Sequence[Production]]
  templates: Mapping[str, str]
  feedback: Mapping[str, str]


class Grammar(NamedTuple):
  """A compiled grammar; each text takes (game, state, arguments).

  Attributes:
    intro: what is told on entering a game; it has no arguments.
    templates: the command by action; arguments in the domain's order.
    feedback: what is told after the action; arguments as above.
    parameters: by action the places of those arguments that the command
      depends on.
  """

  intro: Callable[..., str]
  templates: Mapping[str, Callable[..., str]]
  feedback: Mapping[str, Callable[..., str]]
  parameters: Mapping[str, tuple[int, ...]]


_MAX_SENTENCE = 300

_TASK = re.compile(
    r'"task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*("(?:[^"\\]|\\.)*")\s*\}\s*\]')


def split_task(text: str) -> tuple[str, str]:
  """Returns the grammar without its task sentence, and that sentence.

  Only the sentence differs from game to game, so what is left is compiled once.

  Raises:
    ValueError: if there is no production `task` of one plain sentence.
  """
  found = _TASK.search(text)
  if not found:
    raise ValueError('grammar has no "task": [{"rhs": "<sentence>"}]')
  sentence = _json(found.group(1), 'task sentence')
  if len(sentence) > _MAX_SENTENCE:
    raise ValueError(
        f'grammar: expected a task of at most {_MAX_SENTENCE} characters, got '
        f'{len(sentence)}')
  if not sentence.strip() or re.search(r'[#{}\[\]]', sentence):
    raise ValueError(
        f'grammar: task must be a plain sentence, got {sentence!r}')
  start, end = found.span(1)
  return f'{text[:start]}""{text[end:]}', sentence


@functools.lru_cache(maxsize=16)
def compile_grammar(text: str) -> Grammar:
  """Compiles a grammar whose task sentence was split off.

  Raises:
    ValueError: if it is malformed, says nothing for an action, or refers to a
      symbol, a variable or a predicate that does not exist.
  """
  document = read(text)
  intro, _ = _compile(document, '#intro#', (), 'intro')
  compiled = Grammar(intro, {}, {}, {})
  for action in domain.RULES:
    if action not in document.templates or action not in document.feedback:
      raise ValueError(f'grammar: action {action!r} needs a template and a '
                       'feedback')
    scope = domain.parameters(action)
    compiled.feedback[action], _ = _compile(
        document, document.feedback[action], scope, f'feedback of {action}')
    compiled.templates[action], compiled.parameters[action] = _compile(
        document, document.templates[action], scope, f'template of {action}',
        fixed=True)
  return compiled


def _compile(
    document: Document, text: str, parameters: Sequence[tuple[str, str]],
    what: str, fixed: bool = False
) -> tuple[Callable[..., str], tuple[int, ...]]:
  """Compiles a text, errors of which call it `what`.

  Returns:
    A function of (game, state, arguments), and the places of the parameters
    that it depends on.
  """
  scope = {name: (place, kind)
           for place, (name, kind) in enumerate(parameters)}
  compiler = _Compiler(document.symbols, fixed)
  try:
    body = compiler.text(text, scope, 0)
  except ValueError as error:
    raise ValueError(f'grammar: {what}: {error}') from error
  spare = [0] * len(compiler.places)

  def compiled(game, state, arguments=()):
    return body(game, state, [*arguments, *spare])

  used = compiler.places.intersection(range(len(scope)))
  return compiled, tuple(sorted(used))


# ---------------------------------------------------------------- reading

_TOKEN = re.compile(
    r'(?:\s|#[^\n]*+)*+("""(?:.|\n)*?"""|"[^"]*"|::|[{};]|[\w/-]+|\Z)')


class _Tokens:
  """The tokens of a grammar document, taken one by one."""

  def __init__(self, text: str):
    self._text = text
    self._position = 0

  def take(self, *expected: str) -> str:
    """Returns the next token, which must be one of `expected` if given."""
    found = _TOKEN.match(self._text, self._position)
    token = found.group(1) if found else None
    if token is None or (expected and token not in expected):
      line = self._text.count('\n', 0, self._position) + 1
      wanted = ' or '.join(map(repr, expected)) or 'a name or a "text"'
      raise ValueError(
          f'grammar: expected {wanted} after line {line}, got '
          f'{self._text[self._position:][:40].strip()!r}')
    self._position = found.end()
    return token

  def string(self, quote: str) -> str:
    """Returns the next token's content; it must be quoted by `quote`."""
    token = self.take()
    if not token.startswith(quote) or len(token) < 2 * len(quote):
      raise ValueError(f'grammar: expected a text in {quote}, got {token!r}')
    return token[len(quote):-len(quote)]


def read(text: str) -> Document:
  """Reads a grammar document.

  Raises:
    ValueError: if it is not a sequence of `grammar :: ..;` and
      `action .. {..}`, or a block of it is no JSON of productions.
  """
  tokens = _Tokens(text)
  document = Document({}, {}, {})
  while token := tokens.take('grammar', 'action', ''):
    if token == 'grammar':
      _read_symbols(tokens, document)
    else:
      _read_action(tokens, document)
  return document


def _read_action(tokens: _Tokens, document: Document) -> None:
  name = tokens.take().lower()
  tokens.take('{')
  while (field := tokens.take('template', 'feedback', 'grammar', '}')) != '}':
    if field == 'grammar':
      _read_symbols(tokens, document)
      continue
    tokens.take('::')
    known = document.templates if field == 'template' else document.feedback
    known[name] = tokens.string('"')
    tokens.take(';')


def _read_symbols(tokens: _Tokens, document: Document) -> None:
  tokens.take('::')
  block = tokens.string('"""')
  tokens.take(';')
  lines = (line for line in block.split('\n')
           if not line.lstrip().startswith('#'))
  symbols = _json('\n'.join(lines), 'block')
  if not isinstance(symbols, dict):
    raise ValueError('grammar: a block must be a JSON object, got '
                     f'{type(symbols).__name__}')
  document.symbols.update(
      (name, _productions(name, rows)) for name, rows in symbols.items())


def _json(text: str, what: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'grammar: a {what} is no JSON: {error}') from error


def _productions(name: str, rows: Any) -> tuple[Production, ...]:
  if not isinstance(rows, list) or not rows or not all(
      isinstance(row, dict) and isinstance(row.get('rhs'), str)
      and isinstance(row.get('condition', ''), str) for row in rows):
    raise ValueError(
        f'grammar: symbol {name!r} must be a list of '
        '{"rhs": text} or {"condition": text, "rhs": text}')
  return tuple(
      Production(row['rhs'], row.get('condition', '')) for row in rows)


# -------------------------------------------------------------- compiling

# A list, a reference, an expression, or text; a closing bracket that closes
# nothing is text.
_PART = re.compile(
    r'\[\{(?P<list>[^{}\[\]]*)\}\]'
    r'|\{(?P<expression>[^{}\[\]]*)\}'
    r'|#(?P<symbol>[^#{}\[\]]*)#'
    r'|(?P<text>[^\[{#]+)')
_MAX_DEPTH = 20
_MAX_TEXTS = 1000  # What one text may refer to; real ones stay below 60.
_MAX_EXPRESSION = 200  # Letters.
_ATTRIBUTES = {'definite': 'the', 'indefinite': 'a'}


class _Name(NamedTuple):
  """Stands in a text for the name or the identifier of a variable's entity."""

  attribute: str
  place: int
  kind: str


class _Compiler:
  """Compiles a text with all that it refers to.

  Attributes:
    places: the places in the values that the text reads or writes.
  """

  def __init__(self, symbols: Mapping[str, Sequence[Production]], fixed: bool):
    """Takes the grammar's symbols; a fixed text must not ask what changes."""
    self._symbols = symbols
    self._fixed = fixed
    self._num_texts = 0
    self.places: set[int] = set()

  def text(self, text: str, scope: Scope, depth: int) -> Text:
    if depth > _MAX_DEPTH:
      raise ValueError(f'symbols refer to each other {_MAX_DEPTH} deep')
    self._num_texts += 1
    if self._num_texts > _MAX_TEXTS:
      raise ValueError(f'it expands to more than {_MAX_TEXTS} texts')
    parts: list[str | _Name | Text] = []
    text = text.lstrip()  # The original does not print leading blanks either.
    position = 0
    while position < len(text):
      found = _PART.match(text, position)
      if not found:
        raise ValueError(f'unclosed {text[position]!r} in {text!r}')
      parts.extend(self._part(found, scope, depth))
      position = found.end()
    return _sequence(parts)

  def _part(self, found: re.Match, scope: Scope,
            depth: int) -> Sequence[str | _Name | Text]:
    content = found.group(found.lastgroup)
    if found.lastgroup == 'text':
      return [content]
    if found.lastgroup == 'symbol':
      return [self._symbol(content, scope, depth + 1)]
    expression, bar, condition = content.partition('|')
    if found.lastgroup == 'list':
      return [self._list(expression.strip(), condition, scope, depth)]
    if bar:
      raise ValueError(f'{{{content}}} has a condition but is no list')
    parts = _expression(expression.strip(), scope)
    self.places.update(part.place for part in parts if isinstance(part, _Name))
    return parts

  def _symbol(self, name: str, scope: Scope, depth: int) -> Text:
    if name == 'task':
      return lambda game, state, values: game.task
    if name not in self._symbols:
      raise ValueError(f'there is no symbol #{name}#')
    choices = []
    for rhs, condition in self._symbols[name]:
      text = self.text(rhs, scope, depth)
      if not condition:
        return _choose(choices, text)
      steps, _ = self._query(condition, scope)
      choices.append((queries.exists(steps), text))
    raise ValueError(f'symbol #{name}# has no production without condition')

  def _list(self, expression: str, condition: str, scope: Scope,
            depth: int) -> Text:
    if not condition.strip():
      raise ValueError(f'the list of {expression!r} has no condition')
    steps, inner = self._query(condition, scope)
    matches = queries.matches(steps)
    item = self.text(
        expression if expression.startswith('#') else f'{{{expression}}}',
        inner, depth + 1)
    empty, separator, last = (
        self._symbol(f'list_{name}', scope, depth + 1)
        for name in ('empty', 'separator', 'last_separator'))

    def text(game, state, values):
      items = [item(game, state, values)
               for _ in matches(game, state, values)]
      if not items:
        return empty(game, state, values)
      if len(items) == 1:
        return items[0]
      return (separator(game, state, values).join(items[:-1])
              + last(game, state, values) + items[-1])

    return text

  def _query(
      self, condition: str, scope: Scope
  ) -> tuple[Sequence[queries.Step], Scope]:
    """Reads a query and notes what it asks; see queries.read."""
    steps, inner = queries.read(condition, scope)
    for step in steps:
      if self._fixed and step.predicate not in relations.STATIC:
        raise ValueError(
            f'{step.predicate} changes, which a command must not')
      self.places.update(step.places, *step.rivals)
    return steps, inner


def _choose(choices: Sequence[tuple[queries.Check, Text]],
            otherwise: Text) -> Text:
  """Returns the text of the first choice that holds, else `otherwise`."""
  if not choices:
    return otherwise

  def text(game, state, values):
    for holds, chosen in choices:
      if holds(game, state, values):
        return chosen(game, state, values)
    return otherwise(game, state, values)

  return text


def _sequence(parts: Sequence[str | _Name | Text]) -> Text:
  """Joins the parts of a text, literal neighbours beforehand."""
  joined: list[str | _Name | Text] = []
  for part in parts:
    if isinstance(part, str) and joined and isinstance(joined[-1], str):
      joined[-1] += part
    else:
      joined.append(part)
  texts = [_as_text(part) for part in joined]
  if not texts:
    return lambda game, state, values: ''
  if len(texts) == 1:
    return texts[0]
  if len(texts) == 2:
    first, second = texts
    return lambda game, state, values: (
        first(game, state, values) + second(game, state, values))
  return lambda game, state, values: ''.join(
      [text(game, state, values) for text in texts])


def _as_text(part: str | _Name | Text) -> Text:
  if isinstance(part, str):
    return lambda game, state, values: part
  if isinstance(part, _Name):
    attribute, place, kind = part
    if attribute == 'name':
      return lambda game, state, values: game.names[kind][values[place]]
    return lambda game, state, values: game.ids[kind][values[place]]
  return part


def _expression(text: str, scope: Scope) -> list[str | _Name]:
  """Compiles `o.indefinite + ' ' + o.name`, `r.name or r.id`, or `r`."""
  if len(text) > _MAX_EXPRESSION:
    raise ValueError(f'{{{text[:20]}..}} is longer than {_MAX_EXPRESSION}')
  try:
    tree = ast.parse(text, mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f'{{{text}}} is no expression') from error
  return _operand(tree, text, scope)


def _operand(node: ast.expr, text: str, scope: Scope) -> list[str | _Name]:
  match node:
    case ast.Constant(value=str(literal)):
      return [literal]
    case ast.BinOp(left=left, op=ast.Add(), right=right):
      return [*_operand(left, text, scope), *_operand(right, text, scope)]
    case ast.BoolOp(op=ast.Or(), values=[first, *_]):
      return _operand(first, text, scope)  # No name is empty.
    case ast.Name(id=variable):
      return _attribute(variable, 'name', scope)
    case ast.Attribute(value=ast.Name(id=variable), attr=attribute):
      return _attribute(variable, attribute, scope)
  raise ValueError(f'{{{text}}} may use only variable.attribute, texts, '
                   '`+` and `or`')


def _attribute(variable: str, attribute: str,
               scope: Scope) -> list[str | _Name]:
  if variable not in scope:
    raise ValueError(f'variable {variable!r} is not bound here; bound are '
                     f'{sorted(scope)}')
  if attribute in _ATTRIBUTES:
    return [_ATTRIBUTES[attribute]]
  if attribute not in ('name', 'id'):
    raise ValueError(f'unknown attribute {attribute!r}; there are name, id, '
                     'definite and indefinite')
  return [_Name(attribute, *scope[variable])]
