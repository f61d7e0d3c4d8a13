"""Which tokens of a sequence each context rank holds, and how many query-key pairs that makes it work for. No torch.

Contiguous order gives ring rank r the r-th part of the sequence: under a causal mask the last rank has almost all the
work. Zigzag order deals chunks out to and fro, 0 1 2 … 2 1 0, so that two chunks of each rank are as far from both
ends as any other's and every step of a ring is even (Zhu 2024, zigzag ring attention). Dealing more than one round
makes rows of many documents even too. Inside a ring rank, Ulysses ranks hold consecutive parts of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from plait.spec.layout import Layout
from plait.spec.run import RunSpec

Runs = tuple[tuple[int, int], ...]  # (start, stop) of tokens that follow each other, in rising order
SMALLEST_CHUNK = 32  # tokens: where rows hold documents, chunks are as small as that


def ring_chunks(run: RunSpec) -> int:
    """Chunks of a ring rank: 1 in contiguous order, else 2; more where documents make a row uneven."""
    ring, sequence = run.layout.cp // run.layout.ulysses, run.batch.sequence
    if run.layout.context_order == "contiguous" or ring == 1:
        return 1
    chunks = 2
    while run.data.mask_documents and sequence % (2 * chunks * ring) == 0:
        if sequence // (2 * chunks * ring) < SMALLEST_CHUNK:
            break
        chunks *= 2
    return chunks


def ring_runs(sequence: int, ring: int, chunks: int) -> tuple[Runs, ...]:
    """The tokens of each ring rank, `chunks` of equal size: 1, or an even number dealt out to and fro."""
    parts = chunks * ring
    assert sequence % parts == 0, f"{parts} chunks of {sequence} tokens"
    size = sequence // parts
    found: list[list[tuple[int, int]]] = [[] for _ in range(ring)]
    for chunk in range(parts):
        turn, place = divmod(chunk, ring)
        rank = place if turn % 2 == 0 else ring - 1 - place
        _append(found[rank], (chunk * size, (chunk + 1) * size))
    return tuple(tuple(runs) for runs in found)


def context_runs(run: RunSpec, layout: Layout, cp: int) -> Runs:
    """The tokens of context rank `cp`: its Ulysses part of its ring rank's."""
    ring, part = divmod(cp, layout.ulysses)
    runs = ring_runs(run.batch.sequence, layout.cp // layout.ulysses, ring_chunks(run))[ring]
    size = sum(stop - start for start, stop in runs) // layout.ulysses
    return _between(runs, part * size, (part + 1) * size)


def tokens_in(runs: Runs) -> list[int]:
    """The tokens one by one."""
    return [token for start, stop in runs for token in range(start, stop)]


def ring_pairs(
    runs: Sequence[Runs], window: int | None = None, documents: Sequence[int] | None = None
) -> list[list[int]]:
    """[step][rank]: query-key pairs that a ring rank works for in each step, where it holds rank - step's keys.

    `documents` numbers the document of each token of the row; None: the row is one document.
    """
    seen = _keys_seen_from(runs, window, documents)
    ring = len(runs)
    return [[_pairs(runs[rank], runs[(rank - step) % ring], seen) for rank in range(ring)] for step in range(ring)]


def imbalance(pairs: Sequence[Sequence[int]]) -> float:
    """The most loaded rank over the mean, of the step where that is worst; steps without any pair are no work."""
    return max((max(step) * len(step) / sum(step) for step in pairs if sum(step)), default=1.0)


def _keys_seen_from(runs: Sequence[Runs], window: int | None, documents: Sequence[int] | None) -> list[int]:
    """The first key that each query sees; it sees all from there to itself."""
    length = sum(stop - start for rank in runs for start, stop in rank)
    numbers = documents or [0] * length
    begins = list(accumulate(range(1, length), lambda b, t: t if numbers[t] != numbers[t - 1] else b, initial=0))
    return [max(begin, 0 if window is None else query - window + 1) for query, begin in enumerate(begins)]


def _pairs(queries: Runs, keys: Runs, first: Sequence[int]) -> int:
    return sum(max(0, min(q + 1, stop) - max(first[q], start)) for q in tokens_in(queries) for start, stop in keys)


def _append(runs: list[tuple[int, int]], chunk: tuple[int, int]) -> None:
    """Put a chunk at the end, as one run with the last where that ends at its beginning."""
    if runs and runs[-1][1] == chunk[0]:
        runs[-1] = (runs[-1][0], chunk[1])
    else:
        runs.append(chunk)


def _between(runs: Runs, first: int, last: int) -> Runs:
    """Places first … last - 1 of runs laid end to end."""
    found, offset = [], 0
    for start, stop in runs:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            found.append((start + low, start + high))
        offset += stop - start
    return tuple(found)
