"""What one GPU can show of memory: every precision × recompute × ZeRO stage takes a step, and what it took is printed.

`pytest -m gpu -s tests/gpu/test_memory.py`, about two minutes. Ranks of the larger worlds share the GPUs there are, and
gloo moves their tensors, so that the order of work on CUDA's streams is tried where one GPU is all there is.
"""

from __future__ import annotations

import pytest
import torch

from plait.data import Samples, Synthetic, batch, rows_of
from plait.models.decoder import Decoder
from plait.parallel.launch import World, launch
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import parallelize
from plait.planner.seat import Seat
from plait.proof.verify import verify
from plait.spec.fit import fit
from plait.spec.load import load
from plait.spec.run import RunSpec
from plait.spec.units import format_bytes
from plait.train.step import Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

MODEL = "model.hidden=512 model.layers=8 model.heads=8 model.ffn=1408 model.vocab=8192 batch.sequence=512"


def one_step(world: World, run: RunSpec) -> tuple[float, dict[str, int], int, int]:
    """Loss; bytes of states by the formula; bytes allocated after the step and at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mesh = Mesh(fit(run, world.size), world.device)
    parallel = parallelize(Decoder(run.model), mesh, run)
    step = Step(run, mesh, parallel)
    samples = Samples(Synthetic(run.model.vocab, run.batch.sequence, 1), 1, shuffle=False)
    rows = rows_of(run.batch.global_size, mesh.at.dp, mesh.layout.dp)
    for number in (1, 2):
        sums = step.backward(number, batch(samples, number - 1, run.batch.global_size, rows))
        step.update(sums)
    formula = Seat(run, mesh.layout, world.rank).states()
    return sums.loss, formula, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_holds_the_states_of_its_formula(ranks: int, compute: str, recompute: str, zero: int) -> None:
    words = [*MODEL.split(), f"layout.dp={ranks}", f"zero.stage={zero}", f"recompute.mode={recompute}"]
    run = load(None, [*words, f"precision.compute={compute}", "precision.scale=64", "train.device=cuda-shared"])
    for rank, (loss, formula, held, peak) in enumerate(launch(ranks, one_step, run, device="cuda-shared")):
        states = sum(formula.values())
        print(
            f"\n{compute:>9} recompute {recompute:<9} ZeRO {zero} rank {rank} of {ranks}: loss {loss:.3f}  states "
            f"{format_bytes(states)} by formula, {format_bytes(held)} held after a step, {format_bytes(peak)} at most"
        )
        assert loss == loss and states * 0.95 <= held + 2**20


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["layout.dp=2", "layout.dp=2 layout.tp=2", "layout.dp=2 layout.pp=2"])
def test_shared_gpus_equal_one_device(layout: str, zero: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    verdict = verify(load(None, ["train.device=cuda-shared", f"zero.stage={zero}", *layout.split()]))
    assert verdict is not None and verdict.ok, verdict
