"""From [data] to samples: `open_data` joins the parts of this package and says in words what it found.

Deterministic, and the same on every rank; it prints nothing, the trainer shows `summary` and `notices`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait.data.bigram import bigram_score
from plait.data.build import open_cache, separator_of
from plait.data.documents import describe_source, list_files
from plait.data.samples import Samples
from plait.data.stream import Stream, open_token_files
from plait.data.synthetic import Synthetic
from plait.data.tokenizer import Tokenizer, load_tokenizer
from plait.data.windows import Windows
from plait.spec.errors import DataError
from plait.spec.run import DataSpec


@dataclass(frozen=True, eq=False)
class Data:
    """What a run reads. `validation` is None where nothing is held out; `tokenizer` and `vocab` are None where the ids
    are someone else's. `fingerprint` is equal on two ranks if and only if they found the same tokens."""

    train: Samples
    validation: Samples | None
    tokenizer: Tokenizer | None
    vocab: int | None
    fingerprint: str
    summary: str
    notices: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without a separator."""
        if self.tokenizer is None:
            raise DataError("no tokenizer is known for these tokens", "set data.tokenizer")
        return [int(i) for i in self.tokenizer.encode([text])[0]]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; without a tokenizer, the ids themselves."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(ids)

    def bigram(self) -> float | None:
        """The bigram table's validation loss (`bigram_score`); None without validation or beyond 1,024 tokens."""
        if self.validation is None or self.vocab is None or self.vocab > 1024:
            return None
        train, validation = self.train.source, self.validation.source
        if not isinstance(train, Windows) or not isinstance(validation, Windows):
            return None
        return bigram_score(train.stream, validation.stream, self.vocab)


def open_data(spec: DataSpec, sequence: int, seed: int, vocab: int | None = None) -> Data:
    """Open the data of a run: samples of `sequence` tokens (and their labels) in the order of `seed`.

    `vocab` is the model's; ids beyond it are refused. Builds the token cache if needed. Raises DataError (files,
    fields, too little data, a vocabulary too small) and MissingExtra.
    """
    return OPENERS.get(spec.source, _open_text)(spec, sequence, seed, vocab)


def _open_text(spec: DataSpec, sequence: int, seed: int, vocab: int | None) -> Data:
    tokenizer = load_tokenizer(spec.tokenizer)
    if vocab is not None and tokenizer.vocab > vocab:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab} tokens, model.vocab is {vocab}", f"set model.vocab={tokenizer.vocab}"
        )
    cached = open_cache(spec, tokenizer)
    parts = cached.manifest["parts"]
    train, validation, cut = _split(cached.train, cached.validation, spec.validation)
    lines = [f"data: {describe_source(spec)}", f"  tokens: {tokenizer.name}", f"  {_policy(spec, cached.manifest)}"]
    if cut:
        lines.append(
            f"  too few documents to hold some out: validation is the last {spec.validation:.1%} of the tokens"
        )
    held = "" if cut else f", {parts['validation']['documents']:,} of them held out"
    lines.append(f"  {parts['train']['documents'] + parts['validation']['documents']:,} documents{held}")
    data = _assemble(spec, sequence, seed, (train, validation))
    return Data(
        *data,
        tokenizer=tokenizer,
        vocab=tokenizer.vocab,
        fingerprint=f"{parts['train']['digest']}/{parts['validation']['digest']}",
        summary="\n".join([*lines, *_describe(data), f"  cache: {cached.folder}"]),
        notices=cached.notices,
    )


def _open_tokens(spec: DataSpec, sequence: int, seed: int, vocab: int | None) -> Data:
    tokenizer = None if spec.tokenizer is None else load_tokenizer(spec.tokenizer)
    separator = None if tokenizer is None else separator_of(spec, tokenizer)
    if spec.mask_documents and separator is None:
        raise DataError(
            "data.mask_documents needs to know which token ends a document",
            "set data.tokenizer, or mask_documents=false",
        )
    files = list_files(spec)
    stream = open_token_files(files, spec.token_dtype, separator, vocab)
    data = _assemble(spec, sequence, seed, _cut(stream, spec.validation))
    sizes = [(file.name, file.stat().st_size) for file in files]
    return Data(
        *data,
        tokenizer=tokenizer,
        vocab=vocab,
        fingerprint=hashlib.blake2b(repr((sizes, spec.token_dtype)).encode(), digest_size=16).hexdigest(),
        summary="\n".join([f"data: {describe_source(spec)}", "  tokens: as they stand in the files", *_describe(data)]),
    )


def _open_synthetic(spec: DataSpec, sequence: int, seed: int, vocab: int | None) -> Data:
    if vocab is None:
        raise DataError("synthetic data needs the model's vocabulary")
    train = Synthetic(vocab, sequence, seed, documents=spec.mask_documents)
    validation = Synthetic(vocab, sequence, seed + 1, documents=spec.mask_documents, size=64)
    return Data(
        Samples(train, seed, shuffle=False),
        Samples(validation, seed, shuffle=False, repeat=False) if spec.validation else None,
        tokenizer=None,
        vocab=vocab,
        fingerprint=f"synthetic {seed}",
        summary=f"data: random tokens below {vocab:,}, uneven label masks",
    )


OPENERS: dict[str, Callable[[DataSpec, int, int, int | None], Data]] = {
    "tokens": _open_tokens,
    "synthetic": _open_synthetic,
}


def _split(train: Stream, validation: Stream, fraction: float) -> tuple[Stream, Stream | None, bool]:
    """Training and validation streams; True if by tokens, since by documents one of them would be empty."""
    if fraction == 0:
        return train, None, False
    if len(train) and len(validation):
        return train, validation, False
    return *_cut(train if len(train) else validation, fraction), True


def _cut(stream: Stream, fraction: float) -> tuple[Stream, Stream | None]:
    """The last `fraction` of the tokens apart from the rest."""
    kept = len(stream) - round(len(stream) * fraction)
    return stream.part(0, kept), stream.part(kept, len(stream)) if fraction else None


def _assemble(
    spec: DataSpec, sequence: int, seed: int, streams: tuple[Stream, Stream | None]
) -> tuple[Samples, Samples | None]:
    """Samples over both streams: training endless, validation once."""
    train, validation = streams
    samples = Samples(Windows(train, sequence, spec.mask_documents, "train"), seed)
    if validation is None:
        return samples, None
    return samples, Samples(Windows(validation, sequence, spec.mask_documents, "validation"), seed, repeat=False)


def _policy(spec: DataSpec, manifest: dict[str, object]) -> str:
    """What stands between documents, in words."""
    seen = "documents do not see each other" if spec.mask_documents else "a sequence may run over several documents"
    if spec.separator == "none":
        return f"between documents: nothing; {seen}"
    return (
        f"between documents: one separator, none inside ({manifest['separators_removed']} removed); "
        f"the name of a special token in a text is plain text; {seen}"
    )


def _describe(data: tuple[Samples, Samples | None]) -> list[str]:
    lines = []
    for samples in data:
        if samples is not None and isinstance(windows := samples.source, Windows):
            lines.append(
                f"  {windows.name}: {len(windows.stream):,} tokens = {len(windows):,} windows of {windows.sequence:,} "
                f"and a tail of {windows.dropped:,} left out"
            )
    return lines
