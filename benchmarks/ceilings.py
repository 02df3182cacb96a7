"""Rates that floors are taken at."""

from __future__ import annotations

from typing import NamedTuple


class Ceilings(NamedTuple):
    """Rates, and where they come from."""

    source: str
    bytes_per_second: float
    operations_per_second: float  # of bf16 matrix products

    def seconds(self, bytes_moved: float, operations: float) -> tuple[float, str]:
        """(what so much takes at least, what sets it)."""
        memory, arithmetic = bytes_moved / self.bytes_per_second, operations / self.operations_per_second
        return (memory, "bytes") if memory >= arithmetic else (arithmetic, "operations")


H200 = Ceilings("H200, datasheet", 4.8e12, 989e12)


def given(rates: list[float] | None) -> Ceilings:
    """Those of the command line, GB/s and TFLOP/s, or an H200's datasheet."""
    if rates is None:
        return H200
    gigabytes, teraflops = rates
    return Ceilings("as given", gigabytes * 1e9, teraflops * 1e12)
