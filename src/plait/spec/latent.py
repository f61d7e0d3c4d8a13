"""[model.latent]: multi-head latent attention as data (DeepSeek-V2, 2.1): keys and values from one small vector.

Sizes and tensors only. `model.head_dim` is then the size of a query and key, `kept + rotated`.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.spec.base import Spec
from plait.spec.errors import Violation


class Latent(Spec):
    """A token's keys and values of all heads come from a latent of `kv_rank`, its queries from one of `q_rank` (None:
    from the token itself).

    `kept` channels of a head's queries and keys are not rotated; `rotated` are, and those of the key are shared by all
    heads. A value has `value` channels. `interleaved`: rotated channels pair as (0, 1), (2, 3), …, else as halves.
    """

    q_rank: int | None = None
    kv_rank: int
    kept: int
    rotated: int
    value: int
    interleaved: bool = True


def latent_rows(latent: Latent, hidden: int, heads: int) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    """Rows of (name, shape, role, home) inside a block, the output projection left out."""
    size = latent.kept + latent.rotated

    def row(
        name: str, shape: tuple[int, ...], role: str, home: str | None = None
    ) -> tuple[str, tuple[int, ...], str, str]:
        return f"attention.{name}.weight", shape, role, f"attention.{home or name}.weight"

    if latent.q_rank is None:
        yield row("q", (heads * size, hidden), "q")
    else:
        yield row("q_down", (latent.q_rank, hidden), "latent")
        yield row("q_latent_norm", (latent.q_rank,), "norm")
        yield row("q_up", (heads * size, latent.q_rank), "q", "q")
    yield row("kv_down", (latent.kv_rank, hidden), "latent", "kv_down")
    yield row("k_rotated", (latent.rotated, hidden), "latent", "kv_down")
    yield row("kv_latent_norm", (latent.kv_rank,), "norm")
    yield row("kv", (heads * (latent.kept + latent.value), latent.kv_rank), "kv")


def latent_violations(latent: Latent, heads: int, kv_heads: int, head_dim: int) -> list[Violation]:
    """Every reason why this attention cannot be built."""
    found = [
        Violation(f"model.latent.{name}", f"is {value}, but at least 1 is needed", "use 1 or more")
        for name in ("q_rank", "kv_rank", "kept", "rotated", "value")
        if (value := getattr(latent, name)) is not None and value < 1
    ]
    if latent.rotated % 2:
        problem = f"rotary positions pair channels, and {latent.rotated} is odd"
        found.append(Violation("model.latent.rotated", problem, f"use {latent.rotated + 1}"))
    if head_dim != latent.kept + latent.rotated:
        problem = f"is {head_dim}, where kept {latent.kept} + rotated {latent.rotated} = {latent.kept + latent.rotated}"
        found.append(Violation("model.head_dim", problem, "leave it out"))
    if kv_heads != heads:
        found.append(Violation("model.kv_heads", f"is {kv_heads}, where latents give all {heads} heads their own"))
    return found
