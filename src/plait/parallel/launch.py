"""Local ranks: forked from one warm process, watched by it, ended together, and the first to fail named.

Nothing is split here. Ranks meet in a file that all inherit: no port to find, and no rank whose death deafens the rest.
A rank that raises reports and then stays: its connections close only once the parent knows. So of the ranks that fail,
those that died come first, then those that raised, then those that only lost a peer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import mmap
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from plait.parallel import faults
from plait.parallel.outcome import Failure, Origin, Success, death_of, failure_of
from plait.parallel.world import BACKENDS, Mark, World, joined_world, on_device, run_here
from plait.spec.errors import Interrupted, PlaitError, RankFailed, UsageError

__all__ = ["World", "joined_world", "launch", "run_here"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TICK_S = 0.1  # a death without a closed pipe (a grandchild may hold it) is seen at the latest after this
SETTLE_S = 0.2  # after a failure: an earlier one may still be on its way to us
FOLLOWER_WAIT_S = 3.0  # after a lost peer: the peer's own failure must come
LEAVE_S = 2.0  # to end by itself when its work is done, before it is killed
GRACE_S = 30.0  # to save and leave after SIGTERM or Ctrl-C; what torchrun gives too

_LENGTH = struct.Struct("=Q")


@dataclass
class _Rank:
    """The parent's view of one child."""

    pid: int
    pipe: int
    mark: Mark
    trace: IO[bytes]
    received: bytearray = field(default_factory=bytearray)
    outcome: Success | Failure | None = None
    running: bool = True

    def read(self) -> bool:
        """Take what is in the pipe; False at its end. A whole message becomes the outcome."""
        unfinished = False
        try:
            while chunk := os.read(self.pipe, 1 << 20):
                self.received += chunk
        except BlockingIOError:
            unfinished = True
        if self.outcome is None and len(self.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self.received)
            if len(self.received) == _LENGTH.size + length:
                self.outcome = pickle.loads(memoryview(self.received)[_LENGTH.size :])
        return unfinished

    def reap(self) -> int | None:
        """The exit code of a child that has just ended (negative: a signal), else None."""
        pid, status = os.waitpid(self.pid, os.WNOHANG) if self.running else (0, 0)
        self.running = self.running and pid == 0
        return os.waitstatus_to_exitcode(status) if pid else None

    def stack(self) -> str:
        """What `faulthandler` wrote: the Python stack of a fault or of a hang."""
        return os.pread(self.trace.fileno(), 1 << 16, 0).decode(errors="replace")


def launch(
    world: int,
    target: Callable[[World, *Ts], T],
    *args: *Ts,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float | None = None,
) -> list[T]:
    """Run `target(world, *args)` on `world` forked ranks; the results by rank (any picklable value).

    Every rank is in a default process group (gloo; NCCL too with device "cuda", one GPU per rank) and has `threads`
    torch threads (None: the cores shared out). `target` may be a closure. Raises RankFailed with the first rank to
    fail, or with the rank furthest behind if none has moved for `timeout_s` seconds; UsageError before any fork if this
    process has threads or CUDA in use. When this returns or raises, KeyboardInterrupt included, no rank is left.
    """
    if world < 1:
        raise UsageError(f"{world} ranks: at least 1 is needed")
    on_device(device, 0)
    faults.planned()
    _refuse_unforkable()
    job = _Job(world)
    try:
        with _interrupts_held():
            for _ in range(world):
                job.fork(lambda rank: target(job.join(rank, device, threads), *args))
        with _signals_to(job.heed):
            return job.wait(timeout_s)
    finally:
        job.end()


