"""Tests of the layout: which way imports point, and one home per tool."""

import ast
from collections.abc import Collection, Iterator
import pathlib

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_MAX_LINES = 600
_FOLDERS = ('bpo_jax', 'environments', 'experiments')
_MODULES = sorted(
    path.relative_to(_REPOSITORY).as_posix()
    for folder in _FOLDERS for path in (_REPOSITORY / folder).rglob('*.py')
)
_LIBRARY = [m for m in _MODULES if not m.startswith('experiments/')]
_TESTS = sorted(
    path.relative_to(_REPOSITORY).as_posix()
    for path in (_REPOSITORY / 'tests').glob('*.py')
)

# The core, lowest first: a module may reach those before it and nothing else of
# bpo_jax, by whatever way round. The rest of bpo_jax stands on the core.
_CORE = (
    'types', 'checks', 'options', 'masked', 'walks', 'tree_checks', 'tree',
    'siblings', 'returns', 'advantages', 'branching', 'objectives',
)
# A tool -> the only places that may touch it, as prefixes.
_HOMES = {
    'absl.flags': ('experiments/',),
    'absl.app': ('experiments/',),
    'orbax': ('bpo_jax/checkpoint.py',),
    'jax.experimental.io_callback': ('environments/callbacks.py',),
    'jax.pure_callback': (),
    # A chat template is code of unknown origin, too: it runs in a child. So
    # does each side of a benchmark whose memory is measured.
    'subprocess': (
        'environments/sandbox/', 'bpo_jax/chat/', 'experiments/benchmarks/'),
    'multiprocessing': ('environments/sandbox/',),
    'os.fork': ('environments/sandbox/',),
    'os.forkpty': ('environments/sandbox/',),
    'os.system': (),
    'os.popen': (),
    'pickle': (),
    'dill': (),
    'cloudpickle': (),
    'marshal': (),
    'shelve': (),
}
_FORBIDDEN_CALLS = ('eval', 'exec', 'compile', '__import__')


def _read(module: str) -> ast.Module:
  return ast.parse((_REPOSITORY / module).read_text(encoding='utf-8'))


def _package(module: str) -> list[str]:
  return module.split('/')[:-1]


def _imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
  """Yields the dotted name of everything imported, anywhere in the module."""
  yield from (whole for _, whole in _bindings(tree, package))


def _bindings(
    tree: ast.Module, package: list[str]) -> Iterator[tuple[str, str]]:
  """Yields (how the module writes it, dotted name) of everything imported."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((a.asname or a.name, a.name) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = package[:len(package) - node.level + 1] if node.level else []
      base = base + ([node.module] if node.module else [])
      yield from ((a.asname or a.name, '.'.join([*base, a.name]))
                  for a in node.names)


def _dotted(node: ast.expr) -> str:
  """Returns `a.b.c` of an attribute chain, or '' if it is something else."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    base = _dotted(node.value)
    return f'{base}.{node.attr}' if base else ''
  return ''


def _uses(tree: ast.Module, package: list[str]) -> set[str]:
  """Returns everything imported, and every attribute by its full name.

  A name that several imports bind stands for each of them.
  """
  nodes = ast.walk(tree)
  written = {_dotted(n) for n in nodes if isinstance(n, ast.Attribute)} - {''}
  bound = set(_bindings(tree, package))
  resolved = {
      whole + attribute.removeprefix(name)
      for attribute in written for name, whole in bound
      if _is_within(attribute, name)
  }
  return {whole for _, whole in bound} | written | resolved


def _is_within(name: str, whole: str) -> bool:
  return f'{name}.'.startswith(f'{whole}.')


def _import_faults(module: str, tree: ast.Module) -> list[str]:
  """Returns the imports that leave the package in the wrong direction."""
  top = module.split('/')[0]
  faults = []
  for name in _imports(tree, _package(module)):
    to = name.split('.')[0]
    if top == 'bpo_jax' and to in ('environments', 'experiments'):
      faults.append(name)
    if top == 'environments' and to == 'experiments':
      faults.append(name)
    if top == 'environments' and to == 'bpo_jax':
      if not _is_within(name, 'bpo_jax.types'):
        faults.append(name)
  return faults


