"""The order of an epoch: a pseudo-random permutation of range(n) that needs no memory, and the hash behind it.

Pure integer arithmetic, so that the order is the same on every machine and under every version of every library.
Nothing here knows what is being ordered.
"""

from __future__ import annotations

from math import isqrt

ROUNDS = 6
WORD = (1 << 64) - 1


def mix(value: int) -> int:
    """64 well-mixed bits of an integer (the finaliser of SplitMix64: Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def shuffled(position: int, size: int, seed: int, epoch: int) -> int:
    """What stands at `position` in the permutation of range(size) that (seed, epoch) names.

    A Feistel network over pairs (left, right) with left * columns + right < rows * columns: each round adds a hash of
    one half to the other, which can be undone, so the whole is one-to-one on rows * columns numbers. Numbers beyond
    `size` (there are fewer than 2 sqrt(size) + 1) are sent through again until they fall inside: cycle walking, which
    keeps it one-to-one on range(size). Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002.
    """
    assert 0 <= position < size, f"position {position} of {size}"
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    key = mix(mix(seed) ^ epoch)
    number = position
    while True:
        left, right = divmod(number, columns)
        for turn in range(ROUNDS):
            left = (left + mix(key ^ mix(right ^ (2 * turn << 56)))) % rows
            right = (right + mix(key ^ mix(left ^ (2 * turn + 1 << 56)))) % columns
        number = left * columns + right
        if number < size:
            return number
