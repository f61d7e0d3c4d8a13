"""The base of every spec: frozen, strict, and closed to unknown keys. It holds no field of its own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Frozen data. A wrong type or an unknown key is an error, never a guess (4.5 is no integer, "8" is no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
