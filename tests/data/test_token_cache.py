"""The token cache: built once however many ask, never read in part, rebuilt when a data file changes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.data import build, cache, open_data
from plait.data.build import open_cache
from plait.data.cache import build_once, manifest_of
from plait.data.tokenizer import Bytes
from plait.spec.errors import DataError
from tests.data.fixtures import jsonl_spec, write_jsonl

TEXTS = [f"document {i} " * 5 for i in range(40)]


def in_processes(count: int, work: Callable[[], None]) -> list[int]:
    """Run `work` in forked processes at once; their exit codes (negative: the signal)."""
    pids = []
    for _ in range(count):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def note(log: Path, seconds: float = 0.05) -> Callable[[Path], dict[str, Any]]:
    """A builder that leaves a line in `log` and takes its time."""

    def work(folder: Path) -> dict[str, Any]:
        with log.open("a") as file:
            file.write("built\n")
        (folder / "part").write_bytes(b"half")
        time.sleep(seconds)
        (folder / "part").write_bytes(b"whole")
        return {}

    return work


def test_b105_one_of_many_ranks_builds_and_all_read_the_whole(tmp_path: Path) -> None:
    for attempt in range(5):
        folder, log = tmp_path / f"cache-{attempt}" / "tokens", tmp_path / f"log-{attempt}"

        def rank(folder: Path = folder, log: Path = log) -> None:
            build_once(folder, note(log))
            assert manifest_of(folder) is not None and (folder / "part").read_bytes() == b"whole"

        assert in_processes(4, rank) == [0, 0, 0, 0]
        assert log.read_text() == "built\n"


def test_without_locks_the_first_rename_wins_and_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks on this filesystem")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    folder = tmp_path / "cache" / "tokens"

    def rank() -> None:
        build_once(folder, note(tmp_path / "log"))
        assert manifest_of(folder) is not None and (folder / "part").read_bytes() == b"whole"

    assert in_processes(4, rank) == [0, 0, 0, 0]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tokens", "tokens.lock"]


def test_ranks_that_start_together_find_the_same_tokens(tmp_path: Path) -> None:
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", TEXTS), tmp_path / "cache")
    log = tmp_path / "log"

    def rank() -> None:
        with log.open("a") as file:
            file.write(open_data(spec, 16, 0).fingerprint + "\n")

    assert in_processes(4, rank) == [0, 0, 0, 0]
    assert len(log.read_text().splitlines()) == 4 and len(set(log.read_text().splitlines())) == 1


def test_a_finished_folder_gets_its_name_by_one_rename(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "tokens"

    def build(building: Path) -> dict[str, Any]:
        assert building != folder and not folder.exists()
        return {"inode": building.stat().st_ino}

    build_once(folder, build)
    assert manifest_of(folder) == {"inode": folder.stat().st_ino, "sizes": {}}


def test_b105_a_build_that_is_killed_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "tokens"

    def killed(building: Path) -> dict[str, Any]:
        (building / "part").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    assert in_processes(1, lambda: build_once(folder, killed)) == [-signal.SIGKILL]
    assert not folder.exists() and list(folder.parent.glob("tokens.building-*"))
    build_once(folder, note(tmp_path / "log", 0))
    assert (folder / "part").read_bytes() == b"whole"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tokens", "tokens.lock"]


def test_ranks_that_wait_for_a_builder_that_is_killed_build_themselves(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "tokens", tmp_path / "log"

    def first_dies(building: Path) -> dict[str, Any]:
        if not log.exists():
            log.write_text("died\n")
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return note(log)(building)

    codes = in_processes(4, lambda: build_once(folder, first_dies))
    assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0]
    assert log.read_text() == "died\nbuilt\n"


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    write_jsonl(file, [*TEXTS, {"wrong": 1}])
    for _ in range(2):
        with pytest.raises(DataError, match=r"x\.jsonl:41"):
            open_cache(jsonl_spec(file, tmp_path / "cache"), Bytes())
    assert all(p.suffix == ".lock" for p in (tmp_path / "cache").iterdir())
    write_jsonl(file, TEXTS)
    open_cache(jsonl_spec(file, tmp_path / "cache"), Bytes())


def test_b105_a_changed_data_file_is_read_again_and_the_older_cache_is_named(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", ["aaaa"])
    spec = jsonl_spec(file, tmp_path / "cache")
    before = open_cache(spec, Bytes())
    assert open_cache(spec, Bytes()).folder == before.folder and not before.notices
    write_jsonl(file, ["bbbb"])  # the same size
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    after = open_cache(spec, Bytes())
    assert bytes(after.train.tokens(0, 4).tolist()) == b"bbbb"
    assert bytes(before.train.tokens(0, 4).tolist()) == b"aaaa"  # a job that runs on still has what it opened
    assert str(before.folder) in after.notices[0]


@pytest.mark.parametrize(
    "change", [{"separator": "none"}, {"validation": 0.5}, {"mask_field": "spans"}, {"field": "b"}]
)
def test_other_settings_have_a_cache_of_their_own(tmp_path: Path, change: dict[str, Any]) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"text": t, "b": t} for t in TEXTS])
    spec = jsonl_spec(file, tmp_path / "cache")
    other = jsonl_spec(file, tmp_path / "cache", **change)
    assert open_cache(spec, Bytes()).folder != open_cache(other, Bytes()).folder


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", TEXTS), tmp_path / "cache")
    whole = open_cache(spec, Bytes())
    tokens = whole.folder / "train.tokens"
    size = tokens.stat().st_size
    os.truncate(tokens, size // 2)
    assert manifest_of(whole.folder) is None
    open_cache(spec, Bytes())
    assert tokens.stat().st_size == size


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    read = build.read_documents

    def read_and_append(*args: Any) -> Any:
        yield from read(*args)
        with file.open("a") as more:
            more.write('{"text": "more"}\n')

    monkeypatch.setattr(build, "read_documents", read_and_append)
    with pytest.raises(DataError, match="changed while it was being read"):
        open_cache(jsonl_spec(file, tmp_path / "cache"), Bytes())
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_b105_two_nodes_with_folders_of_their_own_find_the_same_tokens(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    nodes = [open_data(jsonl_spec(file, tmp_path / node), 16, 0) for node in ("node0", "node1")]
    assert nodes[0].fingerprint == nodes[1].fingerprint
    assert list((tmp_path / "node0").iterdir()) and list((tmp_path / "node1").iterdir())


def open_unprivileged(root: Path, cache: Path | None) -> str:
    """What a user for whom write protection holds is told when it opens the data of `root`."""
    said = root / "open" / "said"
    spec = jsonl_spec(root / "x.jsonl", cache)

    def other_user() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            data = open_data(spec, 4, 0)
            said.write_text(" ".join([f"{len(data.train)} windows", *data.notices]))
        except DataError as error:
            said.write_text(str(error))

    assert in_processes(1, other_user) == [0]
    text = said.read_text()
    said.unlink()
    return text


def test_b105_a_folder_that_cannot_be_written_is_read_if_complete_else_refused_else_replaced_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        locked, free = root / "locked", root / "open"
        for folder, mode in ((root, 0o755), (locked, 0o555), (free, 0o777)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        write_jsonl(root / "x.jsonl", ["some text"])
        monkeypatch.setenv("XDG_CACHE_HOME", str(locked))
        monkeypatch.setattr(tempfile, "tempdir", str(free))

        said = open_unprivileged(root, cache=locked)
        assert said.startswith(f"data.cache: {locked} cannot be written") and "set data.cache" in said
        said = open_unprivileged(root, cache=None)
        assert said.startswith(f"2 windows {locked}/plait cannot be written") and f"cached in {free}/plait-" in said

        locked.chmod(0o755)
        open_data(jsonl_spec(root / "x.jsonl", locked), 4, 0)
        locked.chmod(0o555)
        assert open_unprivileged(root, cache=locked) == "2 windows"
        locked.chmod(0o755)


MILLION = """
import resource, sys
from plait.data import open_data
from plait.spec.run import DataSpec
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
spec = DataSpec(source="jsonl", files=(sys.argv[1],), cache=sys.argv[2], separator="none", validation=0.0)
stream = open_data(spec, 4, 0).train.source.stream
print(len(stream), len(stream.ends), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""


@pytest.mark.proof
def test_b115_a_million_documents_of_one_token_are_indexed_in_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "x.jsonl").open("w") as file:
        file.writelines('{"text": "a"}\n' for _ in range(1_000_000))
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(tmp_path / "x.jsonl"), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    tokens, documents, grown = map(int, done.stdout.split())
    assert tokens == documents == 1_000_000
    assert grown < 200 * 1024  # KiB
