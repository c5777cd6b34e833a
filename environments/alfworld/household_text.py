"""The rules and the sentences of the generated household games.

`DOMAIN` states in PDDL what every action needs and does; `grammar` gives the
sentences in which the agent is told about it. Both are in the form in which
ALFWorld's game files carry theirs, so one engine plays both; the wording is
this project's own.
"""

import json

DOMAIN = """\
; A household: one agent, furniture that holds things, and things to carry.
; The rules are those of the alfred domain, so that its engine plays it.
(define (domain alfred)
  (:requirements :adl :action-costs :typing)
  (:types agent location receptacle object rtype otype)
  (:predicates
    ; where everybody and everything is
    (atLocation ?a - agent ?l - location)
    (receptacleAtLocation ?r - receptacle ?l - location)
    (objectAtLocation ?o - object ?l - location)
    (inReceptacle ?o - object ?r - receptacle)
    (wasInReceptacle ?o - object ?r - receptacle)
    (isReceptacleObject ?o - object)
    (inReceptacleObject ?innerObject - object ?outerObject - object)
    (isReceptacleObjectFull ?o - object)
    ; what the hands hold
    (holds ?a - agent ?o - object)
    (holdsAny ?a - agent)
    (holdsAnyReceptacleObject ?a - agent)
    ; furniture
    (openable ?r - receptacle)
    (opened ?r - receptacle)
    (full ?r - receptacle)
    (checked ?r - receptacle)
    (examined ?l - location)
    (receptacleType ?r - receptacle ?t - rtype)
    (canContain ?rt - rtype ?ot - otype)
    ; things, what can be done to them and what was done
    (objectType ?o - object ?t - otype)
    (pickupable ?o - object)
    (moveable ?o - object)
    (cleanable ?o - object)
    (isClean ?o - object)
    (heatable ?o - object)
    (isHot ?o - object)
    (coolable ?o - object)
    (isCool ?o - object)
    (toggleable ?o - object)
    (isOn ?o - object)
    (isToggled ?o - object)
    (sliceable ?o - object)
    (isSliced ?o - object))
  (:functions (distance ?from ?to) (total-cost) - number)

  (:action look
    :parameters (?a - agent ?l - location)
    :precondition (and (atLocation ?a ?l))
    :effect (and (checked ?l)))

  (:action inventory
    :parameters (?a - agent)
    :precondition ()
    :effect (and (checked ?a)))

  (:action help
    :parameters (?a - agent)
    :precondition ()
    :effect (and (checked ?a)))

  (:action examineReceptacle
    :parameters (?a - agent ?r - receptacle)
    :precondition (and
      (exists (?l - location)
        (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l))))
    :effect (and (checked ?r)))

  ; Of things, only the one in hand can be examined.
  (:action examineObject
    :parameters (?a - agent ?o - object)
    :precondition (and (holds ?a ?o))
    :effect (and (checked ?o)))

  ; Walking costs the same between any two places.
  (:action GotoLocation
    :parameters (?a - agent ?lStart - location ?lEnd - location
                 ?r - receptacle)
    :precondition (and
      (atLocation ?a ?lStart)
      (receptacleAtLocation ?r ?lEnd))
    :effect (and
      (not (atLocation ?a ?lStart))
      (atLocation ?a ?lEnd)
      (increase (total-cost) 1)))

  (:action OpenObject
    :parameters (?a - agent ?l - location ?r - receptacle)
    :precondition (and
      (openable ?r)
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (not (opened ?r)))
    :effect (and
      (opened ?r)
      (checked ?r)
      (increase (total-cost) 1)))

  (:action CloseObject
    :parameters (?a - agent ?l - location ?r - receptacle)
    :precondition (and
      (openable ?r)
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (opened ?r))
    :effect (and
      (not (opened ?r))
      (increase (total-cost) 1)))

  ; The hands hold one thing at a time.
  (:action PickupObject
    :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
    :precondition (and
      (pickupable ?o)
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (inReceptacle ?o ?r)
      (not (holdsAny ?a))
      (or (not (openable ?r)) (opened ?r)))
    :effect (and
      (not (inReceptacle ?o ?r))
      (holds ?a ?o)
      (holdsAny ?a)
      (not (objectAtLocation ?o ?l))
      (increase (total-cost) 1)))

  (:action PutObject
    :parameters (?a - agent ?l - location ?o - object ?r - receptacle
                 ?ot - otype ?rt - rtype)
    :precondition (and
      (holds ?a ?o)
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (or (not (openable ?r)) (opened ?r))
      (objectType ?o ?ot)
      (receptacleType ?r ?rt)
      (canContain ?rt ?ot))
    :effect (and
      (inReceptacle ?o ?r)
      (objectAtLocation ?o ?l)
      (not (holds ?a ?o))
      (not (holdsAny ?a))
      (increase (total-cost) 1)))

  ; Three treatments of what is in hand; no door need be open.
  (:action CleanObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
    :precondition (and
      (cleanable ?o)
      (or (receptacleType ?r SinkType) (receptacleType ?r SinkBasinType))
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (holds ?a ?o))
    :effect (and
      (increase (total-cost) 5)
      (isClean ?o)))

  (:action HeatObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
    :precondition (and
      (heatable ?o)
      (or (receptacleType ?r MicrowaveType))
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (holds ?a ?o))
    :effect (and
      (increase (total-cost) 5)
      (isHot ?o)
      (not (isCool ?o))))

  (:action CoolObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
    :precondition (and
      (coolable ?o)
      (or (receptacleType ?r FridgeType))
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (holds ?a ?o))
    :effect (and
      (increase (total-cost) 5)
      (isCool ?o)
      (not (isHot ?o))))

  ; A lamp that was switched counts as toggled ever after.
  (:action ToggleObject
    :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
    :precondition (and
      (toggleable ?o)
      (atLocation ?a ?l)
      (receptacleAtLocation ?r ?l)
      (inReceptacle ?o ?r))
    :effect (and
      (increase (total-cost) 5)
      (when (isOn ?o) (not (isOn ?o)))
      (when (not (isOn ?o)) (isOn ?o))
      (isToggled ?o)))

  (:action SliceObject
    :parameters (?a - agent ?l - location ?co - object ?ko - object)
    :precondition (and
      (sliceable ?co)
      (or (objectType ?ko KnifeType) (objectType ?ko ButterKnifeType))
      (atLocation ?a ?l)
      (objectAtLocation ?co ?l)
      (holds ?a ?ko))
    :effect (and
      (increase (total-cost) 5)
      (isSliced ?co))))
"""

