"""The catalogue of machines: every entry reads, and says per direction and dense what brochures say otherwise."""

from pathlib import Path

import pytest

from plait.spec.cluster import known_clusters, load_cluster
from plait.spec.errors import UsageError

ASKED_FOR = """
    a100-40-dgx a100-80-dgx a100-40-pcie a100-80-pcie h100-dgx h100-pcie h100-nvl h200-dgx b200-dgx b300-dgx gb200-nvl72
    gb300-nvl72 mi300x cpu
"""


def test_the_catalogue_has_every_machine_that_was_asked_for() -> None:
    assert set(ASKED_FOR.split()) <= set(known_clusters())


@pytest.mark.parametrize("name", known_clusters())
def test_every_machine_reads_and_each_number_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device.source and all(link.source for link in cluster.links)
    bandwidths = [link.bandwidth for link in cluster.links]
    assert bandwidths == sorted(bandwidths, reverse=True), "the fastest link stands first"
    assert cluster.links[-1].domain is None, "some link reaches every device"


@pytest.mark.parametrize("name", [name for name in known_clusters() if "100" in name or "200" in name])
def test_eight_bits_are_twice_as_fast_as_sixteen_so_no_sparse_peak_slipped_in(name: str) -> None:
    peaks = load_cluster(name).device.peaks
    if "float8" in peaks:
        assert peaks["float8"] == pytest.approx(2 * peaks["bfloat16"], rel=0.01)
    assert peaks["float16"] == peaks.get("bfloat16", peaks["float16"])


def test_links_are_stored_per_direction() -> None:
    """NVLink 4's 900 GB/s counts both directions, NDR's 50 GB/s one: 18 as brochures compare them, 9 in truth."""
    fast, wide = load_cluster("h100-dgx").links
    assert (2 * fast.bandwidth, wide.bandwidth) == (900e9, 50e9)
    assert 2 * fast.bandwidth / wide.bandwidth == 18
    assert fast.bandwidth / wide.bandwidth == 9


def test_a_group_uses_the_narrowest_link_that_it_crosses() -> None:
    cluster = load_cluster("h100-dgx")
    assert cluster.link(8) is cluster.links[0]
    assert cluster.link(9) is cluster.links[1]
    assert cluster.link(2, stride=8) is cluster.links[1]
    assert load_cluster("gb200-nvl72").link(64).bandwidth == 900e9


def test_an_unknown_machine_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean h100-dgx"):
        load_cluster("h100-dxg")


def test_a_device_without_a_peak_in_a_dtype_has_none() -> None:
    with pytest.raises(UsageError, match="a100-80-sxm has no peak in float8"):
        load_cluster("a100-80-dgx").device.peak("float8")


def test_a_users_file_may_name_a_device_of_the_catalogue_or_describe_its_own(tmp_path: Path) -> None:
    links = "[[links]]\nbandwidth = 1e9\nlatency = 1e-6\n"
    (tmp_path / "named.toml").write_text(f'name = "mine"\ndevice = "h100-pcie"\nnode = 4\n{links}')
    assert load_cluster(str(tmp_path / "named.toml")).device.bandwidth == 2000e9
    own = '[device]\nname = "x"\nkind = "cpu"\nmemory = 1\nbandwidth = 1.0\n[device.peaks]\nfloat32 = 1e9\n'
    (tmp_path / "own.toml").write_text(f'name = "mine"\nnode = 4\n{links}{own}')
    assert load_cluster(str(tmp_path / "own.toml")).device.peaks == {"float32": 1e9}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('name = "x"\ndevice = "h100-sxn"\nnode = 8\nlinks = []', "did you mean h100-sxm"),
        ('name = "x"\ndevice = "h100-sxm"\nnode = 8\nlinks = []\nspeed = 3', "speed"),
        ("name = x", "not TOML"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_by_the_key_that_is_wrong(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        load_cluster(str(tmp_path / "bad.toml"))


CPU = """name = "mine"
{top}
node = 2
{links}
[device]
name = "cpu"
kind = "cpu"
memory = 1000000000
bandwidth = 40e9
{device}
[measured]
{measured}
"""
LINKS = "links = [{bandwidth = 4e9, latency = 5e-05}]"
PEAKS = "peaks = {float32 = 1e11}"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"links": ""}, "links: Field required"),
        ({"links": "links = []"}, "links: .*at least 1 item"),
        ({"links": "links = 3"}, "links: .*tuple, is 3"),
        ({"links": "links = [{bandwidth = 0.0, latency = 0.0}]"}, "links.0.bandwidth: .*greater than 0, is 0.0"),
        ({"device": "peaks = {float32 = 0.0}"}, "device.peaks.float32: .*greater than 0, is 0.0"),
        ({"device": "peaks = {float32 = -1e12}"}, "device.peaks.float32: .*greater than 0, is -1"),
        ({"device": "peaks = {}"}, "device.peaks: .*at least 1 item"),
        ({"device": PEAKS + "\nunits = 0"}, "device.units: .*greater than or equal to 1, is 0"),
        ({"measured": "gemm = {float32 = 0.0}"}, "measured.gemm.float32: .*greater than 0, is 0.0"),
        ({"measured": "memory = 0.0\nlink = 0.0"}, "measured.memory: .*is 0.0; measured.link: .*is 0.0"),
        ({"measured": "memory = -1.0"}, "measured.memory: .*greater than 0, is -1.0"),
        ({"measured": "kernel = -1.0"}, "measured.kernel: .*greater than or equal to 0, is -1.0"),
        ({"measured": "collectives = 3"}, "measured.collectives: .*tuple, is 3"),
        ({"top": "devices = 0"}, "devices: .*greater than or equal to 1, is 0"),
        ({"top": "devices = -1"}, "devices: .*greater than or equal to 1, is -1"),
    ],
)
def test_a_figure_of_a_machine_that_cannot_be_is_refused_by_its_key(
    tmp_path: Path, changed: dict[str, str], why: str
) -> None:
    path = tmp_path / "mine.toml"
    sound = {"top": "", "links": LINKS, "device": PEAKS, "measured": ""}
    path.write_text(CPU.format(**sound))
    assert load_cluster(str(path)).node == 2
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(CPU.format(**sound | changed))
    with pytest.raises(UsageError, match=why):
        load_cluster(str(wrong))


def test_a_folder_and_bytes_are_no_machine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.toml"):
        load_cluster(str(tmp_path))
    (tmp_path / "bytes.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="not TOML"):
        load_cluster(str(tmp_path / "bytes.toml"))
