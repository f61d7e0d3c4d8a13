"""Streams of tokens, and files of tokens that someone else wrote."""

from pathlib import Path

import numpy as np
import pytest

from plait.data import open_data
from plait.data.stream import Stream, map_array, open_token_files
from plait.spec.errors import DataError
from plait.spec.run import DataSpec


def test_b115_offsets_beyond_32_bits_are_read_where_they_are(tmp_path: Path) -> None:
    length = 2**31 + 1025
    file = tmp_path / "huge.bin"
    with file.open("wb") as tokens:  # sparse: takes no space
        tokens.truncate(2 * length)
        tokens.seek(2 * (length - 10))
        tokens.write(np.arange(10, dtype="<u2").tobytes())
    stream = Stream((map_array(file, "<u2"),), 0, length, ends=np.array([7, 2**31 + 5, length - 4, length], np.int64))
    assert stream.tokens(length - 10, length).tolist() == list(range(10))
    assert np.flatnonzero(stream.beginnings(length - 10, length)).tolist() == [6]
    assert np.flatnonzero(stream.beginnings(2**31, 2**31 + 100)).tolist() == [5]
    source = open_data(tokens_spec(file, validation=0.0), 128, 0).train.source
    assert len(source) == (length - 1) // 128
    last = source.window(len(source) - 1).tokens
    assert last[-10:].tolist() == list(range(10))


def tokens_spec(*files: Path, **more: object) -> DataSpec:
    return DataSpec.model_validate({"source": "tokens", "files": tuple(map(str, files))} | more)


def test_npy_and_raw_files_are_read_as_they_stand(tmp_path: Path) -> None:
    tokens = np.arange(1000) * 60 % 50_000
    np.save(tmp_path / "a.npy", tokens.astype(np.int32))
    tokens.astype("<u2").tofile(tmp_path / "b.bin")
    tokens.astype("<u4").tofile(tmp_path / "c.bin")
    for spec in (
        tokens_spec(tmp_path / "a.npy"),
        tokens_spec(tmp_path / "b.bin"),
        tokens_spec(tmp_path / "c.bin", token_dtype="uint32"),
    ):
        source = open_data(spec, 10, 0, vocab=50_000).train.source
        assert np.concatenate([source.window(i).tokens[:-1] for i in range(94)]).tolist() == tokens[:940].tolist()


def test_several_token_files_are_one_stream(tmp_path: Path) -> None:
    for i, part in enumerate(np.split(np.arange(20), [3, 3, 14])):
        np.save(tmp_path / f"{i}.npy", part)
    stream = open_token_files(sorted(tmp_path.glob("*.npy")), "uint16", None, None)
    for start in range(20):
        for stop in range(start, 21):
            assert stream.tokens(start, stop).tolist() == list(range(start, stop))


def test_documents_are_found_by_their_separators_as_by_their_offsets() -> None:
    tokens = np.array([5, 9, 9, 1, 2, 9, 3])
    by_separator = Stream((tokens[:2], tokens[2:]), 0, 7, separator=9)
    by_offset = Stream((tokens,), 0, 7, ends=np.array([2, 3, 6, 7]))
    for start in range(7):
        for stop in range(start + 1, 8):
            expected = by_offset.beginnings(start, stop).tolist()
            assert by_separator.beginnings(start, stop).tolist() == expected
            assert by_separator.part(start, stop).beginnings(0, stop - start).tolist() == expected


def test_a_part_of_a_part_keeps_its_place() -> None:
    stream = Stream((np.arange(100, 120),), 0, 20, ends=np.array([4, 9, 20]), trained=np.arange(20, dtype=np.uint8) % 2)
    part = stream.part(3, 18).part(4, 9)  # tokens 7 to 11
    allowed = part.labels_allowed(0, 5)
    assert len(part) == 5 and part.tokens(1, 3).tolist() == [108, 109]
    assert part.beginnings(0, 5).tolist() == [False, False, True, False, False]
    assert allowed is not None and allowed.tolist() == [True, False, True, False, True]


def test_the_last_share_of_a_token_file_is_validation(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    data = open_data(tokens_spec(tmp_path / "a.npy", validation=0.1), 9, 0, vocab=1000)
    assert data.validation is not None
    assert data.train.source.window(0).tokens[0] == 0 and len(data.train) == 99
    assert data.validation.source.window(0).tokens.tolist() == list(range(900, 910)) and len(data.validation) == 11


def test_an_id_beyond_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    source = open_data(tokens_spec(tmp_path / "a.npy", validation=0.0), 9, 0, vocab=500).train.source
    source.window(10)
    with pytest.raises(DataError, match=r"token id 504 .* model\.vocab is 500"):
        source.window(55)


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros(100))
    np.save(tmp_path / "two.npy", np.zeros((10, 10), np.int64))
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    for name, complaint in [
        ("float.npy", "float64 of 1 dims"),
        ("two.npy", "int64 of 2 dims"),
        ("object.npy", "not an .npy file of numbers"),
        ("odd.bin", "3 bytes, which is not a multiple of 2"),
        ("empty.bin", "0 tokens available, 10 needed"),
    ]:
        with pytest.raises(DataError, match=complaint):
            open_data(tokens_spec(tmp_path / name), 9, 0)


def test_masking_documents_in_token_files_needs_their_separator(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    with pytest.raises(DataError, match="which token ends a document"):
        open_data(tokens_spec(tmp_path / "a.npy", mask_documents=True), 9, 0)
