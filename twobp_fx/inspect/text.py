"""Counts and sizes as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "count_text", "plural"]


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 stage, 2 stages."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def count_text(value: int) -> str:
    """A count in three digits or so, in powers of 1000: 999, 1.02 k, 33.6 M."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P", "E"))


def bytes_text(value: int) -> str:
    """A size in powers of 1024: 512 B, 1.50 KiB, 4.02 MiB."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def _scaled(value: int, base: int, units: Sequence[str]) -> str:
    if value < base:
        return f"{value} {units[0]}".rstrip()
    scaled = float(value)
    for unit in units:
        if round(scaled, 1) < base or unit == units[-1]:
            break
        scaled /= base
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f} {unit}"
