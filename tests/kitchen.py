"""A small household game of the tests' own, in the form of ALFWorld's files."""

import json
import re

from environments.alfworld import game as game_lib
from environments.alfworld import goals
from environments.alfworld import household_text

# A kitchen of our own: two cabinets at one place, a sink, a microwave, a
# fridge, a table; a knife and a lamp; a mug that holds a spoon.
FACTS = """
  (atLocation agent1 loc_bar_0)
  (receptacleAtLocation Cabinet_bar_1 loc_bar_1)
  (receptacleAtLocation Cabinet_bar_2 loc_bar_1)
  (receptacleAtLocation DiningTable_bar_1 loc_bar_2)
  (receptacleAtLocation Microwave_bar_1 loc_bar_3)
  (receptacleAtLocation Fridge_bar_1 loc_bar_4)
  (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_5)
  (receptacleType Cabinet_bar_1 CabinetType)
  (receptacleType Cabinet_bar_2 CabinetType)
  (receptacleType DiningTable_bar_1 DiningTableType)
  (receptacleType Microwave_bar_1 MicrowaveType)
  (receptacleType Fridge_bar_1 FridgeType)
  (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
  (openable Cabinet_bar_1) (openable Microwave_bar_1) (openable Fridge_bar_1)
  (canContain CabinetType MugType) (canContain DiningTableType MugType)
  (canContain DiningTableType TomatoType)
  (canContain MicrowaveType TomatoType) (canContain FridgeType TomatoType)
  (objectType Mug_bar_1 MugType) (objectType Mug_bar_2 MugType)
  (objectType Spoon_bar_1 SpoonType) (objectType Tomato_bar_1 TomatoType)
  (objectType Knife_bar_1 KnifeType) (objectType DeskLamp_bar_1 DeskLampType)
  (pickupable Mug_bar_1) (pickupable Mug_bar_2) (pickupable Tomato_bar_1)
  (pickupable Knife_bar_1) (isReceptacleObject Mug_bar_2)
  (cleanable Mug_bar_1) (cleanable Tomato_bar_1) (heatable Tomato_bar_1)
  (coolable Tomato_bar_1) (sliceable Tomato_bar_1) (toggleable DeskLamp_bar_1)
  (inReceptacle Mug_bar_1 Cabinet_bar_1) (inReceptacle Mug_bar_2 Cabinet_bar_2)
  (inReceptacleObject Spoon_bar_1 Mug_bar_2)
  (inReceptacle Tomato_bar_1 DiningTable_bar_1)
  (inReceptacle Knife_bar_1 DiningTable_bar_1)
  (inReceptacle DeskLamp_bar_1 DiningTable_bar_1)
  (objectAtLocation Mug_bar_1 loc_bar_1) (objectAtLocation Mug_bar_2 loc_bar_1)
  (objectAtLocation Tomato_bar_1 loc_bar_2)
  (objectAtLocation Knife_bar_1 loc_bar_2)
  (objectAtLocation DeskLamp_bar_1 loc_bar_2)
"""

GOALS = {
    goals.PICK_AND_PLACE: (
        '(exists (?r - receptacle) (exists (?o - object) (and'
        ' (inReceptacle ?o ?r) (objectType ?o MugType)'
        ' (receptacleType ?r DiningTableType))))'),
    goals.CLEAN: (
        '(and (exists (?thing - object ?r - receptacle) (and'
        ' (objectType ?thing TomatoType) (cleanable ?thing) (isClean ?thing)'
        ' (inReceptacle ?thing ?r) (receptacleType ?r FridgeType))))'),
    goals.HEAT: (
        '(exists (?o - object ?r - receptacle) (and (heatable ?o) (isHot ?o)'
        ' (objectType ?o TomatoType) (receptacleType ?r FridgeType)'
        ' (inReceptacle ?o ?r)))'),
    goals.COOL: (
        '(exists (?o - object ?r - receptacle) (and (coolable ?o) (isCool ?o)'
        ' (objectType ?o TomatoType) (receptacleType ?r MicrowaveType)'
        ' (inReceptacle ?o ?r)))'),
    goals.PICK_TWO: (
        '(exists (?r - receptacle ?a - object) (and (objectType ?a MugType)'
        ' (inReceptacle ?a ?r) (exists (?b - object) (and'
        ' (receptacleType ?r DiningTableType) (objectType ?b MugType)'
        ' (inReceptacle ?b ?r) (not (= ?b ?a))))))'),
    goals.LOOK_IN_LIGHT: (
        '(and (exists (?o - object ?a - agent) (and (objectType ?o KnifeType)'
        ' (holds ?a ?o))) (exists (?l - location ?t - object ?r - receptacle'
        ' ?a - agent) (and (objectType ?t DeskLampType) (toggleable ?t)'
        ' (isToggled ?t) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)'
        ' (inReceptacle ?t ?r))))'),
}

