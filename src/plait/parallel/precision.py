"""Which dtype each number has, and the scale that keeps fp16 gradients from vanishing (Micikevicius et al. 2018).

What is split: nothing. Forward and backward: no collective of its own; whether a step overflowed is read off the
gradient norm, which the whole world sums anyway, so all ranks decide alike. Replaces no submodule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plait.spec.errors import TrainingStopped
from plait.spec.run import PrecisionSpec

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class Dtypes:
    """`compute` is that of weights in forward, activations and their gradients; `master` that of the optimizer's."""

    compute: torch.dtype
    master: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, precision: PrecisionSpec) -> Dtypes:
        """ "float32" means the wider of float32 and the compute dtype; every other name means itself."""
        compute = DTYPES[precision.compute]
        full = torch.promote_types(compute, torch.float32)
        meant = {name: full if name == "float32" else dtype for name, dtype in DTYPES.items()}
        return cls(compute, full, meant[precision.grad_accumulate], meant[precision.grad_reduce])

    def __str__(self) -> str:
        compute, master, accumulate, reduce = (
            str(dtype).removeprefix("torch.") for dtype in (self.compute, self.master, self.accumulate, self.reduce)
        )
        return (
            f"compute {compute}, master weights and moments {master}, "
            f"gradients accumulated in {accumulate} and reduced in {reduce}"
        )


class LossScale:
    """What the loss is multiplied by before backward, and gradients divided by after it. A power of two.

    It grows twofold after `growth_every` steps without an overflow, and halves once `hysteresis` steps of them have
    overflowed. Only fp16 needs one: every other dtype has the constant 1.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self.dynamic = precision.compute == "float16"
        self.value = precision.scale if self.dynamic else 1.0
        self.growth_every, self.hysteresis = precision.scale_growth_every, precision.scale_hysteresis
        self.floor = precision.scale_floor
        self.good_steps, self.patience = 0, self.hysteresis

    def overflowed(self, step: int) -> None:
        """A step was skipped. Raises TrainingStopped where the scale cannot fall any more."""
        self.good_steps = 0
        self.patience -= 1
        if self.patience > 0:
            return
        if self.value / 2 < self.floor:
            raise TrainingStopped(
                f"step {step}: gradients overflow fp16 at a loss scale of {self.value:g}, precision.scale_floor is "
                f"{self.floor:g}",
                "precision.compute=bfloat16 has the range of float32; a lower optim.lr often helps too",
            )
        self.value, self.patience = self.value / 2, self.hysteresis

    def succeeded(self) -> None:
        """A step was applied."""
        self.good_steps += 1
        if self.dynamic and self.good_steps == self.growth_every:
            self.value, self.good_steps, self.patience = self.value * 2, 0, self.hysteresis
