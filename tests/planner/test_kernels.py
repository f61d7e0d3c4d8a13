"""Small products, short messages and slow hosts cost what their shapes say."""

from __future__ import annotations

import numpy as np
import pytest

from plait.planner.ground import Ground
from plait.planner.kernels import FILL, stretch
from plait.planner.network import wires
from plait.planner.pace import waits
from plait.planner.stack import load_stack
from plait.spec.cluster import load_cluster
from plait.spec.presets import PRESETS

# Rows, columns, inner dim and measured part of the 312 TFLOP/s peak of forward products on an A100-PCIe with 108
# multiprocessors (MooreThreads/SimuMax, configs/system): every eighth by name of those with 4,096 tokens.
MEASURED = [
    (4096, 1536, 5120, 0.78767), (4096, 24576, 1536, 0.69713), (4096, 57344, 8192, 0.75284),
    (4096, 28672, 4096, 0.73727), (4096, 5120, 3072, 0.71751), (4096, 5120, 12288, 0.77174),
    (4096, 6144, 4096, 0.7168), (4096, 576, 5120, 0.4968), (4096, 32768, 512, 0.61758),
]  # fmt: skip


def residual(stretched: bool) -> float:
    """Mean distance in the logarithm from the best single efficiency."""
    logs = np.array([np.log(eff * (stretch(m, n, k, 108) if stretched else 1.0)) for m, n, k, eff in MEASURED])
    return float(np.abs(logs - np.median(logs)).mean())


def test_tiles_and_rounds_explain_measured_products() -> None:
    assert residual(True) < 0.7 * residual(False)


def test_a_tile_beyond_whole_rounds_takes_another_round() -> None:
    full, one_more = (stretch(256 * rows, 128 * 27, 1e9, 108) for rows in (40, 41))
    assert full == pytest.approx(1.0)
    assert one_more == pytest.approx(11 * 108 / (41 * 27), rel=0.06)
    assert stretch(256 * 40, 128 * 27, FILL, 108) == pytest.approx(2.0)


def test_experts_share_the_rounds_of_one_kernel() -> None:
    assert stretch(128, 256, 1e9, 108, times=108) == pytest.approx(1.0)
    assert stretch(64, 256, 1e9, 108, times=108) > 1.2  # half of every tile hangs over


def test_a_device_of_no_known_units_is_never_stretched() -> None:
    assert stretch(7, 7, 7, None) == 1.0


@pytest.mark.parametrize(("ranks", "microseconds"), [(2, 40.4), (4, 45.0), (8, 75.8)])
def test_an_all_reduce_of_nothing_takes_what_was_measured(ranks: int, microseconds: float) -> None:
    """VIA-Research/vTrain's trace of one A100 node: lines through eleven sizes each."""
    ground = Ground.of(PRESETS["llama3-8b"], load_stack("megatron"), load_cluster("a100-80-dgx"))
    assert 1e6 * wires(ground, ranks, 1).start("all_reduce") == pytest.approx(microseconds, rel=0.2)


def test_the_slower_of_device_and_host_decides() -> None:
    device = np.array([1.0, 1.0, 1.0])
    host = np.array([0.1, 1.0, 10.0])
    assert waits(device, host) == pytest.approx([0.0, 2 ** (1 / 6) - 1, 9.0], abs=1e-3)
