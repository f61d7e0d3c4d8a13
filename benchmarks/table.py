"""The table of docs/benchmarks.md, from the result files: nothing in it is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- begin: written by `python -m benchmarks` -->", "<!-- end -->"
COLUMNS = (
    "split", "ranks", "peer", "plait ms", "peer ms", "floor ms", "throughput (peer / plait)",
    "time above the floor (plait / peer)", "rounds", "gradients differ by",
)  # fmt: skip

SHARDED_COLUMNS = (
    "ZeRO", "ranks", "peer", "plait CPU ms", "peer CPU ms", "floor CPU ms", "CPU (peer / plait)",
    "CPU above the floor (plait / peer)", "throughput (peer / plait)", "peak MiB (plait / peer)", "rounds", "load",
    "gradients differ by",
)  # fmt: skip
SLEEPING_COLUMNS = (
    "schedule", "ranks", "peer", "plait ms", "peer ms", "simulated ms (plait / peer)", "speed (peer / plait)",
    "most live (plait / peer)", "rounds", "load", "gradients differ by",
)  # fmt: skip
MIB = 2**20


def write_table(results: Path, document: Path) -> None:
    """Put the table of all result files between the document's two marks."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    write_section(document, (BEGIN, END), table(found))


def write_section(document: Path, marks: tuple[str, str], text: str) -> None:
    """Put a text between two marks of a document."""
    begin, end = marks
    before, _, rest = document.read_text().partition(begin)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one row for each result, and what it ran on; contests of memory in a table of their own."""
    lines = []
    for kind, (title, columns, cells) in KINDS.items():
        chosen = sorted((result for result in results if kind_of(result) == kind), key=_place)
        if chosen:
            lines += [f"### {title} on CPU", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(cells(result)) + " |" for result in chosen]
            lines += ["", *sorted({origin(result) for result in chosen}), ""]
    return "\n".join(lines).rstrip()


def row(result: Mapping[str, Any]) -> list[str]:
    """The cells of one contest."""
    _, _, cells = KINDS[kind_of(result)]
    return cells(result)


def kind_of(result: Mapping[str, Any]) -> str:
    """Which table a result belongs to."""
    return "sleeping" if result.get("orders") else "sharded" if result.get("peak_bytes") else "timed"


def _place(result: Mapping[str, Any]) -> tuple[str, int]:
    """Contests of one name by ranks, and then by micro-batches, which end the name."""
    return result["benchmark"].rpartition("-")[0], result["ranks"]


def sharded_row(result: Mapping[str, Any]) -> list[str]:
    """CPU time and memory count: both are the side's own, whoever else uses the machine."""
    times, cpu = result["cpu_milliseconds_per_rank"], result["cpu"]
    peaks = {side: max(by_rank) / MIB for side, by_rank in result["peak_bytes"].items()}
    return [
        result["title"].removeprefix("ZeRO "),
        str(result["ranks"]),
        result["peer"],
        *(f"{times[side]:.0f}" for side in ("plait", "peer", cpu["floor"])),
        interval(cpu["throughput"]),
        interval(cpu["above_floor"]),
        interval(result["throughput"]),
        f"{peaks['plait'] / peaks['peer']:.2f} ({peaks['plait']:.0f} / {peaks['peer']:.0f})",
        str(result["rounds"]),
        f"{result['machine']['load']:.0f}",
        f"{max(result['gradient_error_of_step_1'].values()):.0e}",
    ]


def timed_row(result: Mapping[str, Any]) -> list[str]:
    """Times by the clock."""
    times, floor = result["milliseconds"], result["floor"]
    beside = f" (tokens whole: {times['plait_whole']:.0f})" if "plait_whole" in times else ""
    return [
        result["title"],
        str(result["ranks"]),
        result["peer"],
        f"{times['plait']:.0f}{beside}",
        f"{times['peer']:.0f}",
        f"{times[floor]:.0f}" if floor else "–",
        interval(result["throughput"]),
        interval(result["above_floor"]),
        str(result["rounds"]),
        f"{max(result['gradient_error_of_step_1'].values()):.0e}",
    ]


def sleeping_row(result: Mapping[str, Any]) -> list[str]:
    """Times by the clock, what each order would take by itself, and the most stage inputs that a rank holds."""
    times, orders = result["milliseconds"], result["orders"]
    sides = ("plait", "peer")
    return [
        result["title"],
        str(result["ranks"]),
        result["peer"],
        *(f"{times[side]:.0f}" for side in sides),
        " / ".join(f"{1e3 * orders[side]['seconds']:.0f}" for side in sides),
        interval(result["throughput"]),
        " / ".join(f"{max(orders[side]['live'])}" for side in sides),
        str(result["rounds"]),
        f"{result['machine']['load']:.0f}",
        f"{max(result['gradient_error_of_step_1'].values()):.0e}",
    ]


def interval(ratio: Mapping[str, Any] | None) -> str:
    """0.87 (0.84 … 0.91)."""
    if ratio is None:
        return "–"
    median, low, high = ("∞" if ratio[key] is None else f"{ratio[key]:.2f}" for key in ("median", "low", "high"))
    return f"{median} ({low} … {high})"


def origin(result: Mapping[str, Any]) -> str:
    """One line: machine and versions."""
    at, versions = result["machine"], result["versions"]
    ran_on = (
        f"{at['processor']}, {at['cores']} cores, one thread per rank; torch {versions['torch']}, "
        f"Python {versions['python']}"
    )
    return f"{ran_on}; {work(result['size'])}, float32."


def work(size: Mapping[str, Any]) -> str:
    """The sizes of a contest in words."""
    if "message" in size:
        naps = ", ".join(f"{kind.upper()} {1e3 * size[kind]:g} ms" for kind in "fbw")
        return f"every stage sleeps {naps}, messages of {4 * size['message'] // 1024} KB"
    return (
        f"hidden {size['hidden']}, {size['layers']} layers, vocabulary {size['vocab']}, "
        f"{size['rows']} × {size['sequence']} tokens, {size['parameters']:,} parameters"
    )


# Kind of contest -> the title of its table, its columns, and the cells of a row.
KINDS: Mapping[str, tuple[str, tuple[str, ...], Callable[[Mapping[str, Any]], list[str]]]] = {
    "timed": ("Overhead", COLUMNS, timed_row),
    "sleeping": ("Pipelines of sleeping stages", SLEEPING_COLUMNS, sleeping_row),
    "sharded": ("ZeRO: overhead and memory", SHARDED_COLUMNS, sharded_row),
}
