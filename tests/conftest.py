"""What every test gets: one thread, torch imported before ranks are forked, and markers.

A test's time limit is set in pyproject.toml; proofs get a longer one here.
"""

import contextlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: eight ranks share the machine

import hypothesis
import pytest

with contextlib.suppress(ImportError):  # the tests of the torch-free packages run in a base installation too
    import torch

    torch.set_num_threads(1)  # forked ranks start from one warm, single-threaded process

FORKING = ("parallel", "train", "checkpoint", "proof", "benchmarks")  # folders of tests that fork ranks
PROOF_TIMEOUT = 1800  # seconds


# An example has no time of its own: the machine may be busy. Each test has a limit.
hypothesis.settings.register_profile("plait", deadline=None)
hypothesis.settings.load_profile("plait")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device (pytest -m gpu)")
    config.addinivalue_line("markers", "proof: long; make proof runs it, make test does not")
    config.addinivalue_line("markers", "quick(n): of this test's cases n, evenly spread, are no proof")


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        marker = each[0].get_closest_marker("quick")
        assert marker is not None
        (quick,) = marker.args
        spread = {number * len(each) // quick for number in range(quick)}
        for number, item in enumerate(each):
            if number not in spread:
                item.add_marker("proof")
    # Ranks are forked from a process without other threads; tokenizers, pyarrow and progress bars start some for good.
    # And from a small one: every fork copies the page tables, so what grows the process comes late.
    items.sort(key=lambda item: (item.path.parent.name not in FORKING, hasattr(item.module, "transformers")))  # type: ignore[attr-defined]
    for item in items:
        if item.get_closest_marker("proof") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PROOF_TIMEOUT))
