"""Plans as text: a table of the plateau, the best one's time and memory, what lost and why, what was assumed."""

from __future__ import annotations

from collections.abc import Sequence

from plait.planner.estimate import Estimate
from plait.planner.memory import LINES
from plait.planner.search import NOISE, Found, describe
from plait.report.table import table
from plait.spec.units import format_bytes, format_count, format_seconds

LEAST_SHOWN = 0.002  # of a step, below which a term is not worth a line


def plan_lines(plan: Estimate) -> list[str]:
    """One plan: its time with interval, where it goes, and the bytes of each stage."""
    low, high = plan.interval
    lines = [
        f"{describe(plan.job)} on {plan.job.world} {plan.ground.cluster.device.name}",
        f"step {format_seconds(plan.step)} (80 %: {format_seconds(low)} … {format_seconds(high)}), "
        f"MFU {100 * plan.mfu:.1f} %, HFU {100 * plan.hfu:.1f} %, "
        f"{format_count(plan.tokens_per_second)} tokens/s a device",
    ]
    if plan.before_anchor:
        low, high = plan.before_anchor
        lines.append(f"before the anchor: {format_seconds(low)} … {format_seconds(high)}")
    return [*lines, "", *_time_table(plan), "", *_memory_table(plan)]


def _time_table(plan: Estimate) -> list[str]:
    rows = [
        [name, format_seconds(value), f"{100 * value / plan.step:.1f} %"]
        for name, value in plan.terms.items()
        if abs(value) >= LEAST_SHOWN * plan.step
    ]
    return table(["where the step goes", ">time", ">share"], [*rows, ["step", format_seconds(plan.step), "100.0 %"]])


def _memory_table(plan: Estimate) -> list[str]:
    memory, shown = plan.memory, sorted({0, plan.memory.worst, len(plan.memory.stages) - 1})
    names = [name for name in LINES if any(getattr(memory.stages[at], name) for at in shown)]
    rows = [[name, *(format_bytes(getattr(memory.stages[at], name)) for at in shown)] for name in names]
    rows.append(["total", *(format_bytes(memory.stages[at].total) for at in shown)])
    verdict = {"fits": "fits", "tight": "tight: fits only unfragmented", "no": "does not fit"}[memory.verdict]
    worst = f"stage {memory.worst} decides: {verdict}, headroom {format_bytes(memory.headroom)}"
    return [*table(["bytes of a device", *(f">stage {at}" for at in shown)], rows), worst]


def found_lines(found: Found) -> list[str]:
    """A search: the plateau, the best plan in full, the losers, and the rejected."""
    rows = [_row(rank, plan) for rank, plan in enumerate(found.plans, 1)]
    lines = [
        f"{found.examined} layouts examined, {found.estimated} estimated in {format_seconds(found.seconds)}; "
        f"{found.within_noise} lie within {100 * NOISE:.0f} % of the best, too near to tell apart by time: "
        "of those, more headroom ranks first",
        f"the first {len(rows)}:",
        *table(["", "layout", ">step", ">80 % of cases", ">MFU %", ">memory", ">headroom"], rows),
        "",
        *plan_lines(found.plans[0]),
    ]
    if found.losers:
        lines += ["", "the fastest of each other kind of split, beside the first of the table:"]
        lines += [f"  {kind}: {_beside(slower)}; {because}" for kind, slower, because in found.losers]
    if found.rejected:
        lines += ["", "rejected:"]
        lines += [f"  {one.count} × {one.reason}; nearest: {one.nearest}" for one in found.rejected]
    return lines


def _row(rank: int, plan: Estimate) -> list[str]:
    low, high = plan.interval
    worst = plan.memory.stages[plan.memory.worst].total
    return [
        str(rank), describe(plan.job), format_seconds(plan.step), f"{format_seconds(low)} … {format_seconds(high)}",
        f"{100 * plan.mfu:.1f}", format_bytes(worst), format_bytes(plan.memory.headroom),
    ]  # fmt: skip


def _beside(slower: float) -> str:
    return f"{100 * slower:+.0f} %" + (", as fast within the noise" if abs(slower) <= NOISE else "")


def assumed_lines(names: Sequence[str]) -> list[str]:
    """What was not said."""
    return ["", "assumed: " + "; ".join(names)] if names else []