class _Job:
    """The children of one launch, and the memory and pipes shared with them."""

    def __init__(self, world: int) -> None:
        self._ranks: list[_Rank] = []
        memory = memoryview(mmap.mmap(-1, world * Mark.size))
        self._marks = [Mark(memory[i * Mark.size : (i + 1) * Mark.size]) for i in range(world)]
        self._leave, self._stay = os.pipe()  # ranks stay until the parent's end is closed
        self._meeting, self._meeting_path = _open_meeting()
        self._parent = os.getpid()
        self._asked = 0  # the signal that asked the job to stop
        self._patience = math.inf  # until then (monotonic) ranks that were asked to stop may go on

    def join(self, rank: int, device: str, threads: int | None) -> World:
        """In a child: take its share of the cores and meet the others."""
        size = len(self._marks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(threads or max(1, cores // size))
        # A host name that resolves nowhere, or to another machine, must not matter to ranks that share one machine.
        os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        world = World(rank, size, rank, on_device(device, rank), BACKENDS[device], mark=self._marks[rank])
        world.join(dist.FileStore(self._meeting_path, size))  # type: ignore[attr-defined]
        return world

    def fork(self, run: Callable[[int], Any]) -> None:
        """One more child, which runs `run(rank)`, reports what became of it, and never comes back from here."""
        rank, mark = len(self._ranks), self._marks[len(self._ranks)]
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        trace = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._stay)
                _settle_child(self._parent, trace)
                with os.fdopen(writing, "wb") as pipe:
                    _report(pipe, lambda: run(rank))
                os.read(self._leave, 1)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        self._ranks.append(_Rank(pid, reading, mark, trace))

    def wait(self, timeout_s: float | None) -> list[Any]:
        """The results, once all have come; RankFailed if one cannot."""
        with selectors.DefaultSelector() as pipes:
            for rank in self._ranks:
                pipes.register(rank.pipe, selectors.EVENT_READ, rank)
            while any(r.outcome is None for r in self._ranks) and not self._first_is_known():
                ended = [key.fileobj for key, _ in pipes.select(TICK_S) if not key.data.read()]
                for pipe in ended:
                    pipes.unregister(pipe)
                self._note_deaths()
                if timeout_s is not None and self._idle_s() > timeout_s:
                    raise self._stalled(timeout_s)
                if time.monotonic() > self._patience:
                    raise Interrupted(self._asked, f"ranks were asked to stop, and have not within {GRACE_S:g} s", "")
        if any(isinstance(r.outcome, Failure) for r in self._ranks):
            raise self._failed()
        return [r.outcome.value for r in self._ranks if isinstance(r.outcome, Success)]

    def end(self) -> None:
        """Let every child go, and see to it: by the closed pipe, then killed: SIGTERM may only ask to stop."""
        os.close(self._stay)
        try:
            if all(isinstance(r.outcome, Success) for r in self._ranks):
                self._gone(LEAVE_S)
        finally:
            self._signal(signal.SIGKILL)
            self._gone(10.0)
            os.close(self._leave)
            self._meeting.close()
            for rank in self._ranks:
                os.close(rank.pipe)
                rank.trace.close()

    def heed(self, number: int, frame: FrameType | None) -> None:
        """A signal to the job. The first one asks ranks that heed it to stop, and a second Ctrl-C ends them at once."""
        again = self._asked > 0
        self._asked = number
        if not again and self._ranks and all(r.mark.heeding for r in self._ranks):
            self._patience = time.monotonic() + GRACE_S
            self._signal(signal.SIGTERM)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif not again:  # there is nothing to save: end as by any signal, and the ranks with us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _note_deaths(self) -> None:
        """A child that is gone has failed by that, if by nothing else: all stay until the last is done."""
        for rank in self._ranks:
            code = rank.reap()
            if code is not None:
                rank.read()
                if not isinstance(rank.outcome, Failure):
                    rank.outcome = death_of(code, rank.stack())

    def _first_is_known(self) -> bool:
        """True once no failure can still come in that is nearer to the cause than those that have."""
        failures = [r.outcome for r in self._ranks if isinstance(r.outcome, Failure)]
        if not failures:
            return False
        patience = FOLLOWER_WAIT_S if all(f.origin is Origin.LOST_PEER for f in failures) else SETTLE_S
        return time.monotonic() - min(f.moment for f in failures) > patience

    def _idle_s(self) -> float:
        return time.monotonic() - max(r.mark.read().since for r in self._ranks)

    def _failed(self) -> PlaitError:
        failures = {i: r.outcome for i, r in enumerate(self._ranks) if isinstance(r.outcome, Failure)}
        order = sorted(failures, key=lambda i: (failures[i].origin, failures[i].moment))
        first, standing = order[0], self._ranks[order[0]].mark.read()
        code = failures[first].exit_code
        if code == UsageError.exit_code:
            return UsageError(failures[first].cause, failures[first].trace)
        if code > 128:
            return Interrupted(self._asked or code - 128, failures[first].cause, failures[first].trace)
        lines = [f"rank {first} was at {standing}", failures[first].trace.rstrip()]
        lines += [f"followed by rank {i}, {self._ranks[i].mark.read()}: {failures[i].cause}" for i in order[1:]]
        return RankFailed(first, standing.step, failures[first].cause, "\n".join(filter(None, lines)), code)

    def _stalled(self, timeout_s: float) -> RankFailed:
        """Name the rank that is furthest behind, and say where each one stands."""
        waiting = {i: r.mark.read() for i, r in enumerate(self._ranks) if r.outcome is None}
        last = min(waiting, key=lambda i: waiting[i].order)
        self._signal(signal.SIGUSR1)
        time.sleep(SETTLE_S)
        lines = [f"rank {i}: {waiting.get(i, 'done')}" for i in range(len(self._ranks))]
        lines += [f"rank {i} stands in\n{self._ranks[i].stack().rstrip()}" for i in waiting]
        cause = f"no rank has moved for {timeout_s:g} s, this one is furthest behind"
        return RankFailed(last, waiting[last].step, cause, "\n".join(lines))

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.running:
                os.kill(rank.pid, number)

    def _gone(self, seconds: float) -> bool:
        """Wait until no child is left, at most so long."""
        limit, pause = time.monotonic() + seconds, 0.001
        while True:
            for rank in self._ranks:
                rank.reap()
            if not any(r.running for r in self._ranks):
                return True
            if time.monotonic() > limit:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def _open_meeting() -> tuple[IO[bytes], str]:
    """A file for the ranks to meet in and its path for them; on Linux it has no name that a kill could leave behind."""
    if sys.platform == "linux":
        file = os.fdopen(os.memfd_create("plait"), "wb")
        return file, f"/proc/self/fd/{file.fileno()}"
    named = tempfile.NamedTemporaryFile()  # noqa: SIM115  closed in end()
    return named, named.name


def _report(pipe: IO[bytes], run: Callable[[], Any]) -> None:
    """Run and send what came of it; an exception, or a value that cannot be pickled, is a Failure."""
    try:
        message = pickle.dumps(Success(run()))
    except BaseException as error:
        message = pickle.dumps(failure_of(error))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    pipe.write(_LENGTH.pack(len(message)) + message)


def _settle_child(parent: int, trace: IO[bytes]) -> None:
    """Make a fresh child one of ours: the parent decides on interrupts, and its death is the child's."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    gc.freeze()  # a collection that visits the parent's objects would copy every page of them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable(trace, all_threads=False)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT and SIGTERM go to the handler, but those that this process ignores; only the main thread can say so."""
    mine = threading.current_thread() is threading.main_thread()
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if mine and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until each child is in the books."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_unforkable() -> None:
    """A forked child has only one of its parent's threads, and no use of its CUDA context: refuse both."""
    hint = "launch before anything else starts them, from a fresh process"
    if torch.cuda.is_initialized():
        raise UsageError("cannot fork ranks: this process has initialised CUDA", hint)
    if dist.is_initialized():
        raise UsageError("cannot fork ranks: this process is itself a rank of a process group", hint)
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        raise UsageError(f"cannot fork ranks: {len(others)} other threads run here ({', '.join(others)})", hint)
    _dismiss_idle_workers()
    native = _native_threads()
    if native > 1:
        raise UsageError(f"cannot fork ranks: this process has {native} native threads, needs 1", hint)


def _dismiss_idle_workers() -> None:
    """End the pools that a tensor operation may have left: OpenMP's on request, OpenBLAS's by its own fork handler."""
    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as maps:
        for path in {line.split()[-1] for line in maps if "libgomp" in line}:
            library = ctypes.CDLL(path)
            if hasattr(library, "omp_pause_resource_all"):
                library.omp_pause_resource_all(1)  # omp_pause_soft
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _native_threads() -> int:
    """How many threads the system sees here, once those that were dismissed have had a moment to go."""
    tasks = "/proc/self/task"
    limit = time.monotonic() + 1.0
    while os.path.isdir(tasks) and (count := len(os.listdir(tasks))) > 1:
        if time.monotonic() > limit:
            return count
        time.sleep(0.001)
    return 1