# What can be said, by symbol: the first row whose condition holds is said. An
# empty condition always holds. `<task>` is replaced by `grammar`.
_Rows = tuple[tuple[str, str], ...]

_THINGS = ("[{o.indefinite + ' ' + o.name | "
           'inreceptacle(o:object, r:receptacle)}]')
_INNER = ("[{o2.indefinite + ' ' + o2.name | "
          'inreceptacleobject(o2:object, o:object)}]')

_SHARED: dict[str, _Rows] = {
    'intro': (
        ('', '~ A day in the household ~\n\n#look.feedback#\n\n#task#'),),
    'task': (('', '<task>'),),
    'GotoLocation.feedback': (
        ('', 'You walk to the {r.name}. #examineReceptacle.feedback#'),),
    'OpenObject.feedback': (
        ('', 'You pull it open. #examineReceptacle.feedback#'),),
    'CloseObject.feedback': (('', 'You shut the {r.name}.'),),
    'PickupObject.feedback': (
        ('', 'You now hold the {o.name}, taken from the {r.name}.'),),
    'PutObject.feedback': (('', 'You leave the {o.name} at the {r.name}.'),),
    'inventory.feedback': (
        ('holdsany(a:agent)',
         "Your hands hold [{o.indefinite + ' ' + o.name | "
         'holds(a:agent, o:object)}].'),
        ('', 'Your hands are empty.')),
    'examineReceptacle.feedback': (
        ('openable(r:receptacle) & opened(r:receptacle)',
         f'The {{r.name}} stands open and holds {_THINGS}.'),
        ('openable(r:receptacle)', 'The {r.name} is shut.'),
        ('', f'The {{r.name}} holds {_THINGS}.')),
    'examineObject.feedback': (
        ('isreceptacleobject(o:object)',
         f'A plain {{o.name}}, made to put things in. It holds {_INNER}.'),
        ('isclean(o:object) & ishot(o:object) & issliced(o:object)',
         'The {o.name} is sliced, washed and steaming.'),
        ('isclean(o:object) & iscool(o:object) & issliced(o:object)',
         'The {o.name} is sliced, washed and chilled.'),
        ('isclean(o:object) & issliced(o:object)',
         'The {o.name} is sliced and washed.'),
        ('ishot(o:object) & issliced(o:object)',
         'The {o.name} is sliced and steaming.'),
        ('iscool(o:object) & issliced(o:object)',
         'The {o.name} is sliced and chilled.'),
        ('isclean(o:object) & ishot(o:object)',
         'The {o.name} is washed and steaming.'),
        ('isclean(o:object) & iscool(o:object)',
         'The {o.name} is washed and chilled.'),
        ('ishot(o:object)', 'The {o.name} is steaming.'),
        ('isclean(o:object)', 'The {o.name} is washed.'),
        ('iscool(o:object)', 'The {o.name} is chilled.'),
        ('toggleable(o:object) & istoggled(o:object)', 'The {o.name} is lit.'),
        ('toggleable(o:object) & not_istoggled(o:object)',
         'The {o.name} is dark.'),
        ('sliceable(o:object) & issliced(o:object)', 'The {o.name} is sliced.'),
        ('', 'The {o.name} is as it should be.')),
}

