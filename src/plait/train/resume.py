"""Where a run goes on: the newest checkpoint that all ranks can read, and what may have changed since it was written.

Reading is local and may fail on one rank alone; whether it succeeded is agreed by all, so that all go on or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plait.checkpoint.manifest import Facts
from plait.checkpoint.shelf import candidates, complete, newest, none_in
from plait.checkpoint.source import Source, refuse_mismatch
from plait.parallel.collectives import Group
from plait.spec.errors import BrokenCheckpoint, CheckpointMismatch, UsageError
from plait.spec.run import RunSpec
from plait.train.agree import agreed, told_by_first
from plait.train.huggingface import HuggingFace, is_huggingface
from plait.train.states import shapes_of, take_up, take_weights
from plait.train.step import Step

CHECKPOINTS = "checkpoints"  # in a run's directory
AUTO = "auto"

# What makes a run another one: the sections or keys that may change only where the command line says so.
FIXED = ("model.", "optim.", "batch.global_size", "batch.sequence", "data.mask_", "train.steps", "train.seed")
FREE = ("precision.",)  # told where it changes


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
    paths, notices = told_by_first(lambda: _look(run), group)
    return [Path(path) for path in paths], notices


def _look(run: RunSpec) -> tuple[list[str], list[str]]:
    resume, folder = run.train.resume, run.train.run_dir
    if resume == AUTO and folder is None:
        raise UsageError("train.resume: 'auto' looks into train.run_dir, which is not set", "set it")
    shelf = None if folder is None else Path(folder) / CHECKPOINTS
    if resume == AUTO:
        assert shelf is not None
        whole, notices = whole_in(shelf)
        return named(
            whole, [*notices, *([] if whole else [f"no checkpoint in {folder} yet: the run starts at its first step"])]
        )
    paths, notices = ([], []) if resume is None else _asked_for(Path(resume))
    if run.checkpoint.every and shelf is not None:
        _refuse_later(shelf, paths[0] if paths else None)
    return named(paths, notices)


def named(paths: list[Path], notices: list[str]) -> tuple[list[str], list[str]]:
    """What was found, as it can be told."""
    return [str(path.absolute()) for path in paths], notices


def _asked_for(place: Path) -> tuple[list[Path], list[str]]:
    """The checkpoint at a path, or the whole ones in it, the newest first."""
    found = candidates(place)
    if found == [place]:
        return found, []
    whole, notices = whole_in(place)
    if not whole:
        hint = "train.resume names a checkpoint, a run's directory, or 'auto'"
        raise UsageError("; ".join([f"train.resume: {none_in(place, found)}", *notices]), hint)
    return whole, notices


def _refuse_later(shelf: Path, start: Path | None) -> None:
    """Raise UsageError where what a run is going to save would stand among later steps of another one."""
    at = 0 if start is None else complete(start).facts.step
    later, _ = whole_in(shelf)
    if later and (step := complete(later[0]).facts.step) > at:
        raise UsageError(
            f"train.run_dir: {shelf} holds step {step}, and this run begins after step {at}",
            "train.resume=auto goes on after the newest; else name another directory, or remove the later ones",
        )


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

    def take() -> None:
        with _weights_in(folder, step.run) as source:
            take_weights(step, source.read)

    group = step.mesh.group("world")
    folder = Path(told_by_first(lambda: str(folder if is_huggingface(folder) else newest(folder).folder), group))
    agreed(take, group)
    step.states.publish()
    return f"weights from {folder}"


def _weights_in(folder: Path, run: RunSpec) -> HuggingFace | Source:
    if is_huggingface(folder):
        return HuggingFace(folder, run.model)
    manifest = complete(folder)
    refuse_mismatch(manifest, shapes_of(run), ())
    return Source(manifest)


def resume(step: Step, paths: list[Path], data: str, changes: frozenset[str] = frozenset()) -> Resumed:
    """Take up the first checkpoint of `paths` that every rank can read. Collective.

    `data` is the fingerprint of the tokens; `changes` are keys that the user changes on purpose. Raises
    BrokenCheckpoint, on all ranks, where none can be read, and CheckpointMismatch for one of another run.
    """
    notices: list[str] = []
    for path in paths:
        try:
            facts = agreed(partial(_take, step, path, data, changes), step.mesh.group("world"))
        except BrokenCheckpoint as error:
            notices.append(f"skipped {path}: {error.message}")
            last = error
            continue
        step.states.publish()
        notices += [f"goes on after step {facts.step}, from {path}", *_changed(facts, step.run, changes)]
        return Resumed(facts.step, tuple(notices))
    raise last


def _take(step: Step, path: Path, data: str, changes: frozenset[str]) -> Facts:
    """Read what this rank needs of a checkpoint."""
    manifest = complete(path)
    refuse_changes(manifest.facts, step.run, data, changes)
    with Source(manifest) as source:
        take_up(step, source)
    return manifest.facts


def refuse_changes(facts: Facts, run: RunSpec, data: str, changes: frozenset[str]) -> None:
    """Raise CheckpointMismatch where the run is another than that of a checkpoint, but for `changes`."""
    found = [text for key, text in _differences(facts, run, FIXED) if not _meant(key, changes)]
    if facts.data != data and not any(key.startswith("data.") for key in changes):
        found.append("data: the tokens are not those that it was trained on")
    if found:
        keys = " ".join(text.partition(":")[0] + "=…" for text in found)
        raise CheckpointMismatch(
            f"the run differs from that of the checkpoint of step {facts.step}: {'; '.join(found)}",
            f"give what is meant to change on the command line ({keys})",
        )


def _changed(facts: Facts, run: RunSpec, changes: frozenset[str]) -> list[str]:
    told = [text for key, text in _differences(facts, run, FIXED) if _meant(key, changes)]
    return [f"changed since: {text}" for text in (*told, *(text for _, text in _differences(facts, run, FREE)))]


def _differences(facts: Facts, run: RunSpec, sections: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(key, what it was and is) of each key of these sections that differs; one that either version lacks does not."""
    was, now = _flat(facts.run), _flat(run.model_dump(mode="json"))
    for key in dict.fromkeys((*was, *now)):
        if key.startswith(sections) and key in was and key in now and was[key] != now[key]:
            yield key, f"{key}: was {was[key]!r}, is {now[key]!r}"


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    """Values by their whole keys; a table has a value too, for there may be none in its place."""
    if not isinstance(table, dict):
        return {prefix: table}
    found: dict[str, Any] = {prefix: "a table"}
    for name, inner in table.items():
        found |= _flat(inner, f"{prefix}.{name}" if prefix else name)
    return found


def _meant(key: str, changes: frozenset[str]) -> bool:
    return any(change == key or change.startswith(f"{key}.") for change in changes)
