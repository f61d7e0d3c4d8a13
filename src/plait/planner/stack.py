"""What the program that trains does, as data: one TOML file per stack, beside what the machine can do.

The spread between programs on one machine is larger than the spread inside one, so a prediction names its stack. A
profile says habits (what is fused, what overlaps, what is kept in which dtype), never a measured time.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict

from plait.spec.base import Spec
from plait.spec.errors import UsageError
from plait.spec.nearest import did_you_mean

STACKS = Path(__file__).parent / "stacks"
Names = Annotated[tuple[str, ...], Strict(False)]


class Stack(Spec):
    """One program. Bytes are per element of a weight or of a saved activation."""

    name: str
    says: str  # where its habits are written down
    attention: Literal["unfused", "flash-1", "flash-2", "native"] = "native"  # native: written for the device at hand
    fused_norm: bool = True  # norms, rotary, activation and residual each in one kernel
    grad_bytes: int = 4
    reduce_bytes: int = 4
    gather_bytes: int = 2  # of weights that ZeRO 1 sends back after the update, or ZeRO 3 before use
    bucket: int = 0  # elements from which on a buffer is reduced, below ZeRO 3; 0: all at once
    zero: int = Field(1, ge=0, le=3)  # where nothing is said
    overlap_dp: bool = True  # reductions beside the backward pass, gathers beside the forward pass
    overlap_tp: bool = False  # tensor-parallel collectives in pieces beside their products
    overlap_ep: bool = False
    once_per_node: bool = False  # a token travels once to a node, however many of its experts are there
    expert_passes: float = 5.0  # times that a dispatched token is read or written beside the experts' products
    graphs: Names = ()  # device families on which recorded graphs start the kernels and the host waits for no counts
    overlap_pp: bool = True
    scatter_messages: bool = True  # to the next stage each tensor-parallel rank sends its part only
    scatter_gradients: bool = True  # and back
    accumulate_bytes: float = 0.0  # per weight and micro-batch, of adding its gradient up in a pass of its own
    sequence_parallel: bool = True  # where tp > 1 and nothing is said
    layers_per_chunk: int = 0  # interleaved stages of about so many layers where nothing is said; 0: not interleaved
    recompute: Literal["none", "selective", "full"] = "none"  # where nothing is said
    least_recompute: bool = False  # or else the least that fits
    recompute_blocks: bool = False  # and of full recompute only as many blocks as must be
    schedules: Names = ("1f1b", "interleaved")
    orders: Names = ("pp dp cp tp",)
    refuses: Names = ()  # what it cannot do: names of Refusal in search.py
    logit_bytes: float = 8.0  # per logit at the peak: the values, their float32 copy, their gradient
    wgrad_bytes: float = 4.0  # of a block's largest weight gradient before it is added to the buffer
    fp8_copies: float = 0.0  # further bytes of a weight that is kept in 8 bits too
    weight_is_master: bool = False  # under ZeRO 3 the shard is the float32 master; 16 bits exist gathered only
    context: float = 1.5e9  # bytes of the driver's context and of the communicators
    fragments: float = 0.06  # of what is allocated, reserved beyond it


def known_stacks() -> list[str]:
    """The names of the profiles."""
    return sorted(path.stem for path in STACKS.glob("*.toml"))


@lru_cache(maxsize=32)
def load_stack(name: str) -> Stack:
    """The profile of that name. Raises UsageError for a name that is unknown."""
    if name not in known_stacks():
        near = did_you_mean(name, known_stacks()) or "known: " + ", ".join(known_stacks())
        raise UsageError(f"stack {name!r} is unknown", near)
    return Stack.model_validate(tomllib.loads((STACKS / f"{name}.toml").read_text(encoding="utf-8")))
