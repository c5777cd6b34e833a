"""Game files that are broken, or are of games that the engine does not play."""

import json
import random
import re

import pytest

from environments.alfworld import domain
from environments.alfworld import game as game_lib
from environments.alfworld import goals
from environments.alfworld import household_text
from environments.alfworld import queries
import kitchen


def _check_broken(text, match=''):
  with pytest.raises(ValueError, match=match) as error:
    game_lib.parse(text, 'cellar/game.tw-pddl')
  assert str(error.value).startswith('cellar/game.tw-pddl: ')


def _check_damage(text, rng, num_cuts):
  """A file cut anywhere, without a key, or without a parenthesis is refused."""
  game_lib.parse(text, 'whole')
  for _ in range(num_cuts):
    _check_broken(text[:rng.randrange(len(text.rstrip()))], 'not JSON')
  content = json.loads(text)
  for key in content:
    rest = {other: content[other] for other in content if other != key}
    _check_broken(json.dumps(rest), f'missing key {key!r}')
    _check_broken(json.dumps(content | {key: None}), f'{key!r} must be')
  for key in ('pddl_domain', 'pddl_problem'):
    # A parenthesis in a comment is none.
    bare = re.sub(';[^\n]*', '', content[key])
    places = [place for place, letter in enumerate(bare) if letter in '()']
    for place in rng.sample(places, num_cuts // 2):
      damaged = bare[:place] + bare[place + 1:]
      _check_broken(json.dumps(content | {key: damaged}), key)
    for _ in range(num_cuts // 2):
      cut = rng.randrange(bare.rindex(')'))
      _check_broken(json.dumps(content | {key: bare[:cut]}), key)


def test_one_real_game_of_every_kind_of_damage(alfworld_games):
  path = min(alfworld_games.glob('valid_seen/*/*/game.tw-pddl'))
  text = path.read_text(encoding='utf-8')
  _check_damage(text, random.Random(0), 60)


def test_damage_of_our_own_game():
  _check_damage(json.dumps(kitchen.content()), random.Random(1), 100)


def test_cut_grammars_are_refused():
  grammar = kitchen.content()['grammar']
  rng = random.Random(2)
  for _ in range(100):
    cut = grammar[:rng.randrange(grammar.rindex('}'))]
    _check_broken(json.dumps(kitchen.content(grammar=cut)), 'grammar')


@pytest.mark.parametrize('old, new, match', [
    ('(isHot ?o)\n', '', 'heatobject'),
    ('(cleanable ?o)\n      (or', '(or', 'cleanobject'),
    ('?ko - object', '?ko - receptacle', 'sliceobject'),
    ('(:action help', '(:action assist', "has the action 'assist'"),
    ('(:action ToggleObject', '(:action SliceObject',
     "lacks the action 'toggleobject'"),
    ('(openable ?r - receptacle)\n', '', "lacks the predicate 'openable'"),
    ('otype)\n', 'otype ghost)\n', 'ghost'),
    ('(:types', '(:constants', ':constants'),
])
def test_other_rules_are_refused(old, new, match):
  changed = household_text.DOMAIN.replace(old, new, 1)
  assert changed != household_text.DOMAIN
  _check_broken(json.dumps(kitchen.content(pddl_domain=changed)), match)


def test_rules_may_be_laid_out_otherwise():
  plain = re.sub(';[^\n]*', '', household_text.DOMAIN)
  domain.check(re.sub(r'\s+', ' ', plain).upper())
  domain.check(plain.replace(
      '(openable ?r)\n      (atLocation ?a ?l)',
      '(and (atLocation ?a ?l) (and (openable ?r)))'))


@pytest.mark.parametrize('old, new, match', [
    ('(atLocation agent1 loc_bar_0)', '', 'where the agent is'),
    ('(openable Cabinet_bar_1)', '(haunted Cabinet_bar_1)', 'haunted'),
    ('(openable Cabinet_bar_1)', '(openable Mug_bar_1)', 'mug_bar_1'),
    ('(openable Cabinet_bar_1)', '(openable Ghost_bar_1)', 'ghost_bar_1'),
    ('(openable Cabinet_bar_1)', '(openable Cabinet_bar_1 Mug_bar_1)',
     'takes 1'),
    ('(openable Cabinet_bar_1)', '(holds agent1 Mug_bar_1)', 'holdsAny'),
    ('(openable Cabinet_bar_1)', '(openable (Cabinet_bar_1))', 'predicate'),
    ('(openable Cabinet_bar_1)', 'openable', 'openable'),
    ('(openable Cabinet_bar_1)', '(atLocation agent1 loc_bar_1)', 'several'),
    ('(openable Cabinet_bar_1)',
     '(receptacleAtLocation Cabinet_bar_1 loc_bar_2)', 'two locations'),
])
def test_impossible_facts_are_refused(old, new, match):
  facts = kitchen.FACTS.replace(old, new, 1)
  _check_broken(json.dumps(kitchen.content(facts=facts)), match)


@pytest.mark.parametrize('goal', [
    '(holds agent1 Mug_bar_1)',
    '(and)',
    '()',
    'mug',
    '(exists (?o - object) (isSliced ?o))',
    '(not (exists (?o - object) (isHot ?o)))',
    kitchen.GOALS[goals.PICK_AND_PLACE].replace('MugType', 'GhostType'),
    kitchen.GOALS[goals.PICK_TWO].replace('(not (= ?b ?a))', '(isHot ?b)'),
    kitchen.GOALS[goals.HEAT].replace('(heatable ?o)', '(opened ?r)'),
])
def test_other_goals_are_refused(goal):
  _check_broken(json.dumps(kitchen.content(goal=goal)), 'goal')


@pytest.mark.parametrize('old, new, match', [
    ('"task"', '"chore"', 'task'),
    ('Your task is to: tidy up.', 'See {o.name}.', 'plain sentence'),
    ('Your task is to: tidy up.', '', 'task'),
    ('#examineReceptacle.feedback#', '#examine.feedback#',
     '#examine.feedback#'),
    ('You shut the {r.name}.', 'You shut the {x.name}.', "'x'"),
    ('You shut the {r.name}.', 'You shut the {r.name.}.', 'expression'),
    ('You shut the {r.name}.', 'You shut the {r.__class__}.', '__class__'),
    ('You shut the {r.name}.', 'You shut the {print(r)}.', 'only'),
    ('You shut the {r.name}.', 'You shut the {r.name', 'unclosed'),
    ('You shut the {r.name}.', '#CloseObject.feedback#', 'deep'),
    ('ishot(o:object)', 'ison(o:object)', 'ison'),
    ('ishot(o:object)', 'ishot(o:receptacle)', 'ishot'),
    ('ishot(o:object)', 'ishot', 'predicate'),
    ('"close {r}"', '"close [{r.name | opened(r:receptacle)}]"', 'changes'),
    ('action help', 'action assist', "'help'"),
    ('list_empty', 'list_none', 'list_empty'),
])
def test_other_grammars_are_refused(old, new, match):
  grammar = kitchen.content()['grammar'].replace(old, new)
  assert grammar != kitchen.content()['grammar']
  _check_broken(json.dumps(kitchen.content(grammar=grammar)), match)


def test_missing_files_are_named(tmp_path):
  with pytest.raises(ValueError, match='no_such_file'):
    game_lib.load(tmp_path / 'no_such_file')
  binary = tmp_path / 'binary.tw-pddl'
  binary.write_bytes(b'\xff\xfe\x00')
  with pytest.raises(ValueError, match='binary.tw-pddl'):
    game_lib.load(binary)


def test_grammars_that_would_take_for_ever_are_refused():
  grammar = kitchen.content()['grammar']
  doubling = ', '.join(
      f'"s{depth}": [{{"rhs": "#s{depth + 1}##s{depth + 1}#"}}]'
      for depth in range(15)) + ', "s15": [{"rhs": "!"}]'
  block = f'grammar :: """{{{doubling}}}""";\n'
  bomb = block + grammar.replace('You shut the {r.name}.', '#s0#')
  _check_broken(json.dumps(kitchen.content(grammar=bomb)), 'more than')
  long = grammar.replace('{r.name}', '{' + 'r + ' * 5000 + 'r}')
  _check_broken(json.dumps(kitchen.content(grammar=long)), 'longer than')
  _check_broken(json.dumps(
      kitchen.content(grammar=grammar + '#' * 5000 + '\n!')), 'expected')
  deep = '(' * 20000 + ')' * 20000
  _check_broken(json.dumps(kitchen.content(goal=deep)), 'deep')
  _check_broken('[' * 100_000, 'not JSON')


@pytest.mark.parametrize('condition, fault', [
    (' & '.join(f'objecttype(o{i}:object, t{i}:otype)' for i in range(8)),
     'at most 5 variables'),
    (' & '.join(['atlocation(a:agent, l:location)'] * 50),
     'at most 12 predicates')])
def test_conditions_that_would_take_for_ever_are_refused(condition, fault):
  with pytest.raises(ValueError, match=fault):
    queries.read(condition, {})
