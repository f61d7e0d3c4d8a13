"""Where documents meet: one separator per boundary, whatever the tokenizer and the texts bring along."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from plait.data import open_data
from plait.data.build import open_cache
from plait.data.tokenizer import Bytes, HuggingFace, load_tokenizer
from plait.spec.errors import DataError, MissingExtra
from tests.data.fixtures import jsonl_spec, write_jsonl, write_tokenizer

TEXTS = ["a", "b", "x</s>y", "</s>", "<s>a</s>", "", "é<|endoftext|>"]


@pytest.mark.parametrize(("begin", "end"), [("<s>", "</s>"), ("</s>", "</s>")], ids=["bos", "bos-is-eos"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
def test_separators_count_the_documents(tmp_path: Path, begin: str, end: str, special: bool) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json", end, begin, special)))
    cached = open_cache(jsonl_spec(write_jsonl(tmp_path / "x.jsonl", TEXTS), tmp_path / "cache"), tokenizer)
    tokens = cached.train.tokens(0, len(cached.train))
    assert np.count_nonzero(tokens == tokenizer.separator) == len(TEXTS)
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.separator) + 1)[:-1]
    assert all(document[-1] == tokenizer.separator for document in documents)
    decoded = [tokenizer.decode(document[:-1].tolist()).replace(" ", "") for document in documents]
    assert decoded[:2] == ["a", "b"]
    if special:  # a special token in a text is kept as the characters it is written with
        assert decoded[2:5] == ["x</s>y", "</s>", "<s>a</s>"]
        assert cached.manifest["separators_removed"] == 0
    else:  # an added token that is not special is read from the text, and removed where it would end a document
        assert cached.manifest["separators_removed"] == 3


def test_byte_separators_count_the_documents(tmp_path: Path) -> None:
    data = open_data(jsonl_spec(write_jsonl(tmp_path / "x.jsonl", TEXTS), tmp_path / "cache"), 4, 0)
    stream = data.train.source.stream  # type: ignore[attr-defined]
    tokens = stream.tokens(0, len(stream))
    assert np.count_nonzero(tokens == 256) == len(TEXTS) and tokens[-1] == 256
    assert data.decode(tokens.tolist()).split("\n<end>\n") == [*TEXTS, ""]
    assert "one separator, none inside (0 removed)" in data.summary


def test_separator_none_puts_nothing_between_documents(tmp_path: Path) -> None:
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", ["ab", "", "cd"]), tmp_path / "cache", separator="none")
    stream = open_cache(spec, Bytes()).train
    assert bytes(stream.tokens(0, len(stream)).tolist()) == b"abcd"
    assert stream.beginnings(0, 4).tolist() == [True, False, True, False]


def test_long_documents_are_not_truncated_by_what_the_tokenizer_file_asks_for(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        **{"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": " "},
    }
    file.write_text(json.dumps(content))
    assert [len(ids) for ids in HuggingFace(file).encode(["a" * 1000, "b"])] == [1000, 1]


def test_the_stated_end_of_a_document_comes_before_the_usual_names(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json", end="</s>", begin="<stop>")
    assert HuggingFace(file).name.endswith("</s> ends a document")
    for stated in ("<stop>", {"content": "<stop>", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        assert HuggingFace(file).name.endswith("<stop> ends a document")


def test_an_unknown_end_of_a_document_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json", end="<stop>", begin="<go>")
    jsonl = write_jsonl(tmp_path / "x.jsonl", ["abcdefgh"])
    with pytest.raises(DataError, match="no token is known that ends a document") as refused:
        open_data(jsonl_spec(jsonl, tmp_path / "c", tokenizer=str(file)), 4, 0)
    assert "separator='none'" in refused.value.hint
    open_data(jsonl_spec(jsonl, tmp_path / "c", tokenizer=str(file), separator="none"), 4, 0)


def test_a_vocabulary_larger_than_the_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", ["abcdefgh"]), tmp_path / "c")
    with pytest.raises(DataError, match=r"257 tokens, model\.vocab is 256"):
        open_data(spec, 4, 0, vocab=256)


def test_what_is_no_tokenizer_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    for path, complaint in ((tmp_path / "tokenizer.json", "not a Hugging Face"), (tmp_path, "is not a file")):
        with pytest.raises(DataError, match=complaint):
            load_tokenizer(str(path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"plait\[hf\]"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["bytes", "tokenizer"])
def test_text_comes_back_from_its_tokens(tmp_path: Path, kind: str) -> None:
    path = None if kind == "bytes" else str(write_tokenizer(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(path)
    decoded = tokenizer.decode(tokenizer.encode(["é </s> abc"])[0].tolist())
    assert decoded == "é </s> abc" if kind == "bytes" else decoded.replace(" ", "") == "é</s>abc"


@pytest.mark.parametrize("kind", ["bytes", "tokenizer"])
def test_a_token_is_a_label_if_it_touches_a_trained_span(tmp_path: Path, kind: str) -> None:
    path = None if kind == "bytes" else str(write_tokenizer(tmp_path / "tokenizer.json"))
    records = [
        {"text": "aéb", "spans": [[1, 2]]},  # é alone: one token, or two bytes
        {"text": "aéb", "spans": [[0, 1], [2, 3]]},  # reaches the end, so the separator is trained
        {"text": "ab"},  # no spans: all
        {"text": "ab", "spans": []},
    ]
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", records), tmp_path / "cache", mask_field="spans")
    stream = open_cache(spec, load_tokenizer(path)).train
    accent = [1, 1] if kind == "bytes" else [1]
    silent = [0] * len(accent)
    expected = [0, *accent, 0, 0, 1, *silent, 1, 1, 1, 1, 1, 0, 0, 0]
    allowed = stream.labels_allowed(0, len(stream))
    assert allowed is not None and allowed.astype(int).tolist() == expected
