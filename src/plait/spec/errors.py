"""The one tree of exceptions. Each error says the thing with its two numbers, and a hint says the way out.

Exit codes live here too: 2 for the user's mistakes (found before anything starts), 1 for failures while running, 3
where training stopped itself and a restart would only repeat it, 128 + n after signal n.
`assert` stays for our own bugs; nothing in this file imports anything of plait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class PlaitError(Exception):
    """Root of every exception that plait raises on purpose.

    `message` names the thing and its numbers; `hint` names the way out (may be empty).
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class UsageError(PlaitError):
    """The user's mistake: a wrong key, file, value or combination. Raised before any process starts; exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class Violation:
    """One reason why a run is refused: the full key, what is wrong with its two numbers, and the nearest way out."""

    key: str
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}" + (f" ({self.fix})" if self.fix else "")


class InvalidRun(UsageError):
    """A run that cannot be: every violation at once, never only the first."""

    def __init__(self, violations: Iterable[Violation], source: str = "") -> None:
        self.violations = tuple(violations)
        assert self.violations, "InvalidRun needs at least one violation"
        head = f"{source}: " if source else ""
        lines = [str(v) for v in self.violations]
        message = head + (lines[0] if len(lines) == 1 else f"{len(lines)} problems\n  " + "\n  ".join(lines))
        super().__init__(message)


class InvalidSchedule(PlaitError):
    """A list of pipeline actions that is incomplete, unpaired, or would never end; `rank` is where, if on one rank."""

    def __init__(self, message: str, hint: str = "", rank: int | None = None) -> None:
        super().__init__(message, hint)
        self.rank = rank


class DataError(UsageError):
    """A data file that is missing, malformed, or too small for what is asked of it (available and needed are named)."""


class RankFailed(PlaitError):
    """A local job ended because one rank failed: `rank`, `step` and `cause` of the first to fail.

    `details` are lines for whoever looks for the reason: where it stood, its traceback, and who followed. The exit code
    is the rank's, where plait's own error ended it.
    """

    def __init__(self, rank: int, step: int | None, cause: str, details: str = "", exit_code: int = 1) -> None:
        where = f"rank {rank}" + (f", step {step}" if step is not None else "")
        super().__init__(f"{where}: {cause}", details)
        self.rank, self.step, self.cause, self.details = rank, step, cause, details
        self.hint, self.exit_code = "", exit_code


class TrainingStopped(PlaitError):
    """Training met a state it must not go on from (a loss or gradient that is not finite); all ranks stop together."""

    exit_code = 3


class Interrupted(PlaitError):
    """A run was asked to stop by signal `number`, and has: exit code 128 + number."""

    exit_code = 130

    def __init__(self, number: int, message: str, hint: str = "train.resume=auto goes on from there") -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + number


class BrokenCheckpoint(PlaitError):
    """A file of a checkpoint is missing, damaged or not what it should be: `path` and `reason`."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class CheckpointMismatch(UsageError):
    """A checkpoint that is whole, but not of this model, optimizer or run."""


class SaveFailed(PlaitError):
    """A checkpoint could not be written; those before it are untouched."""


class CopiesDiffer(PlaitError):
    """Two ranks that should hold identical copies of a tensor do not."""


class MissingExtra(UsageError):
    """A command needs an optional part of the package that is not installed."""

    def __init__(self, needed_for: str, extra: str) -> None:
        super().__init__(f"{needed_for} needs plait[{extra}], which is not installed", f"pip install 'plait[{extra}]'")
