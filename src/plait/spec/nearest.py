"""The legal value next to the one that was asked for, number or name, as the way out that an error message shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import isqrt


def divisors(total: int) -> list[int]:
    """All divisors, in order."""
    below = [n for n in range(1, isqrt(total) + 1) if total % n == 0]
    return sorted({*below, *(total // n for n in below)})


def neighbours(legal: Sequence[int], wanted: int) -> str:
    """The legal values (in order) on both sides of `wanted`: '3 or 6'."""
    below = [n for n in legal if n <= wanted][-1:]
    above = [n for n in legal if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next to `wanted`: 6, 4 -> '3 or 6'."""
    return neighbours(divisors(total), wanted)


def nearest_multiples(unit: int, wanted: int) -> str:
    """The multiples of `unit` (1 or more) next to `wanted`: 12, 32 -> '24 or 36'."""
    times = max(1, wanted // unit)
    return neighbours([times * unit, (times + 1) * unit], wanted)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The shortest known name that begins with `name`, else the one that is spelled most like it, if any is.

    One letter begins too much to mean anything.
    """
    names = list(known)
    if longer := [one for one in names if len(name) > 1 and one.startswith(name.lower())]:
        return min(longer, key=len)
    close = get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'did you mean …?', or nothing."""
    close = closest(name, known)
    return f"did you mean {close}?" if close else ""
