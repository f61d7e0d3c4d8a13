"""Text to token ids and back: bytes, or any Hugging Face `tokenizer.json`.

A tokenizer here never adds a token of its own and never reads a special token out of a text: `encode` gives ordinary
tokens only, whatever the file's template or added tokens say. Where documents meet is decided in `build.py` alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.spec.errors import DataError, MissingExtra

Ids = NDArray[np.int64]

# What an end of document is called when no tokenizer_config.json beside the file says so.
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Aligned(NamedTuple):
    """Ids (n,) with the characters [start, stop) of the text that each stands for."""

    ids: Ids
    starts: Ids
    stops: Ids


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer. `separator` is the id that ends a document."""

    name: str
    vocab: int
    separator: int | None
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[Ids]: ...
    def align(self, text: str) -> Aligned: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Bytes:
    """Tokens 0..255 are the bytes of the UTF-8 text; 256 ends a document and cannot occur inside one."""

    name = "bytes, 256 ends a document"
    vocab = 257
    separator: int | None = 256
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encoded = [text.encode() for text in texts]
        whole = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int64)
        return [whole[start:stop] for start, stop in pairwise(accumulate(map(len, encoded), initial=0))]

    def align(self, text: str) -> Aligned:
        [ids] = self.encode([text])
        first_of_character = (ids & 0xC0) != 0x80  # all but UTF-8's continuation bytes
        starts = np.cumsum(first_of_character, dtype=np.int64) - 1
        return Aligned(ids, starts, starts + 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; each end of a document becomes a line `<end>`, a broken character the replacement character."""
        return b"".join(bytes([i]) if i < 256 else b"\n<end>\n" for i in ids).decode("utf-8", errors="replace")


class HuggingFace:
    """The tokenizer of a `tokenizer.json`; the end of a document is the `eos_token` of the `tokenizer_config.json`
    beside it, else an added token with a usual name, else unknown (None)."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtra(f"the tokenizer {path}", "hf") from error
        if not path.is_file():
            raise DataError(f"data.tokenizer: {path} is not a file", "give the path of a tokenizer.json")
        content = path.read_bytes()
        try:
            self._inner = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises the bare class
            raise DataError(f"data.tokenizer: {path} is not a Hugging Face tokenizer.json ({error})") from error
        self._inner.encode_special_tokens = True  # "</s>" within a text is four characters, not the end
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        end = self._end_of_document(path)
        self.separator = None if end is None else self._inner.token_to_id(end)
        self.name = f"{path}, {end or 'nothing'} ends a document"
        self.fingerprint = f"{hashlib.blake2b(content, digest_size=16).hexdigest()}/{self.separator}"

    def _end_of_document(self, path: Path) -> str | None:
        known = self._inner.get_vocab(with_added_tokens=True)
        config = path.with_name("tokenizer_config.json")
        names: list[object] = list(USUAL_ENDS)
        if config.is_file():
            stated = json.loads(config.read_text("utf-8")).get("eos_token")
            names.insert(0, stated.get("content") if isinstance(stated, dict) else stated)
        return next((name for name in names if isinstance(name, str) and name in known), None)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int64) for each in found]

    def align(self, text: str) -> Aligned:
        found = self._inner.encode(text, add_special_tokens=False)
        offsets = np.array(found.offsets, np.int64).reshape(-1, 2)
        return Aligned(np.array(found.ids, np.int64), offsets[:, 0], offsets[:, 1])

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`; None means bytes."""
    return Bytes() if path is None else HuggingFace(Path(path).expanduser())
