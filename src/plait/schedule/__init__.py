"""WHEN: pipeline schedules as data. Generate, lower, check, simulate, draw: one list, and every reader reads it."""

from plait.schedule.actions import (
    COMPUTE,
    SENDS_IN_FLIGHT,
    WEIGHT_GRADIENTS,
    Action,
    Kind,
    Message,
    Program,
    Schedule,
    completing,
)
from plait.schedule.check import check
from plait.schedule.draw import draw
from plait.schedule.generators import GENERATORS, Generator, PassSeconds, forward_of, generate
from plait.schedule.live import Live, live
from plait.schedule.lower import lower
from plait.schedule.orders import Size
from plait.schedule.simulate import Costs, simulate
from plait.schedule.span import Span, Timeline
from plait.schedule.walk import walk

__all__ = [
    "COMPUTE",
    "GENERATORS",
    "SENDS_IN_FLIGHT",
    "WEIGHT_GRADIENTS",
    "Action",
    "Costs",
    "Generator",
    "Kind",
    "Live",
    "Message",
    "PassSeconds",
    "Program",
    "Schedule",
    "Size",
    "Span",
    "Timeline",
    "check",
    "completing",
    "draw",
    "forward_of",
    "generate",
    "live",
    "lower",
    "simulate",
    "walk",
]
