"""`python -m benchmarks [one|dp|tp|cp|pp|sleep|zero] [--ranks N] [--rounds N]`: all contests, or those of one axis."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks are forked from a process of one thread

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.contest import CONTESTS, Contest, hold
from benchmarks.table import row, write_table
from benchmarks.verdict import judge

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"


def main() -> None:
    """Hold the contests asked for, write one result file each, and the table of all files into the docs."""
    asked = arguments()
    torch.set_num_threads(1)
    for contest in chosen(asked):
        if contest.needs is not None and find_spec(contest.needs) is None:
            print(
                f"{contest.key}: {contest.needs} is not installed, left out (requirements-peers.txt)", file=sys.stderr
            )
            continue
        size = contest.tiny if asked.tiny else contest.size
        print(f"{contest.key}: plait and {contest.peer}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        result = judge(contest, hold(contest, size, asked.rounds, asked.steps), size, asked.steps)
        print(" | ".join(row(result)), flush=True)
        if not asked.tiny:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / f"{contest.key}.json").write_text(json.dumps(result, indent=1) + "\n")
    if asked.out == HERE / "results" and not asked.tiny:
        write_table(asked.out, DOCUMENT)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("axis", nargs="?", choices=CONTESTS, help="default: all, one after the other")
    parser.add_argument("--ranks", type=int, help="default: 2 and 4, pp: 2, sleep: 4 and 8")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default 15, at least 7 to publish)")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn (default 2)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the machinery; nothing is written")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="elsewhere: the docs stay as they are")
    return parser.parse_args()


def chosen(asked: argparse.Namespace) -> Iterator[Contest]:
    for axis in [asked.axis] if asked.axis else CONTESTS:
        make, ranks = CONTESTS[axis]
        for number in ranks if asked.ranks is None or axis == "one" else (asked.ranks,):
            yield from (contest(number) for contest in make)


if __name__ == "__main__":
    main()
