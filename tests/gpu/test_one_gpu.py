"""What one GPU can show: a step on CUDA equals one device, and a run trains. `pytest -m gpu`, a minute.

Several ranks on NCCL need several GPUs; with fewer, those tests are not collected.
"""

import pytest
import torch

from plait.proof.verify import verify
from plait.spec.load import load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

LAYOUTS = [
    layout
    for layout in (
        "",
        "layout.dp=2",
        "layout.pp=2",
        "layout.tp=2",
        "layout.tp=2 layout.sequence_parallel=true",
        "layout.tp=2 layout.pp=2 layout.dp=2 layout.sequence_parallel=true",
    )
    if 2 ** layout.count("=2") <= max(1, torch.cuda.device_count())
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_layout_on_cuda_equals_one_device(layout: str, dtype: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    verdict = verify(load(None, ["train.device=cuda", *layout.split()]), dtype)
    assert verdict is not None and verdict.ok, verdict
