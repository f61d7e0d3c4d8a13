"""How much longer a product's kernel computes than its FLOPs take, by its shape alone.

A kernel cuts the result into tiles and gives each multiprocessor one at a time: the last round is full only by chance,
a tile that hangs over the edge is computed whole, and each tile waits for its first operands before it multiplies
(NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization). On 183 products that
were measured on an A100 (MooreThreads/SimuMax, configs/system) this takes the mean residual from 5.5 to 3.3 %.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns of a result that one multiprocessor computes, and how well it does of its best."""

    rows: int
    columns: int
    of_best: float


TILES = (
    Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.95), Tile(128, 64, 0.8), Tile(64, 128, 0.8),
)  # fmt: skip
FILL = 128  # steps along the inner dim that a tile's first operands take


@lru_cache(maxsize=65536)
def stretch(rows: float, columns: float, inner: float, units: int | None, times: float = 1.0) -> float:
    """A product's time over what its FLOPs take at the kernel's best; `times` of its kind share one kernel."""
    if not units:
        return 1.0
    ideal = times * rows * columns / units
    taken = min(_rounds(rows, columns, units, times, tile) for tile in TILES)
    return max(1.0, taken / ideal) * (1 + FILL / inner)


def _rounds(rows: float, columns: float, units: int, times: float, tile: Tile) -> float:
    """Elements of the result that the busiest multiprocessor computes, as if at the best tile's pace."""
    tiles = times * -(-rows // tile.rows) * -(-columns // tile.columns)
    return -(-tiles // units) * tile.rows * tile.columns / tile.of_best
