"""What a run says when nothing is said, and what its values may be."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from plait.spec.base import Spec
from plait.spec.fit import fit
from plait.spec.keys import SECTIONS
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import BYTE_VOCAB, BatchSpec, LayoutSpec, OptimSpec, RunSpec, TrainSpec


def test_a_run_without_a_word_is_the_builtin_run_on_one_device_in_the_plain_way() -> None:
    run = RunSpec()
    assert run.model == PRESETS["builtin"] and run.model.vocab == BYTE_VOCAB == 257
    assert (run.data.source, run.schedule.name, run.zero.stage, run.recompute.mode) == ("builtin", "1f1b", 0, "none")
    assert (run.precision.compute, run.precision.grad_accumulate, run.precision.grad_reduce) == ("float32",) * 3
    assert fit(run).world == 1


def test_sections_stand_in_the_order_of_the_run_file() -> None:
    assert list(SECTIONS) == [
        *("model", "layout", "schedule", "batch", "zero", "precision", "recompute"),
        *("optim", "data", "train", "checkpoint"),
    ]


@pytest.mark.parametrize("spec", [RunSpec, ModelSpec, *SECTIONS.values()])
def test_every_spec_is_frozen_closed_and_strict(spec: type[Spec]) -> None:
    value = RunSpec() if spec is RunSpec else next(section for _, section in RunSpec() if isinstance(section, spec))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(value, next(iter(spec.model_fields)), None)
    with pytest.raises(ValidationError, match="Extra inputs"):
        spec.model_validate({**value.model_dump(), "surprise": 1})
    assert hash(value) == hash(spec.model_validate(value.model_dump()))


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        (LayoutSpec, {"tp": "8"}),
        (LayoutSpec, {"tp": 4.0}),
        (LayoutSpec, {"tp": True}),
        (LayoutSpec, {"tp": 0}),
        (LayoutSpec, {"order": "pp"}),
        (BatchSpec, {"micro_size": -1}),
        (OptimSpec, {"lr": float("nan")}),
        (OptimSpec, {"lr": float("inf")}),
        (OptimSpec, {"beta2": 1.0}),
        (OptimSpec, {"lr": "3e-4"}),
        (TrainSpec, {"seed": 2**31}),
        (TrainSpec, {"tensorboard": 1}),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_refused(spec: type[Spec], wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        spec.model_validate(wrong)


def test_bytes_have_the_vocabulary_that_the_tokenizer_of_bytes_has() -> None:
    tokenizer = pytest.importorskip("plait.data.tokenizer", reason="data/ needs torch", exc_type=ImportError)
    assert tokenizer.Bytes.vocab == BYTE_VOCAB
