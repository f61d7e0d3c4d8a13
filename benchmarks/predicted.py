"""`python -m benchmarks.predicted`: step times that `plait plan` predicts for this machine, beside those it takes.

The machine is measured first, by what `plait measure --nproc N` runs. Then every layout of N ranks of one model is
planned from that file alone, and trained for some steps; all layouts are run in random order, and then all again in
another, so that it is known what one figure is worth.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks are forked from a process of one thread

import argparse
import gc
import json
import platform
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import plait
from benchmarks.plait_side import Plait
from benchmarks.table import write_section
from benchmarks.verdict import machine
from benchmarks.work import Size
from plait.parallel.launch import World, launch
from plait.parallel.probe import probe
from plait.planner.estimate import estimate
from plait.planner.measured import Probe, cluster_toml
from plait.planner.request import Request, one, resolve
from plait.spec.pipeline import SHAPES
from plait.spec.run import RunSpec

HERE = Path(__file__).parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
APART = 0.10  # measured gap from which on the order of two layouts is asked for
SIZE = Size(vocab=2048, rows=16, sequence=32)
TINY = Size(hidden=64, layers=4, heads=4, ffn=96, vocab=96, rows=8, sequence=16, head_dim=16)


class Case(NamedTuple):
    """One layout, its schedule and its ZeRO stage."""

    tp: int
    pp: int
    dp: int
    schedule: str = "1f1b"
    micro_batches: int = 1
    zero: int = 0

    @property
    def name(self) -> str:
        order = f"{self.schedule}, {self.micro_batches} micro-batches" if self.micro_batches > 1 else "1 micro-batch"
        return f"tp {self.tp} · pp {self.pp} · dp {self.dp}, {order}, ZeRO {self.zero}"

    def run(self, size: Size) -> RunSpec:
        return size.run(self.micro_batches, self.schedule, self.zero, tp=self.tp, pp=self.pp, dp=self.dp)


def cases(size: Size, ranks: int) -> Iterator[Case]:
    """Every split of so many ranks into powers of two: whole or in four micro-batches without a pipeline, by schedule
    with one; and sharded where there is something to shard over."""
    powers = [2**k for k in range(ranks.bit_length()) if 2**k <= ranks]
    for tp, pp in ((tp, pp) for tp in powers for pp in powers if tp * pp <= ranks):
        dp = ranks // (tp * pp)
        rows = size.rows // dp
        few = min(rows, 2 * pp if pp > 1 else 1)
        for schedule in SCHEDULES if pp > 1 else ("1f1b",):
            if pp * SHAPES[schedule].chunks <= size.layers:
                yield Case(tp, pp, dp, schedule, few)
        if rows >= 4 * pp:
            yield Case(tp, pp, dp, "1f1b", 4 * pp)
        for zero in (1, 2, 3) if dp > 1 else ():
            yield Case(tp, pp, dp, "1f1b", few, zero)


SCHEDULES = ("1f1b", "interleaved", "zb-h1")


class Taken(NamedTuple):
    """Seconds of each step: by the clock, until the slowest rank is done; all ranks' of processor time; and those of
    the machine's cores that other programs had meanwhile.
    """

    seconds: list[float]
    processor: list[float]
    others: list[float]

    @property
    def own(self) -> float:
        """Seconds of a step without those that other programs had the cores; no less than its own work takes there."""
        steps = zip(self.seconds, self.processor, self.others, strict=True)
        return median(max(s - others / CORES, processor / CORES) for s, processor, others in steps)


def take(case: Case, size: Size, warm: int, steps: int) -> Taken:
    """Train some steps of a case on fresh ranks of one thread each."""
    ranks = case.tp * case.pp * case.dp
    each = launch(ranks, _on_rank, case, size, warm, steps, threads=1, timeout_s=None)
    seconds = [max(times) for times in zip(*(one.seconds for one in each), strict=True)]
    processor = [sum(times) for times in zip(*(one.processor for one in each), strict=True)]
    busy = each[0].others
    return Taken(seconds, processor, [max(0.0, all_ - own) for all_, own in zip(busy, processor, strict=True)])


def _on_rank(world: World, case: Case, size: Size, warm: int, steps: int) -> Taken:
    """Of this rank; in `others` everybody's processor time, this job's too."""
    side = Plait(size, case.run(size), world)
    taken = Taken([], [], [])
    gc.disable()
    for number in range(warm + steps):
        dist.barrier()
        begun, own, every = perf_counter(), process_time(), machine_seconds()
        side.backward()
        side.update()
        spent = process_time() - own
        dist.barrier()
        if number >= warm:
            taken.seconds.append(perf_counter() - begun)
            taken.processor.append(spent)
            taken.others.append(machine_seconds() - every)
    return taken


def machine_seconds() -> float:
    """Processor seconds of all programs since the machine started; 0 where the system does not tell."""
    try:
        with open("/proc/stat") as lines:
            user, nice, system = map(int, next(lines).split()[1:4])
    except OSError:
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def measured_cluster(ranks: int, quick: bool) -> str:
    """The cluster file of this machine, as `plait measure --nproc` writes it."""
    gathered = launch(ranks, probe, quick, threads=1)[0]
    assert gathered is not None
    return cluster_toml([Probe.of(found) for found in gathered])


def predicted(case: Case, size: Size, cluster: str) -> dict[str, float]:
    """Seconds of a step by term, as `plait plan RUN --cluster FILE` has them."""
    asked = resolve(case.run(size), Request(cluster=cluster))
    return estimate(asked.ground, one(asked)).terms


class Pairs(NamedTuple):
    """Of pairs of layouts apart by more than APART in what they took: how many, and how many are predicted in order."""

    asked: int
    in_order: int

    @property
    def share(self) -> float:
        return self.in_order / self.asked if self.asked else 1.0


def pairs(took: Sequence[float], planned: Sequence[float]) -> Pairs:
    """Every two layouts."""
    apart = [
        (took[a] - took[b]) * (planned[a] - planned[b]) > 0
        for a, b in combinations(range(len(took)), 2)
        if max(took[a], took[b]) > (1 + APART) * min(took[a], took[b])
    ]
    return Pairs(len(apart), sum(apart))


def missed(took: Sequence[float], planned: Sequence[float]) -> float:
    """Mean error after one anchor: each layout in turn is measured, and scales all others' predictions."""
    each = [
        abs(planned[at] * took[anchor] / planned[anchor] / took[at] - 1)
        for anchor in range(len(took))
        for at in range(len(took))
        if at != anchor
    ]
    return mean(each) if each else 0.0


