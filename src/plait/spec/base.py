"""The base of every spec: frozen, strict, and closed to unknown keys. It holds no field of its own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Frozen data. A wrong type or an unknown key is an error, never a guess ("8" is no number, nor is nan)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
