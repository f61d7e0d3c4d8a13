"""Where metrics go: a progress line, a file of JSON lines, TensorBoard. A sink is told; it never asks back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from plait.spec.errors import MissingExtra
from plait.spec.run import RunSpec
from plait.spec.units import format_bytes, format_count, format_seconds
from plait.train.metrics import Metrics


class Sink(Protocol):
    """Takes each step's metrics."""

    def write(self, metrics: Metrics, memory: int) -> None: ...

    def close(self) -> None: ...


class Progress:
    """A line on stderr every `every` steps, and whenever something was evaluated."""

    def __init__(self, run: RunSpec, done: int = 0) -> None:
        self.steps, self.every, self.done = run.train.steps, run.train.log_every, done
        self.seconds = 0.0

    def write(self, metrics: Metrics, memory: int) -> None:
        self.seconds += metrics.seconds
        if metrics.skipped:
            print(f"step {metrics.step}: {metrics.skipped}; weights unchanged", file=sys.stderr, flush=True)
        if metrics.step % self.every and metrics.step != self.done + 1 and metrics.eval_loss is None:
            return
        left = (self.steps - metrics.step) * self.seconds / (metrics.step - self.done)
        parts = [
            f"step {metrics.step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {metrics.loss:.4f}",
            f"norm {metrics.norm:.3f}",
            f"{format_count(metrics.tokens_per_second)} tokens/s",
            *([] if metrics.mfu is None else [f"MFU {metrics.mfu:.1%}"]),
            f"{format_bytes(memory)} a rank",
            *([f"{format_seconds(left)} left"] if left else []),
            *([] if metrics.eval_loss is None else [f"validation loss {metrics.eval_loss:.4f}"]),
        ]
        print("  ".join(parts), file=sys.stderr, flush=True)

    def close(self) -> None:
        return None


class JsonLines:
    """metrics.jsonl in the run's directory, a line per step; lines after step `done` are those of a run that failed."""

    def __init__(self, path: Path, done: int = 0) -> None:
        if path.exists():
            before = [line for line in path.read_text("utf-8").splitlines() if _step_of(line) in range(1, done + 1)]
            path.write_text("".join(f"{line}\n" for line in before), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics, memory: int) -> None:
        print(json.dumps({**metrics.as_dict(), "memory_bytes": memory}), file=self.file, flush=True)

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> int | None:
    """The step of a line, None where a crash cut it short."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return None


class TensorBoard:
    """Scalars for TensorBoard (extra `track`)."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("train.tensorboard", "track") from error
        self.writer = SummaryWriter(str(folder))

    def write(self, metrics: Metrics, memory: int) -> None:
        for name, value in metrics.as_dict().items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self.writer.close()


@contextmanager
def open_sinks(run: RunSpec, folder: Path | None, done: int = 0) -> Iterator[list[Sink]]:
    """The sinks of rank 0 for the steps after `done`, closed whatever happens."""
    sinks: list[Sink] = [Progress(run, done)]
    if folder is not None:
        sinks.append(JsonLines(folder / "metrics.jsonl", done))
        if run.train.tensorboard:
            sinks.append(TensorBoard(folder))
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield sinks
