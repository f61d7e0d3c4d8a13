"""plait: train transformer language models split along every axis, and prove that the split equals one device.

The public names are found on first use, so that `import plait` costs nothing and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.models.decoder import Decoder as Decoder
    from plait.parallel.mesh import Mesh as Mesh
    from plait.parallel.parallelize import parallelize as parallelize
    from plait.proof.verify import verify as verify
    from plait.schedule.actions import Schedule as Schedule
    from plait.spec.layout import Layout as Layout
    from plait.spec.load import load as load
    from plait.spec.run import RunSpec as RunSpec
    from plait.train.loop import steps as steps
    from plait.train.public import restore as restore
    from plait.train.public import save as save
    from plait.train.step import Step as Step

__version__ = "0.1.0"

# Name -> the module that defines it.
_HOMES = {
    "Decoder": "plait.models.decoder",
    "Layout": "plait.spec.layout",
    "Mesh": "plait.parallel.mesh",
    "RunSpec": "plait.spec.run",
    "Schedule": "plait.schedule.actions",
    "Step": "plait.train.step",
    "load": "plait.spec.load",
    "parallelize": "plait.parallel.parallelize",
    "restore": "plait.train.public",
    "save": "plait.train.public",
    "steps": "plait.train.loop",
    "verify": "plait.proof.verify",
}

__all__ = [
    "Decoder", "Layout", "Mesh", "RunSpec", "Schedule", "Step", "__version__",
    "load", "parallelize", "restore", "save", "steps", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