def _graph(sources: dict[str, ast.Module]) -> dict[str, set[str]]:
  """Returns module -> modules of `sources` that it imports, both dotted."""
  paths = {_module_name(path): path for path in sources}
  return {
      name: {
          found for imported in _imports(sources[path], _package(path))
          if (found := _longest_prefix(imported, paths))
      }
      for name, path in paths.items()
  }


def _module_name(path: str) -> str:
  return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def _longest_prefix(name: str, modules: Collection[str]) -> str:
  """Returns the module that an imported name is in, or '' for none."""
  while name and name not in modules:
    name = name.rpartition('.')[0]
  return name


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
  """Returns what `start` imports, directly or not; itself if in a circle."""
  found, waiting = set(), [start]
  while waiting:
    new = graph[waiting.pop()] - found
    found |= new
    waiting.extend(new)
  return found


def _order_faults(graph: dict[str, set[str]]) -> list[str]:
  """Returns circles, and what the core reaches above itself."""
  faults = [f'{m} imports itself' for m in graph if m in _reachable(graph, m)]
  for place, name in enumerate(_CORE):
    module = f'bpo_jax.{name}'
    below = [f'bpo_jax.{lower}' for lower in _CORE[:place + 1]]
    above = _reachable(graph, module) if module in graph else ()
    above = [m for m in above if not any(_is_within(m, b) for b in below)]
    faults += [f'{module} reaches {other}' for other in sorted(above)]
  return faults


def _home_faults(module: str, tree: ast.Module) -> list[str]:
  """Returns the tools that the module uses without being their home."""
  uses = _uses(tree, _package(module))
  return sorted(
      use for use in uses for tool, homes in _HOMES.items()
      if _is_within(use, tool) and not module.startswith(homes or ('\0',))
  )


def _call_faults(tree: ast.Module) -> list[str]:
  return [
      f'{node.func.id} in line {node.lineno}' for node in ast.walk(tree)
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
      and node.func.id in _FORBIDDEN_CALLS
  ]


@pytest.mark.parametrize('module', _MODULES)
def test_imports_point_one_way(module):
  assert not _import_faults(module, _read(module))


def test_bpo_jax_is_in_layers():
  sources = {m: _read(m) for m in _LIBRARY if m.startswith('bpo_jax/')}
  assert not _order_faults(_graph(sources))


@pytest.mark.parametrize('module', _MODULES)
def test_every_tool_has_one_home(module):
  assert not _home_faults(module, _read(module))


@pytest.mark.parametrize('module', _MODULES)
def test_no_text_becomes_code(module):
  assert not _call_faults(_read(module))


@pytest.mark.parametrize('module', _LIBRARY)
def test_no_bare_assert(module):
  asserts = [n for n in ast.walk(_read(module)) if isinstance(n, ast.Assert)]
  assert not asserts, f'line {asserts[0].lineno}: raise ValueError instead'


@pytest.mark.parametrize('module', _MODULES)
def test_every_module_says_what_it_is(module):
  tree = _read(module)
  assert ast.get_docstring(tree) or not tree.body


@pytest.mark.parametrize('module', _MODULES + _TESTS)
def test_files_stay_short(module):
  lines = (_REPOSITORY / module).read_text(encoding='utf-8').splitlines()
  assert len(lines) < _MAX_LINES


@pytest.mark.parametrize('module', _TESTS)
def test_tests_are_named_so_that_they_run(module):
  has_tests = any(
      isinstance(node, ast.FunctionDef) and node.name.startswith('test_')
      for node in ast.walk(_read(module)))
  assert not has_tests or module.endswith('_test.py')


def test_tests_are_flat():
  nested = [
      path for path in (_REPOSITORY / 'tests').rglob('*.py')
      if path.parent.name != 'tests']
  assert not nested


# Every rule above must be able to fail.
@pytest.mark.parametrize('module, code', [
    ('bpo_jax/rollout.py', 'from environments import base'),
    ('bpo_jax/rollout.py', 'def f():\n  import experiments.train'),
    ('environments/base.py', 'from bpo_jax import learner'),
    ('environments/base.py', 'import bpo_jax'),
    ('environments/base.py', 'from experiments import train'),
    ('environments/alfworld/game.py', 'from ...bpo_jax import tree'),
])
def test_a_wrong_import_is_found(module, code):
  assert _import_faults(module, ast.parse(code))


