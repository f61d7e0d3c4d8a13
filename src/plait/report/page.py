"""Timelines as one self-contained HTML page: a drawing for each, readable in light and dark, without any script.

Every box says on hover what it is; nothing is loaded from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from plait.schedule import Kind, Span, Timeline
from plait.schedule.draw import LEGEND, label

ROW, BAR, LEFT, WIDTH = 26, 20, 64, 1200  # pixels
COLOURS = {Kind.F: "#4878d0", Kind.B: "#ee854a", Kind.W: "#6acc64", Kind.BW: "#d65f5f", Kind.FB: "#956cb4"}
STYLE = """
:root { color-scheme: light dark; font: 14px system-ui, sans-serif; margin: 2em; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.bar text { fill: #fff; text-anchor: middle; pointer-events: none; } .bar rect { stroke: #fff; stroke-width: .5; }
.later rect { opacity: .7; } .legend span { margin-right: 1.2em; } .legend i { display: inline-block; width: 1em;
height: 1em; margin-right: .4em; vertical-align: -.1em; }
"""


@dataclass(frozen=True)
class Panel:
    """One timeline, what it is called, and the unit that its clock counts in."""

    title: str
    timeline: Timeline
    unit: str


def page(title: str, panels: tuple[Panel, ...]) -> str:
    """The page, one drawing above the other."""
    drawings = "\n".join(_panel(panel) for panel in panels)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{drawings}\n</body>\n</html>\n"
    )


def _panel(panel: Panel) -> str:
    timeline = panel.timeline
    scale = (WIDTH - LEFT - 90) / timeline.step if timeline.step else 0.0
    height = ROW * timeline.ranks + 4
    rows = "\n".join(_row(timeline, rank, scale) for rank in range(timeline.ranks))
    said = (
        f"step {timeline.step:.4g} {panel.unit}; bubble {timeline.bubble:.2%} as a share of the step, "
        f"{timeline.bubble_over_ideal:.2%} relative to the ideal time"
    )
    return (
        f"<section><h2>{escape(panel.title)}</h2>\n<p>{said}</p>\n"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(panel.title)}">\n{rows}\n</svg>\n'
        f'<p class="legend">{_legend(timeline)}</p></section>'
    )


def _row(timeline: Timeline, rank: int, scale: float) -> str:
    top = ROW * rank
    stages = sorted({part.stage for span in timeline.compute[rank] for part in span.action.parts})
    idle = timeline.idle[rank] / timeline.step if timeline.step else 0.0
    bars = "".join(_bar(span, timeline.start, scale, top, stages) for span in timeline.compute[rank])
    return (
        f'<text x="0" y="{top + 15}">rank {rank}</text>{bars}'
        f'<text x="{WIDTH - 80}" y="{top + 15}">{idle:.1%} idle</text>'
    )


def _bar(span: Span, origin: float, scale: float, top: int, stages: list[int]) -> str:
    left, width = LEFT + (span.start - origin) * scale, span.seconds * scale
    text = label(span.action, len(stages) > 1)
    shown = f'<text x="{left + width / 2:.2f}" y="{top + 15}">{text}</text>' if width > 7 * len(text) else ""
    later = " later" if stages and span.action.stage != stages[0] else ""
    hover = escape(f"{span.action}: {span.start - origin:.4g} to {span.end - origin:.4g}")
    return (
        f'<g class="bar{later}"><rect x="{left:.2f}" y="{top + 1}" width="{width:.2f}" height="{BAR}" '
        f'fill="{COLOURS[span.action.kind]}"><title>{hover}</title></rect>{shown}</g>'
    )


def _legend(timeline: Timeline) -> str:
    kinds = {span.action.kind for spans in timeline.compute for span in spans}
    return "".join(
        f'<span><i style="background:{COLOURS[kind]}"></i>{text}</span>'
        for kind, text in LEGEND.items()
        if kind in kinds
    )
