"""`verify(run)`: run some steps on a layout, run them on one device, and say whether they are the same.

The layout's ranks are forked here (or are those of the torchrun job that is there); rank 0 also runs the reference,
after the others' work is gathered, so that the warm parent process never computes.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.data import Samples, Synthetic, batch, rows_of
from plait.models.decoder import Decoder
from plait.models.init import draw
from plait.parallel.launch import launch
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import parallelize
from plait.parallel.weights import gather_buffers, gather_whole, pieces_held
from plait.parallel.world import World, joined_world, run_here
from plait.proof.compare import Verdict, compare
from plait.proof.reference import Outcome, reference
from plait.proof.shrink import shrink
from plait.spec.fit import fit
from plait.spec.run import DataSpec, OptimSpec, RunSpec
from plait.train.step import Step

STEPS = 3
LEARNING_RATE = 0.1
Plant = Callable[[], None]  # breaks something on purpose, to prove the proof


def verify(run: RunSpec, dtype: str = "float64", full: bool = False) -> Verdict | None:
    """Compare the run's layout with one device over 3 steps of SGD, on a shrunk model unless `full`.

    Ranks are forked on this machine, on its CPU unless the run asks for CUDA; under torchrun this process is one of
    them, and all but rank 0 get None. Raises InvalidRun for a run that cannot be, RankFailed where a rank fails.
    """
    world = joined_world(_device(run))
    layout = fit(
        proof_run(run, dtype), world.size if world else None
    )  # the whole run must be legal, not only a likeness
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"dp": layout.dp})})
    run = proof_run(run if full else shrink(run), dtype)
    if world is not None:
        return run_here(world, _on_rank, run, samples_of(run), None)
    return check(run, samples_of(run), timeout_s=None if full else 120)


def check(run: RunSpec, samples: Samples, plant: Plant | None = None, timeout_s: float | None = 120) -> Verdict:
    """The comparison of a run that is ready for proof (see `proof_run`), on forked ranks."""
    world, device = fit(run).world, _device(run)
    verdicts = launch(world, _on_rank, run, samples, plant, device=device, threads=1, timeout_s=timeout_s)
    assert verdicts[0] is not None
    return verdicts[0]


def proof_run(run: RunSpec, dtype: str) -> RunSpec:
    """The run with everything that hides constant factors taken out: plain SGD, no clipping, one dtype, random data."""
    precision = run.precision.model_copy(update={"compute": dtype, "grad_accumulate": dtype, "grad_reduce": dtype})
    optim = OptimSpec(name="sgd", lr=LEARNING_RATE, schedule="constant", warmup=0, clip=0.0, weight_decay=0.0)
    data = DataSpec(source="synthetic", mask_documents=run.data.mask_documents)
    return run.model_copy(update={"precision": precision, "optim": optim, "data": data})


def samples_of(run: RunSpec) -> Samples:
    """Random tokens with uneven label masks, the same on every layout."""
    seed = run.train.seed
    documents = run.data.mask_documents
    return Samples(Synthetic(run.model.vocab, run.batch.sequence, seed, documents=documents), seed, shuffle=False)


def _on_rank(world: World, run: RunSpec, samples: Samples, plant: Plant | None) -> Verdict | None:
    layout = fit(run, world.size, node=world.local_size)
    if plant is not None:
        plant()
    mesh = Mesh(layout, world.device)
    split = _split(world, run, mesh, samples)
    if world.rank > 0:
        return None
    world.progress(STEPS, "reference")
    one = reference(run, samples, STEPS, world.device)
    return compare(run, layout.model_dump(), one, split)


def _split(world: World, run: RunSpec, mesh: Mesh, samples: Samples) -> Outcome:
    """The steps on the layout; whole tensors on rank 0."""
    seed = run.train.seed
    parallel = parallelize(Decoder(run.model), mesh, run, lambda t, r: draw(t, run.model, seed, r, randomise=True))
    step = Step(run, mesh, parallel)
    rows = rows_of(run.batch.global_size, mesh.at.dp, mesh.layout.dp)
    outcome = Outcome([], [], {}, {})
    for number in range(1, STEPS + 1):
        world.progress(number, "proof")
        sums = step.backward(number, batch(samples, number - 1, run.batch.global_size, rows))
        if number == 1:
            owned = pieces_held(parallel.placements, sharded=run.zero.stage > 0)
            outcome.gradients = gather_whole(parallel.states.gradients(), owned, mesh)
        outcome.losses.append(sums.loss + sum(sums.auxiliary.values()))
        outcome.norms.append(sums.norm)
        step.update(sums)
    owned = pieces_held(parallel.placements, sharded=run.zero.stage == 3)
    outcome.weights = gather_whole(parallel.states.weights(), owned, mesh)
    outcome.weights |= gather_buffers(parallel.buffers, parallel.placements, mesh)
    return outcome


def _device(run: RunSpec) -> str:
    """A proof needs as many ranks as the layout has, GPUs or not."""
    return "cpu" if run.train.device == "auto" else run.train.device