PLANS = {
    goals.PICK_AND_PLACE: (
        'go to cabinet 1', 'take mug 1 from cabinet 1', 'go to diningtable 1',
        'move mug 1 to diningtable 1'),
    goals.CLEAN: (
        'go to diningtable 1', 'take tomato 1 from diningtable 1',
        'go to sinkbasin 1', 'clean tomato 1 with sinkbasin 1',
        'go to fridge 1', 'open fridge 1', 'move tomato 1 to fridge 1'),
    goals.HEAT: (
        'go to diningtable 1', 'take tomato 1 from diningtable 1',
        'go to microwave 1', 'heat tomato 1 with microwave 1',
        'go to fridge 1', 'open fridge 1', 'move tomato 1 to fridge 1'),
    goals.COOL: (
        'go to diningtable 1', 'take tomato 1 from diningtable 1',
        'go to fridge 1', 'cool tomato 1 with fridge 1', 'go to microwave 1',
        'open microwave 1', 'move tomato 1 to microwave 1'),
    goals.PICK_TWO: (
        'go to cabinet 1', 'take mug 1 from cabinet 1', 'go to diningtable 1',
        'move mug 1 to diningtable 1', 'go to cabinet 2', 'open cabinet 2',
        'take mug 2 from cabinet 2', 'go to diningtable 1',
        'move mug 2 to diningtable 1'),
    goals.LOOK_IN_LIGHT: (
        'go to diningtable 1', 'use desklamp 1',
        'take knife 1 from diningtable 1'),
}

_TYPES = {'agent': 'agent', 'loc': 'location', 'cabinet': 'receptacle',
          'diningtable': 'receptacle', 'microwave': 'receptacle',
          'fridge': 'receptacle', 'sink': 'receptacle'}


def _objects(facts):
  """Declares whatever the facts speak of."""
  lines = []
  for word in sorted(set(re.findall(r'\w+', facts))):
    if word.endswith('Type') and f' {word})' in facts.replace(' - ', ''):
      if re.search(rf'objectType \w+ {word}\)', facts):
        lines.append(f'{word} - otype')
      elif re.search(rf'receptacleType \w+ {word}\)', facts):
        lines.append(f'{word} - rtype')
    elif '_bar_' in word or word == 'agent1':
      kind = word.partition('_bar_')[0].lower().rstrip('1')
      lines.append(f'{word} - {_TYPES.get(kind, "object")}')
  return ' '.join(lines)


def content(
    task_type=goals.PICK_AND_PLACE, facts=FACTS, goal=None, **changes):
  """The content of a game file of our own, with some keys changed."""
  problem = (f'(define (problem kitchen) (:domain alfred) (:objects '
             f'{_objects(FACTS)}) (:init {facts}) '
             f'(:goal {goal or GOALS[task_type]}))')
  return {
      'pddl_domain': household_text.DOMAIN,
      'grammar': household_text.grammar('Your task is to: tidy up.'),
      'pddl_problem': problem, 'solvable': True,
      'walkthrough': list(PLANS[task_type]), **changes}


def make_game(*args, **kwargs):
  return game_lib.parse(json.dumps(content(*args, **kwargs)), 'kitchen')
