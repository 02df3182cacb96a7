"""What the tables of the GPU parts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ceilings import Ceilings
from rich.box import SIMPLE
from rich.table import Table

Row = dict[str, Any]


def make_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, collapse_padding=True, pad_edge=False, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def stated(ceilings: Ceilings) -> str:
    return (
        f"{ceilings.bytes_per_second / 1e12:.2f} TB/s, {ceilings.operations_per_second / 1e12:.0f} TFLOP/s "
        f"({ceilings.source})"
    )


def arm_cell(record: Row | None) -> str:
    if record is None:
        return ""
    if "microseconds" in record:
        return f"{record['microseconds']:.1f}"
    return "absent" if str(record["error"]).startswith("absent") else "failed"


def errors(rows: Sequence[Row], name_of: Callable[[Row], object]) -> list[str]:
    """One line a failure; an absent peer once."""
    found = []
    for row in rows:
        if "error" in row:
            found.append(f"{name_of(row)}: {row['error']}")
        for name, record in row.get("arms", {}).items():
            if "error" in record:
                absent = str(record["error"]).startswith("absent")
                found.append(
                    f"{name} is {record['error']}" if absent else f"{name_of(row)}: {name}: {record['error']}"
                )
    return list(dict.fromkeys(found))
