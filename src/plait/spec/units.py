"""Bytes, seconds, FLOP and counts as text. Inside plait they are plain numbers; only the edge that prints uses this."""

from __future__ import annotations


def _rounded(value: float, digits: int) -> str:
    """Significant digits, and every digit before the point: 1234.5 -> '1234', never '1.23e+03'."""
    return f"{value:.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{_rounded(value, 4)} {unit}".rstrip()
        value /= base
    return f"{_rounded(value, 4)} {units[-1]}"


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_count(count: float) -> str:
    """45344 -> '45.34 K'."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T"))


def format_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms', 75 -> '1 min 15 s', 7260 -> '2 h 1 min'."""
    if seconds < 60:
        scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
        return f"{_rounded(seconds * scale, 3)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
