"""Small data whose right answer is known by hand: the toy batch of many tests, and makers of files and tokenizers."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from plait.data import Samples, Window
from plait.data.stream import Stream
from plait.spec.run import DataSpec


class Toy:
    """8 sequences of 16 tokens, id[i, j] = (7 i + 3 j^2 + j) mod vocab.

    `masked`: only the first 1, 3, 5, ..., 15 labels of the rows are valid, 64 in all; else 15 of each (the sixteenth
    token has none after it).
    """

    def __init__(self, vocab: int = 64, masked: bool = True) -> None:
        self.vocab, self.masked = vocab, masked

    def __len__(self) -> int:
        return 8

    def window(self, index: int) -> Window:
        j = np.arange(17)
        valid = 2 * index + 1 if self.masked else 15
        return Window((7 * index + 3 * j**2 + j) % self.vocab, j <= valid)


def toy_samples(vocab: int = 64, masked: bool = True) -> Samples:
    """The toy batch as every step's global batch of 8, in its own order."""
    return Samples(Toy(vocab, masked), seed=0, shuffle=False)


def stream_of(documents: Sequence[Sequence[int]]) -> Stream:
    """A stream in memory over these documents, without separators."""
    tokens = np.array([token for document in documents for token in document], np.int64)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return Stream((tokens,), 0, len(tokens), ends=ends)


def write_jsonl(path: Path, records: Iterable[object]) -> Path:
    """One JSON line per record; a plain string becomes {"text": string}."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"text": record} if isinstance(record, str) else record) + "\n")
    return path


def jsonl_spec(path: Path, cache: Path | None, **more: object) -> DataSpec:
    """[data] for one JSONL file with nothing held out, unless `more` says otherwise."""
    fields = {"source": "jsonl", "files": (str(path),), "cache": cache and str(cache), "validation": 0.0} | more
    return DataSpec.model_validate(fields)


def write_tokenizer(path: Path, end: str = "</s>", begin: str = "<s>", special: bool = True) -> Path:
    """A character-level tokenizer.json whose template puts `begin` before and `end` after every text."""
    from tokenizers import AddedToken, Tokenizer, models, processors

    characters = sorted(set("abcdefghijklmnopqrstuvwxyz </s>|_é"))
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    for name in dict.fromkeys([end, begin]):
        (inner.add_special_tokens if special else inner.add_tokens)([AddedToken(name, special=special)])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(t, inner.token_to_id(t)) for t in dict.fromkeys([begin, end])]
    )
    inner.save(str(path))
    return path
