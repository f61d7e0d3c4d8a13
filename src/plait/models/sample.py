"""Text from a whole model on one device, a token at a time: what a run shows of itself, not a server.

Each token costs one forward pass over the last `max_sequence` tokens; nothing is cached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.models.decoder import Decoder
from plait.models.where import Where


@torch.no_grad()
def sample(
    model: Decoder, prompt: Tensor, count: int, temperature: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Continue each row of `prompt` (B, P) by `count` tokens -> (B, P + count). Temperature 0 takes the likeliest.

    Leaves the model in the mode it was in.
    """
    was_training = model.training
    model.eval()
    tokens = prompt
    for _ in range(count):
        seen = tokens[:, -model.spec.max_sequence :]
        where = Where.of(torch.arange(seen.shape[0], device=seen.device), seen.shape[1])
        logits = model.logits(seen, where)[:, -1].float()
        tokens = torch.cat((tokens, _choose(logits, temperature, generator)), dim=1)
    model.train(was_training)
    return tokens


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
