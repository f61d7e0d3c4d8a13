"""A timeline as text: one line per rank, time to the right, readable without colour; simulated or measured alike."""

from __future__ import annotations

from plait.schedule.actions import Action, Kind
from plait.schedule.span import Timeline

FILL = {Kind.F: "-", Kind.B: "=", Kind.BW: "=", Kind.W: "~", Kind.FB: "#"}
LEGEND = {
    Kind.F: "F forward",
    Kind.BW: "BW backward",
    Kind.B: "B input gradient",
    Kind.W: "W weight gradient",
    Kind.FB: "FB forward and backward together",
}


def draw(timeline: Timeline, width: int = 100, unit: str = "s") -> str:
    """The timeline scaled to `width` columns, then the legend and the bubble by both of its names.

    A cell shows the action's kind and micro-batch ("F3", and "F3/1" with its stage where the rank holds several) as
    far as they fit, filled to its length; a dot is idle time. `unit` names what the times are counted in.
    """
    heads = [f"rank {rank}" for rank in range(timeline.ranks)]
    tails = [f"{idle / timeline.step if timeline.step else 0.0:6.1%} idle" for idle in timeline.idle]
    margin = max(map(len, heads)) + 1
    scale = _columns_per_second(timeline, max(width - margin - len(tails[0]) - 3, 10))
    lines = [
        f"{head:<{margin}}|{_line(timeline, rank, scale)}|{tail}"
        for rank, (head, tail) in enumerate(zip(heads, tails, strict=True))
    ]
    return "\n".join([*lines, _legend(timeline), _summary(timeline, unit)])


def _columns_per_second(timeline: Timeline, columns: int) -> float:
    """As wide as fits; where every length is a multiple of the shortest, a whole number of columns for each."""
    lengths = [span.seconds for spans in timeline.compute for span in spans if span.seconds > 0]
    if not lengths:
        return 0.0
    shortest = min(lengths)
    fit = columns / timeline.step
    whole = all(abs(length / shortest - round(length / shortest)) < 1e-6 for length in lengths)
    return int(fit * shortest) / shortest if whole and fit * shortest >= 1 else fit


def _line(timeline: Timeline, rank: int, scale: float) -> str:
    spans = timeline.compute[rank]
    several = len({part.stage for span in spans for part in span.action.parts}) > 1
    line = ["."] * round(timeline.step * scale)
    for span in spans:
        first, last = (round((time - timeline.start) * scale) for time in (span.start, span.end))
        line[first:last] = _cell(span.action, last - first, several)
    return "".join(line)


def _cell(action: Action, width: int, several: bool) -> str:
    """The fullest label that fits; a cut micro-batch number would be another number, so it is left out whole."""
    kind = str(action.kind)
    micro = label(action, several)
    fits = next((text for text in (micro, kind, kind[0]) if len(text) <= width), "")
    return fits.ljust(width, FILL[action.kind])


def label(action: Action, several: bool) -> str:
    """Kind and micro-batch, and with `several` stages the stage: F3, BW3/1, F4B1 for both at once."""
    if action.kind is Kind.FB:
        return "F{}B{}".format(*(f"{p.micro}/{p.stage}" if several else p.micro for p in action.parts))
    return f"{action.kind}{action.micro}" + (f"/{action.stage}" if several else "")


def _legend(timeline: Timeline) -> str:
    kinds = {span.action.kind for spans in timeline.compute for span in spans}
    return "; ".join([*(text for kind, text in LEGEND.items() if kind in kinds), "number: micro-batch", ". idle"])


def _summary(timeline: Timeline, unit: str) -> str:
    return (
        f"step {timeline.step:.4g} {unit}; bubble {timeline.bubble:.2%} as a share of the step, "
        f"{timeline.bubble_over_ideal:.2%} relative to the ideal time"
    )
