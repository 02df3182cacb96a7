"""Tables of the linear benchmark's GPU part."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ceilings import Ceilings
from gpu_report import Row, arm_cell, errors, make_table, stated
from linear_cases import AIM_SHARE, AIMS, LARGE, MATRICES, Case
from peers.linear import PEERS
from rich.console import Console

OURS = "eagle_cuda"


def case_of(row: Row) -> Case | str:
    known = [row.get(key) for key in Case._fields]
    return f"{row['matrix']} {row['format']}" if None in known else Case(*known)


def show_floors(rows: Sequence[Row], ceilings: Ceilings, console: Console) -> None:
    """A line for each matrix and format, floors by number of rows; then the launches."""
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        numbers = sorted({row["rows"] for row in mine})
        floors = make_table(
            f"{op}: floors in us by number of rows M, at {stated(ceilings)}; *: set by operations",
            ("matrix", "N", "K", "format", "MB", *(f"M={m}" for m in numbers)),
        )
        plans = make_table(
            f"{op}: launches on a GPU of 132 multiprocessors, activations that all blocks load together and "
            "sums that blocks leave for each other",
            ("matrix", "format", "M", "launches", "slices", "blocks", "warps", "tiles at a time", "steps",
             "ring", "weights ahead KB", "x MB", "sums MB"),
        )  # fmt: skip
        for key in dict.fromkeys((row["matrix"], row["format"]) for row in mine):
            some = {row["rows"]: row for row in mine if (row["matrix"], row["format"]) == key}
            matrix, first = MATRICES[key[0]], next(iter(some.values()))
            cells = [
                f"{some[m]['floor_microseconds']:.1f}{'*' if some[m]['floor'] == 'operations' else ''}"
                if m in some
                else ""
                for m in numbers
            ]
            floors.add_row(
                key[0], str(matrix.n), str(matrix.k), key[1], f"{first['weight_bytes'] / 1e6:.1f}", *cells
            )
            for m, row in some.items():
                if m in (min(some), max(some)):
                    plan = row["plan"]
                    counts = ("launches", "slices", "blocks", "warps", "pass_tiles", "stage_steps", "ring")
                    plans.add_row(
                        *key, str(m), *(str(plan[part]) for part in counts),
                        f"{plan['ahead_bytes'] / 1e3:.0f}", f"{plan['x_bytes'] / 1e6:.2f}",
                        f"{plan['partial_bytes'] / 1e6:.2f}",
                    )  # fmt: skip
        console.print(floors)
        console.print(plans)


def show(rows: Sequence[Row], ceilings: Ceilings, console: Console) -> None:
    """Times of all arms, and whether the aims were reached; every error in words below."""
    columns = ("matrix", "format", "M", "MB", "floor us", "by", "us", "min", "max", "of floor", "of read")
    measured = [row for row in rows if "arms" in row]
    for op in dict.fromkeys(row["op"] for row in measured):
        table = make_table(
            f"{op}, medians; floors at {stated(ceilings)}; peers have bf16 weights, or codes on both sides",
            (*columns, *(text for peer in PEERS for text in (f"{peer} us", "x"))),
        )
        for row in (row for row in measured if row["op"] == op):
            mine = row["arms"].get(OURS, {"error": "not run"})
            cells = [row["matrix"], row["format"], str(row["rows"]), f"{row['weight_bytes'] / 1e6:.1f}"]
            cells += [f"{row['floor_microseconds']:.1f}", row["floor"], arm_cell(mine)]
            if "microseconds" in mine:
                cells += [f"{mine['min_microseconds']:.1f}", f"{mine['max_microseconds']:.1f}"]
                cells += [f"{row['share_of_floor']:.0%}", f"{row['share_of_read']:.0%}"]
            else:
                cells += [""] * 4
            for peer in PEERS:
                record = row["arms"].get(peer)
                cells += [
                    arm_cell(record),
                    f"{record['times_ours']:.2f}" if record and "times_ours" in record else "",
                ]
            table.add_row(*cells)
        console.print(table)
    for text in [*errors(rows, case_of), *aims(measured)]:
        console.print(text, highlight=False, markup=False)


def aims(rows: Sequence[Row]) -> list[str]:
    """What was aimed at, and what was found."""
    found, timed = [], {case_of(row): row for row in reversed(rows) if "share_of_read" in row}  # first ones
    for case, aim in AIMS.items():
        got = timed[case]["arms"][OURS]["microseconds"] if case in timed else None
        outcome = "not measured" if got is None else f"{got:.1f} us, {'reached' if got <= aim else 'missed'}"
        found.append(f"aim: {case} in {aim:.0f} us: {outcome}")
    large = {
        case: row["share_of_read"]
        for case, row in timed.items()
        if case.op == "linear" and row["weight_bytes"] >= LARGE and row["floor"] == "bytes"
    }
    outcome = "not measured"
    if large:
        least = min(large, key=lambda case: large[case])
        reached = sum(share >= AIM_SHARE for share in large.values())
        outcome = f"{reached} of {len(large)} cases; least {large[least]:.0%} ({least})"
    text = f"aim: linear at {AIM_SHARE:.0%} of the read ceiling from {LARGE / 1e6:.0f} MB of weights up, "
    found.append(f"{text}where bytes set the floor: {outcome}")
    ratios = {
        case: row["arms"]["cuBLAS"]["times_ours"]
        for case, row in timed.items()
        if case.format == "bf16" and "times_ours" in row["arms"].get("cuBLAS", {})
    }
    if ratios:
        least = min(ratios, key=lambda case: ratios[case])
        mean = statistics.geometric_mean(ratios.values())
        found.append(f"cuBLAS, bf16: {mean:.2f} times as long (geometric mean of {len(ratios)} cases); least "
                     f"{ratios[least]:.2f} ({least})")  # fmt: skip
    return found
