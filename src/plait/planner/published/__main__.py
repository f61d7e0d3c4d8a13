"""python -m plait.planner.published FILE.csv: fit the constants to every row of a table and rewrite `constants.toml`.

The spreads of intervals come from predictions whose own source was left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from plait.planner.published.calibrate import Table, held_out, write
from plait.planner.published.rows import interpreted
from plait.planner.published.score import spreads_of


def main() -> None:
    """Read, fit, write."""
    rows, _ = interpreted(Path(sys.argv[1]))
    table = Table([row for row in rows if row.measured and not row.cells.get("status")])
    every = np.ones(len(table.rows), dtype=bool)
    logs = table.fit(every, table.fit(every, rounds=40), rounds=40)  # rows without experts once more, hosts known
    write(table, logs, spreads_of(table, held_out(table)))


if __name__ == "__main__":
    main()
