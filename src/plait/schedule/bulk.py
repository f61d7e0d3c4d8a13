"""Lists of a hundred thousand actions, made and read without the garbage collector looking on.

Schedules are plain values without cycles, so there is nothing for it to find; but it would look through all of them
each time that their number has grown by a quarter, which takes as long as everything else together.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector of cycles rests meanwhile; also a decorator of functions (not of generators)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
