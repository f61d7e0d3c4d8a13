"""Where a run goes on: the newest checkpoint that all ranks can read, and what may have changed since it was written.

Reading is local and may fail on one rank alone; whether it succeeded is agreed by all, so that all go on or none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.manifest import Facts
from plait.checkpoint.shelf import candidates, complete, newest, none_in
from plait.checkpoint.source import Source, refuse_mismatch
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.spec.errors import BrokenCheckpoint, CheckpointMismatch, PlaitError, UsageError
from plait.spec.run import RunSpec
from plait.train.huggingface import HuggingFace, is_huggingface
from plait.train.states import shapes_of, take_up, take_weights
from plait.train.step import Step

CHECKPOINTS = "checkpoints"  # in a run's directory
AUTO = "auto"

# What makes a run another one: the sections or keys that may change only where the command line says so.
FIXED = ("model", "optim", "batch.sequence", "data.mask_documents", "data.mask_field", "train.steps", "train.seed")
NEVER = ("batch.global_size",)  # samples are counted in global batches


@dataclass(frozen=True)
class Start:
    """How a run begins: with these weights, if no checkpoint of its own is there; and which keys may differ from it."""

    weights: Path | None = None
    changes: frozenset[str] = frozenset()


ANEW = Start()


@dataclass(frozen=True)
class Resumed:
    """What a run found: the step after which it goes on, and what is to be told."""

    step: int
    notices: tuple[str, ...]


def places(run: RunSpec, group: Group) -> tuple[list[Path], list[str]]:
    """The checkpoints that `train.resume` means, the newest first, and why others were skipped: as rank 0 sees them."""
    if run.train.resume is None:
        return [], []
    return told_by_first(lambda: _look(run), group)


def told_by_first(look: Callable[[], tuple[list[Path], list[str]]], group: Group) -> tuple[list[Path], list[str]]:
    """What rank 0 finds, on every rank; its UsageError too. Collective."""
    mine: dict[str, Any] = {}
    if group.rank == 0:
        try:
            paths, notices = look()
            mine = {"paths": [str(path.absolute()) for path in paths], "notices": notices}
        except UsageError as error:
            mine = {"error": error.message, "hint": error.hint}
    found = json.loads(comm.gather_bytes(json.dumps(mine).encode(), group)[0])
    if "error" in found:
        raise UsageError(found["error"], found["hint"])
    return [Path(path) for path in found["paths"]], found["notices"]


def _look(run: RunSpec) -> tuple[list[Path], list[str]]:
    resume, folder = run.train.resume, run.train.run_dir
    assert resume is not None
    if resume != AUTO:
        paths = candidates(Path(resume))
        if not paths:
            hint = "train.resume names a checkpoint, a run's directory, or 'auto'"
            raise UsageError(f"train.resume: {none_in(Path(resume))}", hint)
        return paths[:1], []
    if folder is None:
        raise UsageError("train.resume: 'auto' looks into train.run_dir, which is not set", "set it")
    whole, notices = whole_in(Path(folder) / CHECKPOINTS)
    if not whole:
        notices.append(f"no checkpoint in {folder} yet: the run starts at its first step")
    return whole, notices


def whole_in(place: Path) -> tuple[list[Path], list[str]]:
    """The complete checkpoints that a path means, the newest first, and why others are skipped."""
    whole, notices = [], []
    for path in candidates(place):
        try:
            complete(path)
            whole.append(path)
        except BrokenCheckpoint as error:
            notices.append(f"skipped {path}: {error.message}")
    return whole, notices


def begin(step: Step, folder: Path) -> str:
    """Take the weights of a Hugging Face directory or a checkpoint, and nothing else. Collective."""
    problem: dict[str, Any] | None = None
    try:
        with _weights_in(folder, step.run) as source:
            take_weights(step, source.read)
    except PlaitError as error:
        problem = {"usage": isinstance(error, UsageError), "message": error.message, "hint": error.hint}
    told = _first(problem, step.mesh.group("world"))
    if told is not None:
        raise (UsageError if told["usage"] else PlaitError)(told["message"], told["hint"])
    step.states.publish()
    return f"weights from {folder}"


def _weights_in(folder: Path, run: RunSpec) -> HuggingFace | Source:
    if is_huggingface(folder):
        return HuggingFace(folder, run.model)
    manifest = newest(folder)
    refuse_mismatch(manifest, shapes_of(run), ())
    return Source(manifest)


def _first(mine: dict[str, Any] | None, group: Group) -> dict[str, Any] | None:
    """The first problem of any rank, on every rank."""
    told = [json.loads(text) for text in comm.gather_bytes(json.dumps(mine).encode(), group)]
    return next((found for found in told if found), None)


def resume(step: Step, paths: list[Path], data: str, changes: frozenset[str] = frozenset()) -> Resumed:
    """Take up the first checkpoint of `paths` that every rank can read. Collective.

    `data` is the fingerprint of the tokens; `changes` are keys that the user changes on purpose. Raises
    BrokenCheckpoint, on all ranks, where none can be read, and CheckpointMismatch for one of another run.
    """
    notices: list[str] = []
    group = step.mesh.group("world")
    for path in paths:
        facts, problem = _try(step, path, data, changes)
        problem = _first(problem, group)
        if problem is None:
            assert facts is not None
            step.states.publish()
            notices += [f"goes on after step {facts.step}, from {path}", *_changed(facts, step.run, changes)]
            return Resumed(facts.step, tuple(notices))
        if problem["usage"]:
            raise CheckpointMismatch(problem["message"], problem["hint"])
        notices.append(f"skipped {path}: {problem['message']}")
        last = BrokenCheckpoint(Path(problem["path"]), problem["reason"])
    raise last


def _try(step: Step, path: Path, data: str, changes: frozenset[str]) -> tuple[Facts | None, dict[str, Any] | None]:
    """Read what this rank needs of a checkpoint; what kept it from that."""
    try:
        manifest = complete(path)
        refuse_changes(manifest.facts, step.run, data, changes)
        with Source(manifest) as source:
            take_up(step, source)
        return manifest.facts, None
    except BrokenCheckpoint as error:
        return None, {"usage": False, "message": error.message, "path": str(error.path), "reason": error.reason}
    except UsageError as error:
        return None, {"usage": True, "message": error.message, "hint": error.hint}


def refuse_changes(facts: Facts, run: RunSpec, data: str, changes: frozenset[str]) -> None:
    """Raise CheckpointMismatch where the run is another than that of a checkpoint, but for `changes`."""
    found = [text for key, text in _differences(facts, run) if key in NEVER or key not in changes]
    if facts.data != data and not any(key.startswith("data.") for key in changes):
        found.append("data: the tokens are not those that it was trained on")
    if found:
        keys = " ".join(text.partition(":")[0] + "=…" for text in found)
        raise CheckpointMismatch(
            f"the run differs from that of the checkpoint of step {facts.step}: {'; '.join(found)}",
            f"give what is meant to change on the command line ({keys}); batch.global_size cannot change",
        )


def _changed(facts: Facts, run: RunSpec, changes: frozenset[str]) -> list[str]:
    return [f"changed since: {text}" for key, text in _differences(facts, run) if key in changes]


def _differences(facts: Facts, run: RunSpec) -> Iterator[tuple[str, str]]:
    """(key, what it was and is) of each fixed key that differs."""
    now = _flat(run.model_dump(mode="json"))
    for key, was in _flat(facts.run).items():
        if key.startswith((*FIXED, *NEVER)) and key in now and now[key] != was:
            yield key, f"{key}: was {was!r}, is {now[key]!r}"


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    return {
        key: value
        for name, inner in table.items()
        for key, value in _flat(inner, f"{prefix}.{name}" if prefix else name).items()
    }
