"""What each column of a table of published runs may hold: a whole number, a number or a code, within which bounds.

A table is judged once, before anything is made of it. A column that does not stand here holds free text, and a cell
that may be blank says nothing. What no cell gives away by itself is for `lint.py` to doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

MOST = 10**15  # of anything that is counted
MOST_LAYERS = 10**4  # each is laid out by itself
MOST_RANKS = 10**8


class Column(NamedTuple):
    """The numbers from `low` on (without `low` itself where `above`) to `high`, or the texts of a pattern.

    `needed`: no row may leave it blank. `unique`: no two rows may say the same.
    """

    kind: str
    low: float = 0
    high: float = MOST
    above: bool = False
    pattern: str = ""
    needed: bool = False
    unique: bool = False

    def wrong(self, text: str) -> str:
        """Why a cell that is not blank cannot be; nothing where it can."""
        if self.pattern:
            return "" if re.fullmatch(self.pattern, text) else f"is not {self.kind}"
        try:
            value = float(text)
        except ValueError:
            return f"is not {self.kind}"
        if not isfinite(value) or (self.kind == WHOLE and value != int(value)):
            return f"is not {self.kind}"
        if value > self.high:
            return f"is more than {self.high:g}"
        if self.above and value <= self.low:
            return f"is not above {self.low:g}"
        return f"is less than {self.low:g}" if value < self.low else ""


WHOLE, NUMBER = "a whole number", "a number"
_COUNT, _OPTION, _POSITIVE = Column(WHOLE, 1), Column(WHOLE), Column(NUMBER, above=True)
_FLAG = Column("0 or 1", pattern="[01]")

COLUMNS: Mapping[str, Column] = {
    "id": Column("text", pattern="(?s).*", needed=True, unique=True),
    "source": Column("text", pattern="(?s).*", needed=True),
    "gpu": Column("text", pattern="(?s).*", needed=True),
    "layers": Column(WHOLE, 1, MOST_LAYERS),
    **dict.fromkeys(("hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "seq_len"), _COUNT),
    **dict.fromkeys(("experts", "topk", "expert_ffn", "moe_every"), _COUNT),
    **dict.fromkeys(("shared_experts", "first_dense_layers"), _OPTION),
    "n_gpus": Column(WHOLE, 1, MOST_RANKS, needed=True),
    **dict.fromkeys(("gpus_per_node", "nvlink_domain", "tp", "pp", "cp", "dp"), Column(WHOLE, 1, MOST_RANKS)),
    **dict.fromkeys(("vpp", "ep", "etp"), Column(WHOLE, 0, MOST_RANKS)),  # 0: not stated
    **dict.fromkeys(("micro_batch", "global_batch", "grad_accum"), _COUNT),
    "zero": Column("a stage from 0 to 3", pattern=r"[0-3](\D.*)?"),
    "sp": _FLAG,
    "in_scope": _FLAG,
    "quality": Column("A, B or C", pattern="[ABC]"),
    **dict.fromkeys(("gpu_mem_gb", "peak_mem_gib", "step_time_s", "tokens_per_s_per_gpu"), _POSITIVE),
    **dict.fromkeys(("tflops_per_gpu", "implied_flops_per_token"), _POSITIVE._replace(high=float("inf"))),
    **dict.fromkeys(("mfu_pct", "hfu_pct"), Column(NUMBER, high=100)),
    "step_time_rel_spread": Column(NUMBER),
}


def bad_cells(line: int, cells: Mapping[str, str]) -> Iterator[str]:
    """Every cell of a row that cannot be, with its line, its column and what it holds."""
    for name, column in COLUMNS.items():
        text = cells.get(name, "").strip()
        why = column.wrong(text) if text else "is blank" if column.needed else ""
        if why:
            yield f"line {line}, {name}: {text!r} {why}" if text else f"line {line}, {name}: {why}"


def repeats(rows: Sequence[tuple[int, Mapping[str, str]]]) -> Iterator[str]:
    """Every cell of a column of names that an earlier row has too."""
    for name in (name for name, column in COLUMNS.items() if column.unique):
        first: dict[str, int] = {}
        for line, cells in rows:
            text = cells.get(name, "").strip()
            if text and first.setdefault(text, line) != line:
                yield f"line {line}, {name}: {text!r} stands on line {first[text]} too"
