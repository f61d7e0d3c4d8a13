"""`plait` as a user runs it: in a process of its own, forked warm from the test's or started afresh."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from plait.cli.main import main

for heavy in ("plait.proof.many", "plait.train.job"):
    import_module(heavy)  # once here, not in every fork

SOURCE = str(Path(__file__).parents[2] / "src")


@dataclass(frozen=True)
class Ended:
    """What a command left behind: its exit code, what it printed, and the processes that it did not take along."""

    code: int
    stdout: str
    stderr: str
    left: list[int]

    @property
    def error(self) -> str:
        """The first line of the error."""
        return next(line for line in self.stderr.splitlines() if line.startswith("error: "))


def plait(*words: object, folder: Path | None = None, **environment: str) -> Ended:
    """The command in a fork of this process, which has torch imported already; hundreds of milliseconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
                os.environ |= environment
                os.chdir(folder or os.getcwd())
                code = main([str(word) for word in words])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Ended(code, *(_text(file.fileno()) for file in (out, err)), left=_alive_in_session(pid))


def fresh(*words: object, launcher: Sequence[str] = ("-m", "plait"), timeout: float = 100, **environment: str) -> Ended:
    """`python -m plait` (or under another launcher) in a new process, as from a shell; seconds."""
    started = subprocess.Popen(
        [sys.executable, *launcher, *(str(word) for word in words)],
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = started.communicate(timeout=timeout)
    return Ended(started.returncode, out, err, _alive_in_session(started.pid))


def _text(descriptor: int) -> str:
    return os.pread(descriptor, 1 << 20, 0).decode()


def _alive_in_session(session: int) -> list[int]:
    """Processes of that session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == session and state != "Z":
            found.append(int(path.parent.name))
    return found
