"""Tables of the draft benchmark's GPU part."""

from __future__ import annotations

from collections.abc import Sequence

from ceilings import Ceilings
from draft_cases import AIMS, BARRIER_SECONDS
from gpu_report import Row, arm_cell, errors, make_table, stated
from rich.console import Console

OURS = "draft"
PEERS = ("torch, graph", "torch.compile, graph", "torch, eager")


def name_of(row: Row) -> str:
    return f"{row['head']} {row['format']}" if "format" in row else str(row["head"])


def cycle_of(row: Row) -> str:
    sizes = f"{row['levels']} levels, top-k {row['top_k']}, {row['nodes']} nodes"
    return f"{sizes}, {row['context']} rows, one request"


def show_floors(rows: Sequence[Row], ceilings: Ceilings, console: Console) -> None:
    rate = f"{ceilings.bytes_per_second / 1e12:.2f} TB/s ({ceilings.source})"
    table = make_table(
        f"draft, {cycle_of(rows[0])}: floors at {rate}; barriers at {BARRIER_SECONDS * 1e6:.1f} us each, as "
        "published for an H100",
        ("head", "format", "weights MB, a level", "KV MB, a level", "fusion MB, once", "floor us",
         "us a level", "barriers a level", "us", "aim us a level"),
    )  # fmt: skip
    for row in rows:
        aim = row.get("aim_microseconds_per_level")
        table.add_row(
            row["head"],
            row["format"],
            f"{row['level_bytes'] / 1e6:.1f}",
            f"{row['kv_bytes'] / 1e6:.2f}",
            f"{row['once_bytes'] / 1e6:.1f}",
            f"{row['floor_microseconds']:.0f}",
            f"{row['floor_microseconds_per_level']:.1f}",
            str(row["barriers"] // row["levels"]),
            f"{row['barriers_microseconds_per_level']:.1f}",
            f"{aim:.0f}" if aim else "",
        )
    console.print(table)


def show(rows: Sequence[Row], ceilings: Ceilings, console: Console) -> None:
    """Microseconds a level of all arms, and whether the aims were reached; every error in words below."""
    measured = [row for row in rows if "arms" in row]
    if measured:
        table = make_table(
            f"draft, {cycle_of(measured[0])}, us a level, medians; floors at {stated(ceilings)}; the peers' "
            "head is in bf16",
            ("head", "format", "floor", "us", "min", "max", "of read", "a further level",
             *(text for peer in PEERS for text in (peer, "x"))),
        )  # fmt: skip
        for row in measured:
            levels, mine = row["levels"], row["arms"].get(OURS, {"error": "not run"})
            cells = [row["head"], row["format"], f"{row['floor_microseconds_per_level']:.1f}"]
            cells.append(per_level(mine, levels))
            if "microseconds" in mine:
                cells += [f"{mine[key] / levels:.1f}" for key in ("min_microseconds", "max_microseconds")]
                further = row.get("microseconds_per_further_level")
                cells += [f"{row['share_of_read']:.0%}", "" if further is None else f"{further:.1f}"]
            else:
                cells += [""] * 4
            for peer in PEERS:
                record = row["arms"].get(peer)
                times = (record or {}).get("times_ours")
                cells += [per_level(record, levels), f"{times:.2f}" if times else ""]
            table.add_row(*cells)
        console.print(table)
    for text in [*errors(rows, name_of), *aims(measured)]:
        console.print(text, highlight=False, markup=False)


def per_level(record: Row | None, levels: int) -> str:
    if record is None or "microseconds" not in record:
        return arm_cell(record)
    return f"{record['microseconds'] / levels:.1f}"


def aims(rows: Sequence[Row]) -> list[str]:
    """What was aimed at, and what was found."""
    found = []
    with_aim = [row for row in rows if "aim_microseconds_per_level" in row]
    timed = {(row["head"], row["format"]): row for row in reversed(with_aim)}  # the first ones
    for (head, form), aim in AIMS.items():
        got = timed.get((head, form), {}).get("microseconds_per_level")
        outcome = "not measured" if got is None else f"{got:.1f} us, {'reached' if got <= aim else 'missed'}"
        found.append(f"aim: {head} {form} in {aim:.0f} us a level: {outcome}")
    return found
