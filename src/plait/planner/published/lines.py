"""The judgement of a table of published runs as text: a line per source, then the totals. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH = 62


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """What `plait plan --published` prints."""
    lines = [f"{summary['rows']} rows, {100 * summary['accepted']:.1f} % accepted; constants {summary['constants']}"]
    lines += [f"  refused {count}: {reason}" for reason, count in summary["refused"].items()]
    doubts = summary["distrusted"]
    lines += [f"{len(doubts)} doubts"] + [f"  {doubt['id']}: {doubt['why']}" for doubt in doubts[:40]]
    lines += ["  …"] if len(doubts) > 40 else []
    for kind in ("dense", "experts"):
        lines += ["", *_kind_lines(kind, summary[kind])]
    memory = summary["memory"]
    lines += [
        "",
        f"pairs of layouts in order: {_percent(summary['pairs_in_order'])} of {summary['pairs']}; "
        f"mean regret {_percent(summary['regret'])} over {summary['contests']} contests; "
        f"intervals hold {_percent(summary['coverage'])} (of 80 %)",
        f"memory: {_percent(memory['false_alarms'])} false alarms; {memory['oom_caught']} of {memory['oom_rows']} runs "
        "that ran out of memory are warned of",
    ]
    return lines + [f"  {source[-WIDTH:]}: {_percent(error)}" for source, error in memory["mape"].items()]


def _kind_lines(kind: str, figures: Mapping[str, Any]) -> list[str]:
    head = f"{kind:{WIDTH}} layouts   mape   bias    p90   ≤5 %  ≤10 %  constant MFU  coverage"
    lines = [head]
    for source, one in figures["sources"].items():
        lines.append(f"{'* ' if one['counts'] else '  '}{source[-WIDTH + 2 :]:{WIDTH - 2}} {_figures(one)}")
    total, over = figures["total"], figures["macro"]
    if total:
        lines.append(f"{'all layouts alike':{WIDTH}} {_figures(total)}")
    lines.append(
        f"macro over the {over['sources']} sources marked *: "
        f"mape {_percent(over['mape'])}, p90 {_percent(over['p90'])}, "
        f"constant MFU {_percent(over['constant_mfu_mape'])}"
    )
    same, other = figures["anchored_same_model"]["macro"], figures["anchored_other_model"]["macro"]
    return [*lines, f"with one anchor: same model {_percent(same)}, another model {_percent(other)}"]


def _figures(one: Mapping[str, Any]) -> str:
    numbers = [one[name] for name in ("mape", "bias", "p90", "within_5", "within_10", "constant_mfu_mape", "coverage")]
    widths = (6, 6, 6, 6, 6, 13, 9)
    return f"{one['layouts']:7d} " + " ".join(
        f"{100 * number:{width}.1f}" for number, width in zip(numbers, widths, strict=True)
    )


def _percent(number: float | None) -> str:
    return "–" if number is None else f"{100 * number:.1f} %"