@pytest.mark.parametrize('module, code', [
    ('bpo_jax/rollout.py', 'from bpo_jax import tree'),
    ('environments/base.py', 'from bpo_jax import types'),
    ('environments/base.py', 'import types'),
    ('environments/sandbox/pool.py', 'from environments import base'),
    ('experiments/train.py', 'from environments import base'),
])
def test_a_right_import_is_not(module, code):
  assert not _import_faults(module, ast.parse(code))


@pytest.mark.parametrize('imports, fault', [
    ({'tree': 'from bpo_jax import siblings', 'siblings': ''},
     'bpo_jax.tree reaches bpo_jax.siblings'),
    ({'masked': 'from . import helper', 'helper': 'import bpo_jax.tree',
      'tree': ''}, 'bpo_jax.masked reaches bpo_jax.tree'),
    ({'tree': 'from bpo_jax import Tree', '__init__': ''},
     'bpo_jax.tree reaches bpo_jax'),
    ({'learner': 'from bpo_jax import rollout',
      'rollout': 'def f():\n  from bpo_jax.learner import init'},
     'bpo_jax.learner imports itself'),
])
def test_a_wrong_order_is_found(imports, fault):
  sources = {f'bpo_jax/{m}.py': ast.parse(c) for m, c in imports.items()}
  assert fault in _order_faults(_graph(sources))


def test_a_right_order_is_not():
  sources = {
      'bpo_jax/types.py': ast.parse('import types'),
      'bpo_jax/tree.py': ast.parse('from bpo_jax import types'),
      'bpo_jax/learner.py': ast.parse('from bpo_jax.tree import Tree'),
  }
  assert not _order_faults(_graph(sources))


@pytest.mark.parametrize('module, code', [
    ('bpo_jax/learner.py', 'from absl import flags'),
    ('bpo_jax/learner.py', 'import absl.flags as f'),
    ('bpo_jax/learner.py', 'from orbax.checkpoint import v1'),
    ('environments/store.py', 'from jax.experimental import io_callback'),
    ('bpo_jax/rollout.py', 'import jax\njax.experimental.io_callback(f)'),
    ('environments/store.py',
     'from jax import experimental\nexperimental.io_callback(f)'),
    ('environments/store.py',
     'from jax import experimental as e\ndef g():\n  e.io_callback(f)'),
    ('environments/store.py', 'import jax.experimental as e\ne.io_callback(f)'),
    ('bpo_jax/rollout.py', 'import jax as j\nj.experimental.io_callback(f)'),
    ('bpo_jax/rollout.py',
     'from os import path as o\nimport os as o\no.fork()'),
    ('environments/store.py', 'import subprocess'),
    ('experiments/train.py', 'from multiprocessing import pool'),
    ('environments/store.py', 'import os\nos.fork()'),
    ('environments/store.py', 'from os import fork'),
    ('environments/sandbox/pool.py', 'import os\nos.system("ls")'),
    ('bpo_jax/tree.py', 'import pickle'),
])
def test_a_tool_away_from_home_is_found(module, code):
  assert _home_faults(module, ast.parse(code))


@pytest.mark.parametrize('module, code', [
    ('experiments/train.py', 'from absl import flags'),
    ('bpo_jax/learner.py', 'from absl import logging'),
    ('bpo_jax/checkpoint.py', 'from orbax.checkpoint import v1'),
    ('environments/callbacks.py', 'from jax.experimental import io_callback'),
    ('environments/callbacks.py',
     'from jax import experimental\nexperimental.io_callback(f)'),
    ('environments/store.py', 'from here import experimental\n'
     'experimental.io_callback(f)'),
    ('environments/sandbox/pool.py', 'import subprocess, os\nos.fork()'),
])
def test_a_tool_at_home_is_not(module, code):
  assert not _home_faults(module, ast.parse(code))


def test_code_from_text_is_found():
  assert _call_faults(ast.parse('def f(x):\n  return eval(x)'))
  assert not _call_faults(ast.parse('import re\nre.compile("x")'))


def test_there_is_something_to_check():
  assert 'bpo_jax/checkpoint.py' in _LIBRARY
  assert 'tests/architecture_test.py' in _TESTS
