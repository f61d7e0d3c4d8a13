"""The judge of every proof: plain PyTorch on one device. Nothing of `parallel/` or `train/` is used here.

The model as it stands, torch's cross-entropy, autograd and SGD, the whole global batch in one forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.data import Batch, Samples, batch
from plait.models.decoder import Decoder, logical_tensors
from plait.models.dropout import step_key
from plait.models.init import initialise
from plait.models.layers import Terms
from plait.models.moe import denominators, settle
from plait.models.where import Where
from plait.spec.run import RunSpec


@dataclass
class Outcome:
    """What some steps of training computed: loss and raw gradient norm of each step, all gradients of the first, all
    weights after the last; tensors whole, by global name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference(run: RunSpec, samples: Samples, steps: int, device: torch.device | str = "cpu") -> Outcome:
    """`steps` steps of SGD from the run's seed, norm weights and biases drawn at random too."""
    torch.manual_seed(run.train.seed)
    model = Decoder(run.model, device, getattr(torch, run.precision.compute))
    initialise(model, run.train.seed, randomise=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.optim.lr)
    outcome = Outcome([], [], {}, {})
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss, terms = objective(model, batch(samples, step - 1, run.batch.global_size), step_key(run.train.seed, step))
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if step == 1:
            found = logical_tensors(run.model, gradients)
            outcome.gradients = {name: gradient.clone() for name, gradient in found.items()}
        outcome.losses.append(loss.item())
        outcome.norms.append(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item())
        if terms["count"] > 0:  # a batch without a label is no step
            optimizer.step()
            settle(model, terms)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    outcome.weights = {name: tensor.detach() for name, tensor in logical_tensors(run.model, held).items()}
    return outcome


def objective(model: Decoder, rows: Batch, key: int) -> tuple[Tensor, Terms]:
    """Σ token losses and z-losses / valid labels of these rows, 0 where there is no label, and each other auxiliary
    term over its own denominator; beside it, the terms."""
    device = next(model.parameters()).device
    rows = rows.to(device)
    indices = torch.arange(rows.tokens.shape[1], device=device)
    where = Where(rows.samples, indices, rows.positions, rows.documents, torch.tensor(key, device=device))
    _, terms = model(rows.tokens, where, rows.labels)
    loss: Tensor = (terms["loss"] + terms.get("z_loss", 0)) / terms["count"].clamp(min=1)
    for name, count in denominators(model.spec, *rows.tokens.shape).items():
        loss = loss + terms[name] / count
    return loss, terms
