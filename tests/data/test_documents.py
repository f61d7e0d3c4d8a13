"""Reading documents, and which of them are held out."""

import shutil
import sys
from pathlib import Path

import pytest

from plait.data.documents import held_out, list_files, read_documents, standard_library
from plait.spec.errors import DataError, MissingExtra
from plait.spec.run import DataSpec
from tests.data.fixtures import jsonl_spec, write_jsonl


def read(spec: DataSpec) -> list[tuple[str, str]]:
    return [(d.name, d.text) for d in read_documents(spec, list_files(spec))]


def test_the_builtin_corpus_is_the_library_without_tests_and_applications() -> None:
    names = [f.relative_to(standard_library()).as_posix() for f in list_files(DataSpec())]
    assert names == sorted(names) and {"argparse.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert not any({"test", "tests", "site-packages", "idlelib"} & set(name.split("/")[:-1]) for name in names)
    assert len(names) > 300


def test_a_twentieth_of_the_builtin_documents_is_held_out_and_always_the_same_ones() -> None:
    names = [f.relative_to(standard_library()).as_posix() for f in list_files(DataSpec())]
    share = sum(held_out(name, 0.05) for name in names) / len(names)
    assert 0.02 < share < 0.09
    fixed = ["argparse.py", "asyncio/tasks.py", "json/decoder.py", "turtle.py", "typing.py", "zipfile.py"]
    assert [name for name in fixed if held_out(name, 0.3)] == ["json/decoder.py", "typing.py", "zipfile.py"]


def test_what_is_held_out_does_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    first = tmp_path / "here"
    (first / "deep").mkdir(parents=True)
    for i in range(20):
        (first / "deep" / f"{i}.txt").write_text(str(i))
    (first / "top.txt").write_text("top")
    shutil.copytree(first, tmp_path / "there" / "further")
    specs = [DataSpec(source="text", files=(f"{tmp_path}/{f}/**/*.txt",)) for f in ("here", "there/further")]
    assert read(specs[0]) == read(specs[1])


def test_more_held_out_documents_contain_the_fewer() -> None:
    names = [str(i) for i in range(5000)]
    few, many = ({n for n in names if held_out(n, fraction)} for fraction in (0.05, 0.2))
    assert few < many and 180 < len(few) < 320


def test_parquet_gives_the_documents_of_jsonl(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"document {i}" for i in range(3000)]
    spans = [[[0, i % 9]] for i in range(3000)]
    parquet.write_table(pa.table({"body": texts, "spans": spans, "other": texts}), tmp_path / "x.parquet")
    write_jsonl(tmp_path / "x.jsonl", [{"body": t, "spans": s} for t, s in zip(texts, spans, strict=True)])
    found = []
    for source in ("parquet", "jsonl"):
        files = (f"{tmp_path}/x.{source}",)
        spec = DataSpec(source=source, files=files, field="body", mask_field="spans")  # type: ignore[arg-type]
        found.append([(d.text, d.spans) for d in read_documents(spec, list_files(spec))])
    assert found[0] == found[1] and len(found[0]) == 3000


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"text": "a"}\n{"txet": "b"}\n', r"x.jsonl:2: no text in field 'text' \(fields here: txet\)"),
        (b'{"text": 3}\n', "x.jsonl:1: no text in field 'text'"),
        (b'{"text": "a"\n', "x.jsonl:1: not JSON"),
        (b'\n["a"]\n', "x.jsonl:2: a list, an object with the field 'text' is needed"),
        (b'{"text": "abc", "spans": [[1, 4]]}', r"span \[1, 4\] does not lie in a text of 3 characters"),
        (b'{"text": "abc", "spans": [1, 2]}', r"'spans' is not a list of \[start, stop\] characters"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        read(jsonl_spec(tmp_path / "x.jsonl", tmp_path, mask_field="spans"))


def test_a_text_file_that_is_not_utf8_is_named_with_its_first_bad_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 \(byte 1\)"):
        read(DataSpec(source="text", files=(f"{tmp_path}/latin.txt",)))


def test_a_pattern_without_a_file_and_a_missing_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing-\*' names no file"):
        list_files(DataSpec(source="text", files=(f"{tmp_path}/nothing-*",)))
    with pytest.raises(DataError, match="needs at least 1 file"):
        list_files(DataSpec(source="text"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"plait\[hf\]"):
        read(DataSpec(source="parquet", files=(f"{tmp_path}/x.parquet",)))
