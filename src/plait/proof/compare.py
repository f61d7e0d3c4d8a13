"""How far two outcomes are apart, and how far they may be. The tolerances stand here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from plait.proof.reference import Outcome
from plait.spec.run import RunSpec

TOLERANCE: Mapping[str, float] = {"float64": 1e-10, "float32": 1e-5}
SMALL = 1e-2  # a tensor's errors are measured against at least this share of the largest value of all tensors


@dataclass(frozen=True)
class Scalar:
    """A number on one device and on the layout."""

    one: float
    split: float
    error: float


@dataclass(frozen=True)
class Worst:
    """The tensor that differs most. `first` is the first, in the model's order, that is over the tolerance."""

    name: str
    error: float
    first: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "error": self.error}


@dataclass(frozen=True)
class Verdict:
    """The comparison of one run."""

    ok: bool
    layout: dict[str, Any]
    dtype: str
    run: dict[str, Any]
    loss: Scalar
    norm: Scalar
    gradients: Worst
    compared: int
    weights: Worst
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `plait verify`."""
        return {
            "ok": self.ok,
            "layout": self.layout,
            "dtype": self.dtype,
            "run": self.run,
            "loss": asdict(self.loss),
            "gradients": {"compared": self.compared, "worst": self.gradients.as_dict()},
            "norm": asdict(self.norm),
            "weights": {"steps": self.steps, "worst": self.weights.as_dict()},
        }

    @property
    def complaint(self) -> str:
        """What differs, in words; empty where nothing does."""
        limit = TOLERANCE[self.dtype]
        found = [
            f"{name} {scalar.split:.12g} on the layout, {scalar.one:.12g} on one device (error {scalar.error:.3g})"
            for name, scalar in (("loss", self.loss), ("gradient norm", self.norm))
            if not scalar.error <= limit
        ]
        found += [
            f"{name} first differ at {worst.first}, most at {worst.name} (error {worst.error:.3g})"
            for name, worst in (("gradients", self.gradients), (f"weights after {self.steps} steps", self.weights))
            if not worst.error <= limit
        ]
        return "; ".join(found)


def compare(run: RunSpec, layout: dict[str, Any], one: Outcome, split: Outcome) -> Verdict:
    """Judge `split` by `one`, by the measure of the promises: see `error`."""
    limit = TOLERANCE[run.precision.compute]
    loss, norm = _scalar(one.losses, split.losses), _scalar(one.norms, split.norms)
    gradients, weights = _worst(one.gradients, split.gradients, limit), _worst(one.weights, split.weights, limit)
    errors = (loss.error, norm.error, gradients.error, weights.error)
    return Verdict(
        ok=all(error <= limit for error in errors),
        layout=layout,
        dtype=run.precision.compute,
        run=run.model_dump(exclude_none=True),
        loss=loss,
        norm=norm,
        gradients=gradients,
        compared=len(one.gradients),
        weights=weights,
        steps=len(one.losses),
    )


def error(split: Tensor, one: Tensor, largest: float) -> float:
    """max|split - one| / max(max|one|, 1e-2 · largest |value| over all tensors); 0 where both are 0."""
    gap = (split - one).abs().max().item()
    if gap == 0:
        return 0.0
    scale = max(one.abs().max().item(), SMALL * largest)
    return gap / scale if scale else math.inf


def _scalar(one: list[float], split: list[float]) -> Scalar:
    """The step at which the two are furthest apart."""
    errors = [abs(b - a) / abs(a) if a else abs(b) for a, b in zip(one, split, strict=True)]
    step = max(range(len(errors)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
    return Scalar(one[step], split[step], errors[step])


def _worst(one: Mapping[str, Tensor], split: Mapping[str, Tensor], limit: float) -> Worst:
    assert one.keys() == split.keys(), f"tensors differ: {sorted(set(one) ^ set(split))}"
    largest = max(tensor.abs().max().item() for tensor in one.values())
    errors = {name: error(split[name].to(tensor), tensor, largest) for name, tensor in one.items()}
    errors = {name: math.inf if math.isnan(value) else value for name, value in errors.items()}
    name = max(errors, key=lambda n: errors[n])
    return Worst(name, errors[name], next((n for n, value in errors.items() if not value <= limit), None))
