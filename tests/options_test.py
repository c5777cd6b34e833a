"""options: what a signature and a docstring say of a function's scalars."""

import functools
from typing import Literal

import chex
import pytest

from bpo_jax import options


def _function(tree, threshold: chex.Numeric, *, count: int = 3,
              share: float | chex.Array = 0.5, kind: Literal['a', 'b'] = 'a',
              most: int | None = None, values: chex.Array | None = None,
              key: chex.PRNGKey | None = None, plain=1):
  """Does nothing.

  Args:
    tree: not an option.
    threshold: given, not chosen.
    count: how many, at
      least one.
    share: of the whole.
    kind: a or b.
    most: at most.
    values: an array.
    key: a key.
    plain: without annotation.

  Returns:
    count: no argument.
  """
  del tree, threshold, count, share, kind, most, values, key, plain


def test_options_are_the_annotated_scalars():
  found = options.of(_function)
  assert {name: (o.annotation, o.default) for name, o in found.items()} == {
      'count': (int, 3), 'share': (float, 0.5),
      'kind': (Literal['a', 'b'], 'a'), 'most': (int | None, None)}
  assert found['count'].help == 'how many, at least one.'
  assert found['most'].help == 'at most.'


def test_a_partial_has_other_defaults():
  partial = functools.partial(functools.partial(_function, count=7), kind='b')
  found = options.of(partial)
  assert (found['count'].default, found['kind'].default) == (7, 'b')
  assert options.unwrap(partial) is _function


def test_keywords_are_all_but_the_first():
  assert options.keywords(_function)[:2] == ('threshold', 'count')


def test_no_docstring_is_no_error():
  def bare(tree, *, count: int = 1):
    del tree, count
  assert options.of(bare)['count'].help == ''


@pytest.mark.parametrize('annotation', [chex.Array, chex.Numeric, str, None])
def test_what_is_no_one_scalar_is_no_option(annotation):
  def function(tree, *, x=0):
    del tree, x
  function.__annotations__['x'] = annotation
  assert ('x' in options.of(function)) == (annotation is str)