_HERE = ('atlocation(a:agent, l:location) & '
         'receptacleatlocation(r:receptacle, l:location)')
_LOOSE = ('atlocation(a:agent, l:location) & '
          'objectatlocation(o:object, l:location) & '
          'receptacleatlocation(r:receptacle, l:location) & '
          'not_inreceptacle(o:object, r:receptacle)')

_LOOK: dict[str, _Rows] = {
    'look.feedback': (
        (_HERE, '#look-variations#. Lying about: #list_objects_on_the_floor#.'),
        ('', 'You stand in a room. Around you: #list_appliances#.')),
    'look-variations': (('', f'In front of you: [{{r.name | {_HERE}}}]'),),
    'list_objects_on_the_floor': (
        (_LOOSE, f'[{{#overview(o)# | {_LOOSE}}}]'),
        ('', 'nothing')),
    'list_appliances': (
        ('receptacleatlocation(r:receptacle, l:location)',
         '[{#overview(r)# | receptacleatlocation(r:receptacle, l:location)}]'),
        ('', 'nothing')),
    'overview(o)': (('', '{o.indefinite} {o.name}'),),
    'overview(r)': (('', '{r.indefinite} {r.name or r.id}'),),
    'list_empty': (('', 'nothing'),),
    'list_separator': (('', ', '),),
    'list_last_separator': (('', ', and '),),
}

_HELP = """
You may say:
  look                                  see where you are
  inventory                             see what you hold
  go to (receptacle)                    walk there
  open (receptacle)
  close (receptacle)
  take (object) from (receptacle)
  move (object) to (receptacle)         put down what you hold
  examine (object or receptacle)
  use (object)                          switch it on
  clean (object) with (receptacle)      at a sink
  heat (object) with (receptacle)       at a microwave
  cool (object) with (receptacle)       at a fridge
  slice (object) with (object)          with a knife in hand
"""

# Each action's command, and the sentences of its own where it has any.
_ACTIONS: dict[str, tuple[str, str, dict[str, _Rows]]] = {
    'GotoLocation': (
        'go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]',
        '#GotoLocation.feedback#', {}),
    'OpenObject': ('open {r}', '#OpenObject.feedback#', {}),
    'CloseObject': ('close {r}', '#CloseObject.feedback#', {}),
    'PickupObject': ('take {o} from {r}', '#PickupObject.feedback#', {}),
    'PutObject': ('move {o} to {r}', '#PutObject.feedback#', {}),
    'inventory': ('inventory', '#inventory.feedback#', {}),
    'examineReceptacle': ('examine {r}', '#examineReceptacle.feedback#', {}),
    'examineObject': ('examine {o}', '#examineObject.feedback#', {}),
    'ToggleObject': ('use {o}', '#toggleObject.feedback#', {
        'toggleObject.feedback': (
            ('toggleable(o:object) & istoggled(o:object)',
             'The {o.name} lights up.'),
            ('toggleable(o:object)', 'The {o.name} goes dark.'),
            ('', 'The {o.name} has no switch.'))}),
    'HeatObject': ('heat {o} with {r}', '#heatObject.feedback#', {
        'heatObject.feedback': (
            ('', 'The {r.name} hums; the {o.name} is hot now.'),)}),
    'CleanObject': ('clean {o} with {r}', '#cleanObject.feedback#', {
        'cleanObject.feedback': (
            ('', 'Water runs in the {r.name}; the {o.name} is clean now.'),)}),
    'CoolObject': ('cool {o} with {r}', '#coolObject.feedback#', {
        'coolObject.feedback': (
            ('', 'Cold air leaves the {r.name}; the {o.name} is cool now.'),)}),
    'SliceObject': ('slice {co} with {ko}', '#sliceObject.feedback#', {
        'sliceObject.feedback': (
            ('', 'With the {ko.name} you cut the {co.name} into slices.'),)}),
    'look': ('look', '#look.feedback#', _LOOK),
    'help': ('help', _HELP, {}),
}


def _symbols(symbols: dict[str, _Rows]) -> str:
  rules = {
      symbol: [{'condition': condition, 'rhs': text} if condition
               else {'rhs': text} for condition, text in rows]
      for symbol, rows in symbols.items()}
  return f'grammar :: """\n{json.dumps(rules, indent=2)}\n""";\n'


def _action(name: str, template: str, feedback: str,
            symbols: dict[str, _Rows]) -> str:
  own = _symbols(symbols) if symbols else ''
  return (f'\naction {name} {{\ntemplate :: "{template}";\n'
          f'feedback :: "{feedback}";\n{own}}}\n')


_GRAMMAR = _symbols(_SHARED) + ''.join(
    _action(name, *row) for name, row in _ACTIONS.items())


def grammar(task: str) -> str:
  """Returns the grammar whose games end their introduction with `task`."""
  return _GRAMMAR.replace('<task>', task)
