"""Timelines in the trace format that Perfetto and chrome://tracing open, as plain values to be written as JSON.

Source of the format: the Trace Event Format, complete events ("X") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plait.schedule.span import Span, Timeline

LANES = ("compute", "network")


def trace(timelines: Mapping[str, Timeline], microseconds: float = 1e6) -> dict[str, Any]:
    """One process for each timeline and rank, with a thread for compute and one for the network.

    `microseconds` is what one unit of the timelines' clocks stands for; each timeline begins at 0.
    """
    events: list[dict[str, Any]] = []
    for name, timeline in timelines.items():
        first = sum(1 for event in events if event["name"] == "process_name")
        for rank in range(timeline.ranks):
            events += _rank(f"{name} rank {rank}", first + rank, timeline, rank, microseconds)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank(name: str, pid: int, timeline: Timeline, rank: int, microseconds: float) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    for tid, (lane, ranks) in enumerate(zip(LANES, (timeline.compute, timeline.network), strict=True)):
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}}
        for span in ranks[rank] if ranks else ():
            yield {
                "name": str(span.action.kind) + (str(span.action.micro) if span.action.parts else ""),
                "cat": str(span.action.kind),
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "ts": (span.start - timeline.start) * microseconds,
                "dur": span.seconds * microseconds,
                "args": _said(span),
            }


def _said(span: Span) -> dict[str, Any]:
    return {"action": str(span.action), "stage": span.action.stage, "micro-batch": span.action.micro}
