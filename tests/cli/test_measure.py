"""`plait measure` writes a cluster file that a plan of this machine reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.spec.cluster import load_cluster


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_measured_machine_is_a_cluster_whose_ranks_share_its_cores(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    command = [sys.executable, "-m", "plait", "measure", "--quick", "--nproc", "4", "-o", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    cluster = load_cluster(str(file))
    assert cluster.node == 4
    assert cluster.cores is not None and cluster.sharers(4) == max(1.0, 4 / cluster.cores)
    assert {(one.operation, one.ranks) for one in cluster.measured.collectives} == {
        *((operation, ranks) for operation in ("all_reduce", "reduce_scatter", "all_gather") for ranks in (2, 4)),
        ("send", 2),
    }
    assert cluster.measured.kernel is not None and 0 <= cluster.measured.kernel < 1e-2
