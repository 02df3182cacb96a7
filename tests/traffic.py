"""Bytes that kernels move in global memory, by the function of csrc that moves them."""

from __future__ import annotations

from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def lines_of(path: str, function: str) -> set[str]:
    """Where a member function stands, as the emulator names places: "stream.cuh:185" and so on."""
    lines = (CSRC / path).read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if f" {function}(" in line and line.endswith("{"))
    end = lines.index("  }", begin)
    return {f"{path.rpartition('/')[2]}:{line}" for line in range(begin + 1, end + 2)}


def bytes_moved(simulator, inside: set[str], outside: set[str] = frozenset()) -> int:
    """Since counters were cleared: of places within, or called from, `inside`, but not `outside`."""
    return sum(
        site.moved
        for site in simulator.traffic()
        if site.memory == "global"
        and not inside.isdisjoint(places := site.line.split(" < "))
        and outside.isdisjoint(places)
    )


TILE_STEP = {  # columns, bytes
    "bf16": (64, 2048),
    "fp16": (64, 2048),
    "fp8": (64, 1024),
    "int8": (64, 1024),
    "int4": (64, 512 + 32),
    "int8_dynamic": (128, 2048),
}


def packed_bytes(*shapes: tuple[int, int], form: str = "bf16") -> int:
    """Of weights [N, K] in CUDA's layout: tiles of 16 rows and 64 or 128 columns, without the scales of whole
    rows, which lie behind them and are read by another place."""
    columns, step = TILE_STEP[form]
    return sum(-(-n // 16) * -(-k // columns) * step for n, k in shapes)


WEIGHTS = lines_of("cuda/linear/stream.cuh", "issue_weights")
ROWS = lines_of("cuda/linear/stream.cuh", "issue")  # x, and beside it WEIGHTS