def hold(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine, plan every case, run every case as often as asked: the result file."""
    size = TINY if asked.tiny else SIZE
    chosen = list(cases(size, asked.ranks))[:: 4 if asked.tiny else 1]
    text = asked.cluster.read_text() if asked.cluster else measured_cluster(asked.ranks, quick=not asked.long)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.toml"
        file.write_text(text)
        terms = [predicted(case, size, str(file)) for case in chosen]
    turns = [run_all(chosen, size, turn, asked) for turn in range(asked.turns)]
    return judge(chosen, terms, turns) | {
        "benchmark": f"predicted-{asked.ranks}", "ranks": asked.ranks, "size": size.as_dict(),
        "steps": {"warm": asked.warm, "timed": asked.steps}, "cluster": text, "machine": machine(),
        "versions": {"plait": plait.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }  # fmt: skip


def run_all(chosen: Sequence[Case], size: Size, turn: int, asked: argparse.Namespace) -> list[Taken]:
    """Every case once, in an order of this turn's own."""
    found: dict[Case, Taken] = {}
    for number, case in enumerate(random.Random(turn).sample(chosen, len(chosen)), start=1):
        found[case] = take(case, size, asked.warm, asked.steps)
        print(f"turn {turn + 1}, {number} of {len(chosen)}: {case.name}", file=sys.stderr, flush=True)
    return [found[case] for case in chosen]


def judge(
    chosen: Sequence[Case], terms: Sequence[Mapping[str, float]], turns: Sequence[Sequence[Taken]]
) -> dict[str, Any]:
    """What each layout took and was predicted, and what that says: order, noise, error."""
    runs = [[taken.own for taken in turn] for turn in turns]
    took = [mean(times) for times in zip(*runs, strict=True)]
    planned = [sum(each.values()) for each in terms]
    found = pairs(took, planned)
    again = [pairs(one, other) for one, other in combinations(runs, 2)]
    noise = [max(times) / min(times) - 1 for times in zip(*runs, strict=True)]
    return {
        "pairs": found.asked,
        "in_order": found.in_order,
        "share_in_order": found.share,
        "share_in_order_by_a_second_run": mean(one.share for one in again) if again else None,
        "noise": {"median": median(noise), "worst": max(noise)},
        "others": mean(sum(t.others) / sum(t.seconds) / CORES for turn in turns for t in turn),
        "error": mean(abs(plan / time - 1) for plan, time in zip(planned, took, strict=True)),
        "error_after_one_anchor": missed(took, planned),
        "cases": [
            case._asdict() | {
                "seconds": time, "predicted_s": plan, "breakdown_s": dict(each), "runs_s": [run[at] for run in runs],
                "processor_s": median(s for turn in turns for s in turn[at].processor),
                "clock_s": [median(turn[at].seconds) for turn in turns],
            }
            for at, (case, time, plan, each) in enumerate(zip(chosen, took, planned, terms, strict=True))
        ],
    }  # fmt: skip


COLUMNS = (
    "tp · pp · dp", "schedule", "micro-batches", "ZeRO", "step ms (runs)", "predicted ms", "predicted / step",
    "cores busy",
)  # fmt: skip


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as Markdown: layouts by what they took, then the verdict."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for case in sorted(result["cases"], key=lambda case: case["seconds"]):
        runs = " / ".join(f"{1e3 * run:.0f}" for run in case["runs_s"])
        rows.append(
            f"| {case['tp']} · {case['pp']} · {case['dp']} | {case['schedule'] if case['pp'] > 1 else '–'} "
            f"| {case['micro_batches']} | {case['zero']} | {1e3 * case['seconds']:.0f} ({runs}) "
            f"| {1e3 * case['predicted_s']:.0f} | {case['predicted_s'] / case['seconds']:.2f} "
            f"| {case['processor_s'] / case['seconds']:.1f} |"
        )
    return [*rows, "", *verdict(result)]


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Order, noise and error in words."""
    second = result["share_in_order_by_a_second_run"]
    by_second = "" if second is None else f"; a second run of the same layouts puts {second:.1%} of its pairs in order"
    noise, at, size = result["noise"], result["machine"], result["size"]
    return [
        f"{len(result['cases'])} layouts; of {result['pairs']} pairs more than {APART:.0%} apart "
        f"{result['share_in_order']:.1%} are predicted in order{by_second}. Two runs of one layout differ by "
        f"{noise['median']:.1%} (median), {noise['worst']:.0%} at worst; other programs had {result['others']:.0%} of "
        f"the cores meanwhile, which is taken off. Mean error {result['error']:.0%}, "
        f"{result['error_after_one_anchor']:.0%} after one measured step of another layout.",
        f"{at['processor']}, {at['cores']} cores, {result['ranks']} ranks of one thread; "
        f"torch {result['versions']['torch']}; hidden {size['hidden']}, {size['layers']} layers, vocabulary "
        f"{size['vocab']}, {size['rows']} × {size['sequence']} tokens, {size['parameters']:,} parameters, float32.",
    ]


def main() -> None:
    """Hold the comparison, write its result file, and the table into the docs."""
    asked = arguments()
    torch.set_num_threads(1)
    result = hold(asked)
    print("\n".join(lines(result)))
    if asked.tiny:
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=1) + "\n")
    if asked.out == HERE / "results" / "predicted":
        write_section(DOCUMENT, MARKS, "\n".join(lines(result)))


DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
MARKS = "<!-- begin: written by `python -m benchmarks.predicted` -->", "<!-- end: predicted -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="a power of two (default 8)")
    parser.add_argument("--turns", type=int, default=2, help="runs of every layout (default 2)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run (default 5)")
    parser.add_argument("--warm", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--cluster", type=Path, metavar="FILE.toml", help="plan from this file; default: measure now")
    parser.add_argument("--long", action="store_true", help="measure the machine without --quick")
    parser.add_argument("--tiny", action="store_true", help="a few layouts of a tiny model; nothing is written")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "predicted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
