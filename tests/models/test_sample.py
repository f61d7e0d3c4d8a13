"""Sampling continues a prompt with what the model holds likely."""

from __future__ import annotations

import torch

from plait.models.decoder import Decoder
from plait.models.init import initialise
from plait.models.sample import sample
from plait.models.where import Where
from plait.spec.presets import PRESETS


def model() -> Decoder:
    decoder = Decoder(PRESETS["llama-tiny"].model_copy(update={"max_sequence": 12, "dropout": 0.5}), "cpu")
    initialise(decoder, 1, randomise=True)
    return decoder


def test_greedy_sampling_takes_the_likeliest_token_each_time() -> None:
    decoder = model().eval()
    tokens = sample(decoder, torch.tensor([[1, 2, 3], [4, 5, 6]]), count=6)
    logits = decoder.logits(tokens, Where.of(torch.arange(2), 9))
    assert torch.equal(tokens[:, :3], torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert torch.equal(tokens[:, 3:], logits[:, 2:-1].argmax(-1))


def test_sampling_goes_on_beyond_the_context_and_leaves_the_mode_alone() -> None:
    decoder = model()
    assert sample(decoder, torch.ones(1, 10, dtype=torch.int64), count=8).shape == (1, 18)
    assert decoder.training
    assert torch.equal(*(sample(decoder, torch.ones(1, 2, dtype=torch.int64), count=4) for _ in range(2)))


def test_temperature_draws_from_the_model_s_distribution() -> None:
    decoder = model().eval()
    prompt = torch.tensor([[7, 8]]).expand(4000, 2)
    drawn = sample(decoder, prompt, 1, temperature=2.0, generator=torch.Generator().manual_seed(0))[:, -1]
    expected = (decoder.logits(prompt[:1], Where.of(torch.arange(1), 2))[0, -1] / 2.0).softmax(-1)
    assert (drawn.bincount(minlength=64) / 4000 - expected).abs().max() < 0.03
