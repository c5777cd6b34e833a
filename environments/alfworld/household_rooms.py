"""What stands in the rooms of the generated games, and what lies where.

Plain data, of this project's own making: the weights say what a reader would
expect of a household, they are not measured on ALFWorld. Names are ALFWorld's,
so that a policy's words mean the same in both.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Furniture:
  """How often a receptacle type occurs in a room.

  Attributes:
    weight: how likely it is drawn while the room still wants furniture.
    most: how many of it a room can hold.
    needed: how many of it every such room has.
  """

  weight: float
  most: int
  needed: int = 0


ROOMS: Mapping[str, Mapping[str, Furniture]] = {
    'kitchen': {
        'Cabinet': Furniture(5, 6),
        'CoffeeMachine': Furniture(1, 1),
        'CounterTop': Furniture(2, 3, needed=1),
        'DiningTable': Furniture(1, 1),
        'Drawer': Furniture(4, 5),
        'Fridge': Furniture(0, 1, needed=1),
        'GarbageCan': Furniture(1, 1),
        'Microwave': Furniture(0, 1, needed=1),
        'Shelf': Furniture(1.5, 3),
        'SideTable': Furniture(0.5, 1),
        'SinkBasin': Furniture(0, 1, needed=1),
        'StoveBurner': Furniture(2, 4),
        'Toaster': Furniture(0.7, 1),
    },
    'livingroom': {
        'ArmChair': Furniture(2, 2),
        'Cabinet': Furniture(1.5, 4),
        'CoffeeTable': Furniture(1.5, 1),
        'DiningTable': Furniture(0.7, 1),
        'Drawer': Furniture(3, 5),
        'Dresser': Furniture(0.7, 1),
        'GarbageCan': Furniture(1, 1),
        'Ottoman': Furniture(0.5, 1),
        'Safe': Furniture(0.3, 1),
        'Shelf': Furniture(2.5, 4),
        'SideTable': Furniture(1.5, 2, needed=1),
        'Sofa': Furniture(0.5, 2, needed=1),
        'TVStand': Furniture(1, 1),
    },
    'bedroom': {
        'ArmChair': Furniture(0.5, 1),
        'Bed': Furniture(0.3, 2, needed=1),
        'Cabinet': Furniture(0.7, 2),
        'Desk': Furniture(1.5, 2),
        'Drawer': Furniture(5, 6),
        'Dresser': Furniture(1, 1),
        'GarbageCan': Furniture(1, 1),
        'LaundryHamper': Furniture(0.7, 1),
        'Safe': Furniture(0.5, 1),
        'Shelf': Furniture(2.5, 5),
        'SideTable': Furniture(1, 2, needed=1),
    },
    'bathroom': {
        'BathtubBasin': Furniture(0.7, 1),
        'Cabinet': Furniture(4, 4),
        'Cart': Furniture(0.3, 1),
        'CounterTop': Furniture(1, 1),
        'Drawer': Furniture(2, 4),
        'GarbageCan': Furniture(1, 1),
        'HandTowelHolder': Furniture(1.5, 2),
        'Shelf': Furniture(1.5, 3),
        'SideTable': Furniture(0.7, 1),
        'SinkBasin': Furniture(1, 2, needed=1),
        'Toilet': Furniture(0, 1, needed=1),
        'ToiletPaperHanger': Furniture(1, 1),
        'TowelHolder': Furniture(1, 2),
    },
}

# Metres above the floor at which a receptacle holds its things.
HEIGHTS: Mapping[str, float] = {
    'ArmChair': 0.45, 'BathtubBasin': 0.2, 'Bed': 0.5, 'Cabinet': 0.4,
    'Cart': 0.6, 'CoffeeMachine': 0.95, 'CoffeeTable': 0.4, 'CounterTop': 0.9,
    'Desk': 0.75, 'DiningTable': 0.75, 'Drawer': 0.25, 'Dresser': 1.1,
    'Fridge': 0.8, 'GarbageCan': 0.1, 'HandTowelHolder': 1.4,
    'LaundryHamper': 0.1, 'Microwave': 1.0, 'Ottoman': 0.4, 'Safe': 0.3,
    'Shelf': 0.5, 'SideTable': 0.6, 'SinkBasin': 0.8, 'Sofa': 0.45,
    'StoveBurner': 0.9, 'TVStand': 0.55, 'Toaster': 0.95, 'Toilet': 0.9,
    'ToiletPaperHanger': 0.7, 'TowelHolder': 1.3,
}

# Types that are built above or beside one another and reached from one place,
# and the metres between two of them, sideways and upwards.
STACKED: Mapping[str, tuple[float, float]] = {
    'Cabinet': (0.0, 0.9), 'Drawer': (0.0, 0.2), 'Shelf': (0.0, 0.35),
    'StoveBurner': (0.2, 0.0)}

OPENABLE = frozenset(('Cabinet', 'Drawer', 'Fridge', 'Microwave', 'Safe'))


@dataclasses.dataclass(frozen=True)
class Thing:
  """A type of object.

  Attributes:
    places: how likely it lies in each type of receptacle; it can be put down
      in these types and no others.
    abilities: the PDDL predicates that hold for it.
  """

  places: Mapping[str, float]
  abilities: tuple[str, ...] = ('pickupable',)


_DISH = ('pickupable', 'cleanable', 'coolable')
_CUP = ('pickupable', 'cleanable', 'coolable', 'heatable')
_FOOD = ('pickupable', 'cleanable', 'coolable', 'heatable', 'sliceable')
_TOOL = ('pickupable', 'cleanable')

THINGS: Mapping[str, Thing] = {
    # What is eaten.
    'Apple': Thing({'CounterTop': 4, 'DiningTable': 4, 'Fridge': 4,
                    'GarbageCan': 1, 'SideTable': 1, 'SinkBasin': 1,
                    'Microwave': 0.3}, _FOOD),
    'Bread': Thing({'CounterTop': 6, 'DiningTable': 3, 'Fridge': 1.5,
                    'GarbageCan': 0.5, 'SideTable': 0.5},
                   ('pickupable', 'coolable', 'heatable', 'sliceable')),
    'Egg': Thing({'Fridge': 6, 'CounterTop': 2, 'DiningTable': 1,
                  'GarbageCan': 0.5, 'Microwave': 0.5, 'SinkBasin': 0.5},
                 _FOOD),
    'Lettuce': Thing({'Fridge': 5, 'CounterTop': 3, 'DiningTable': 2,
                      'GarbageCan': 0.5, 'SinkBasin': 1},
                     ('pickupable', 'cleanable', 'coolable', 'sliceable')),
    'Potato': Thing({'CounterTop': 3, 'Fridge': 3, 'SinkBasin': 2,
                     'DiningTable': 1, 'GarbageCan': 1, 'Microwave': 0.5},
                    _FOOD),
    'Tomato': Thing({'CounterTop': 4, 'Fridge': 4, 'DiningTable': 2,
                     'GarbageCan': 0.7, 'SinkBasin': 1, 'Microwave': 0.3},
                    _FOOD),
    # What is cooked in and eaten from.
    'Bowl': Thing({'Cabinet': 5, 'CounterTop': 3, 'DiningTable': 2,
                   'Shelf': 2, 'Fridge': 1, 'SinkBasin': 1, 'Desk': 0.7,
                   'CoffeeTable': 0.7, 'SideTable': 0.5}, _DISH),
    'Cup': Thing({'Cabinet': 4, 'CounterTop': 3, 'Shelf': 2, 'SinkBasin': 2,
                  'DiningTable': 1, 'Fridge': 1, 'Microwave': 0.5}, _CUP),
    'Mug': Thing({'CoffeeMachine': 4, 'Cabinet': 4, 'CounterTop': 3,
                  'Shelf': 2, 'Desk': 2, 'SinkBasin': 1, 'DiningTable': 1,
                  'Microwave': 0.5, 'SideTable': 0.5}, _CUP),
    'Plate': Thing({'Cabinet': 5, 'CounterTop': 3, 'DiningTable': 3,
                    'Shelf': 1.5, 'SinkBasin': 1, 'Fridge': 0.5,
                    'Microwave': 0.3, 'CoffeeTable': 0.5}, _CUP),
    'Kettle': Thing({'StoveBurner': 5, 'CounterTop': 3, 'Cabinet': 3,
                     'Shelf': 0.7, 'SinkBasin': 0.5}, _TOOL),
    'Pan': Thing({'StoveBurner': 6, 'Cabinet': 3, 'CounterTop': 2,
                  'SinkBasin': 0.7, 'DiningTable': 0.5}, _DISH),
    'Pot': Thing({'StoveBurner': 6, 'Cabinet': 3, 'CounterTop': 1,
                  'SinkBasin': 1, 'Fridge': 0.7, 'Shelf': 0.5}, _DISH),
    'WineBottle': Thing({'Cabinet': 4, 'Fridge': 3, 'Shelf': 2,
                         'DiningTable': 1.5, 'CounterTop': 1,
                         'GarbageCan': 0.5}, ('pickupable', 'coolable')),
    # Cutlery and the like.
    'ButterKnife': Thing({'Drawer': 5, 'CounterTop': 3, 'DiningTable': 2,
                          'SinkBasin': 1}, _TOOL),
    'Fork': Thing({'Drawer': 6, 'CounterTop': 2, 'DiningTable': 2,
                   'SinkBasin': 1}, _TOOL),
    'Knife': Thing({'Drawer': 5, 'CounterTop': 4, 'DiningTable': 1,
                    'SinkBasin': 0.7}, _TOOL),
    'Ladle': Thing({'Drawer': 4, 'CounterTop': 3, 'Cabinet': 2,
                    'SinkBasin': 1, 'DiningTable': 0.5}, _TOOL),
    'Spatula': Thing({'Drawer': 5, 'CounterTop': 3, 'DiningTable': 1,
                      'SinkBasin': 1}, _TOOL),
    'Spoon': Thing({'Drawer': 6, 'CounterTop': 2, 'DiningTable': 2,
                    'SinkBasin': 1}, _TOOL),
    'DishSponge': Thing({'SinkBasin': 4, 'CounterTop': 3, 'Drawer': 1,
                         'Cabinet': 1, 'Cart': 1, 'GarbageCan': 0.5,
                         'Toilet': 0.3}, _TOOL),
    'PepperShaker': Thing({'CounterTop': 4, 'Cabinet': 3, 'Drawer': 2,
                           'DiningTable': 2, 'Shelf': 1}),
    'SaltShaker': Thing({'CounterTop': 4, 'Cabinet': 3, 'DiningTable': 2,
                         'Drawer': 1.5, 'Shelf': 1}),
    # What is washed with.
    'Candle': Thing({'Toilet': 3, 'BathtubBasin': 1, 'CounterTop': 3,
                     'Cabinet': 1.5, 'Shelf': 2, 'Drawer': 1, 'Cart': 1,
                     'CoffeeTable': 1}),
    'Cloth': Thing({'BathtubBasin': 3, 'CounterTop': 2, 'Cabinet': 2,
                    'Drawer': 2, 'LaundryHamper': 2, 'SinkBasin': 1,
                    'Cart': 1, 'Toilet': 0.5, 'GarbageCan': 0.3}, _TOOL),
    'HandTowel': Thing({'HandTowelHolder': 8, 'CounterTop': 1, 'Cabinet': 1,
                        'SinkBasin': 1, 'Shelf': 0.7, 'GarbageCan': 0.3}),
    'SoapBar': Thing({'SinkBasin': 3, 'CounterTop': 3, 'BathtubBasin': 2,
                      'Toilet': 2, 'Cabinet': 1, 'Drawer': 1, 'Cart': 1,
                      'GarbageCan': 0.5}, _TOOL),
    'SoapBottle': Thing({'CounterTop': 4, 'Cabinet': 3, 'Toilet': 2,
                         'Shelf': 1, 'Cart': 1, 'Drawer': 1,
                         'GarbageCan': 0.7}),
    'SprayBottle': Thing({'Cabinet': 3, 'CounterTop': 3, 'Toilet': 2,
                          'Shelf': 1.5, 'Drawer': 1, 'GarbageCan': 0.7}),
    'TissueBox': Thing({'CounterTop': 2, 'Toilet': 2, 'SideTable': 2,
                        'CoffeeTable': 2, 'Dresser': 2, 'Cabinet': 1,
                        'Drawer': 1, 'Desk': 1, 'Shelf': 0.7, 'TVStand': 0.5}),
    'ToiletPaper': Thing({'ToiletPaperHanger': 5, 'Toilet': 4, 'Cabinet': 3,
                          'Drawer': 1, 'CounterTop': 1, 'Shelf': 1,
                          'GarbageCan': 1}),
    'Towel': Thing({'TowelHolder': 8, 'BathtubBasin': 0.5}),
    # What lies about in the other rooms.
    'AlarmClock': Thing({'SideTable': 4, 'Desk': 3, 'Dresser': 3,
                         'Shelf': 1.5}),
    'BaseballBat': Thing({'Bed': 3, 'SideTable': 0.5}),
    'Book': Thing({'Bed': 3, 'Desk': 4, 'Shelf': 3, 'SideTable': 2,
                   'CoffeeTable': 2, 'Drawer': 1.5, 'Sofa': 1, 'Dresser': 1,
                   'ArmChair': 0.7}),
    'Box': Thing({'Sofa': 3, 'CoffeeTable': 2, 'DiningTable': 2,
                  'ArmChair': 1, 'Cabinet': 1, 'Dresser': 1, 'Shelf': 0.5},
                 ('pickupable', 'isReceptacleObject')),
    'CD': Thing({'Desk': 4, 'Drawer': 3, 'Shelf': 3, 'Dresser': 1,
                 'Safe': 1, 'GarbageCan': 0.7}),
    'CellPhone': Thing({'Bed': 2, 'Desk': 3, 'Dresser': 2, 'Drawer': 2,
                        'SideTable': 2, 'Sofa': 1, 'Safe': 0.5, 'Shelf': 1}),
    'CreditCard': Thing({'Desk': 2, 'Drawer': 2, 'Dresser': 2, 'Shelf': 2,
                         'SideTable': 2, 'CoffeeTable': 1.5, 'ArmChair': 1,
                         'Sofa': 1, 'Safe': 1}),
    'KeyChain': Thing({'SideTable': 3, 'Drawer': 3, 'Dresser': 2,
                       'CoffeeTable': 2, 'Shelf': 1.5, 'Sofa': 1,
                       'ArmChair': 1, 'Safe': 1, 'Desk': 1}),
    'Laptop': Thing({'Bed': 3, 'Desk': 4, 'Sofa': 2, 'CoffeeTable': 2,
                     'DiningTable': 1.5, 'ArmChair': 1, 'Dresser': 1}),
    'Newspaper': Thing({'Sofa': 3, 'CoffeeTable': 3, 'DiningTable': 2,
                        'SideTable': 1, 'Drawer': 1, 'ArmChair': 1,
                        'Ottoman': 1, 'GarbageCan': 1, 'Shelf': 0.7}),
    'Pen': Thing({'Desk': 4, 'Drawer': 3, 'Shelf': 2, 'SideTable': 2,
                  'Dresser': 1, 'GarbageCan': 0.7}),
    'Pencil': Thing({'Desk': 4, 'Drawer': 3, 'Shelf': 2, 'SideTable': 2,
                     'Dresser': 1, 'GarbageCan': 0.7}),
    'Pillow': Thing({'Bed': 5, 'Sofa': 4, 'ArmChair': 3, 'Ottoman': 1}),
    'RemoteControl': Thing({'Sofa': 3, 'ArmChair': 2, 'CoffeeTable': 2,
                            'SideTable': 2, 'TVStand': 2, 'Drawer': 1.5,
                            'Ottoman': 1, 'Dresser': 1}),
    'Statue': Thing({'Shelf': 3, 'Dresser': 3, 'CoffeeTable': 2,
                     'TVStand': 1.5, 'SideTable': 1, 'Safe': 0.5}),
    'TeddyBear': Thing({'Bed': 5, 'Sofa': 1}),
    'Vase': Thing({'Shelf': 3, 'CoffeeTable': 2, 'Cabinet': 2, 'Dresser': 2,
                   'SideTable': 1, 'Safe': 0.5}),
    'Watch': Thing({'Dresser': 3, 'SideTable': 2, 'Shelf': 2, 'Drawer': 2,
                    'CoffeeTable': 1.5, 'Safe': 1.5, 'Desk': 1}),
    # What gives light stays where it is.
    'DeskLamp': Thing({'Desk': 6, 'SideTable': 4, 'Dresser': 2, 'Shelf': 0.5},
                      ('toggleable',)),
    'FloorLamp': Thing({'SideTable': 1}, ('toggleable',)),
    'HousePlant': Thing({'Shelf': 1, 'SideTable': 1, 'CounterTop': 0.5,
                         'CoffeeTable': 0.5}, ('moveable',)),
}

_KITCHENWARE = (
    'Apple', 'Bread', 'Egg', 'Lettuce', 'Potato', 'Tomato', 'Bowl', 'Cup',
    'Mug', 'Plate', 'Kettle', 'Pan', 'Pot', 'WineBottle', 'ButterKnife',
    'Fork', 'Knife', 'Ladle', 'Spatula', 'Spoon', 'DishSponge',
    'PepperShaker', 'SaltShaker', 'SoapBottle', 'Vase', 'HousePlant')
_SMALL_THINGS = (
    'Book', 'CellPhone', 'CreditCard', 'KeyChain', 'Laptop', 'Pillow',
    'Statue', 'TissueBox', 'Vase', 'Watch', 'HousePlant')

STOCK: Mapping[str, tuple[str, ...]] = {
    'kitchen': _KITCHENWARE,
    'livingroom': _SMALL_THINGS + (
        'Box', 'Newspaper', 'RemoteControl', 'Candle', 'Plate'),
    'bedroom': _SMALL_THINGS + (
        'AlarmClock', 'BaseballBat', 'CD', 'Pen', 'Pencil', 'Mug', 'Bowl',
        'TeddyBear', 'Cloth', 'RemoteControl'),
    'bathroom': (
        'Candle', 'Cloth', 'DishSponge', 'HandTowel', 'SoapBar', 'SoapBottle',
        'SprayBottle', 'TissueBox', 'ToiletPaper', 'Towel'),
}

# The lamps a room may have; a room without any asks for no light.
LAMPS: Mapping[str, tuple[str, ...]] = {
    'kitchen': (), 'livingroom': ('FloorLamp', 'DeskLamp'),
    'bedroom': ('DeskLamp',), 'bathroom': ()}
