"""Numbers as text: the unit that fits, and no more digits than one reads."""

import pytest

from plait.spec.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80 GiB"), (2**54, "16384 TiB")],
)
def test_bytes_are_counted_in_powers_of_1024(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (45_344, "45.34 K"), (8_030_261_248, "8.03 B"), (999_999, "1000 K")]
)
def test_counts_are_in_powers_of_1000(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (0, "0 µs"),
            (5e-7, "0.5 µs"),
            (9.999e-4, "1000 µs"),
            (0.0123, "12.3 ms"),
            (0.9999, "1000 ms"),
            (1.5, "1.5 s"),
        ),
        *((75, "1 min 15 s"), (3599.7, "1 h 0 min"), (7260, "2 h 1 min"), (360_000, "100 h 0 min")),
    ],
)
def test_seconds_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
