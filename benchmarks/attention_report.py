"""Tables and the plot of the attention benchmark's GPU part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attention_cases import (
    AIM_CONTEXT,
    AIM_OVER_FLASHINFER,
    AIMS,
    SHAPES,
    Case,
    floor,
    random_trees,
)
from ceilings import Ceilings
from gpu_report import Row, arm_cell, errors, make_table, stated
from rich.console import Console

OURS = "tree_attention"


def floors(cases: Sequence[Case], ceilings: Ceilings, page_size: int) -> list[Row]:
    rows = []
    for case in cases:
        needed = floor(case, random_trees(case.batch, case.nodes).depths, page_size)
        seconds, limit = needed.seconds(ceilings)
        rows.append(
            {
                **case._asdict(), "page_size": page_size, **needed._asdict(), "bytes": needed.bytes,
                "floor_microseconds": seconds * 1e6, "floor": limit,
            }
        )  # fmt: skip
    return rows


def show_floors(rows: Sequence[Row], ceilings: Ceilings, console: Console) -> None:
    columns = ("B", "context", "q", "KV MB", "tail", "q+out", "partials", "mask", "sum MB", "tail again MB",
               "GFLOP", "floor us", "by", "aim us")  # fmt: skip
    for name in dict.fromkeys(row["shape"] for row in rows):
        shape = SHAPES[name]
        table = make_table(
            f"{name} (heads {shape.heads}/{shape.kv_heads}, D {shape.head_dim}), bf16, one layer: floors at "
            f"{stated(ceilings)}",
            columns,
        )
        for row in rows:
            if row["shape"] != name:
                continue
            sizes = [row["kv_bytes"], row["tail_bytes"], row["q_bytes"] + row["out_bytes"]]
            sizes += [row["partials_bytes"], row["mask_bytes"], row["bytes"], row["tail_loads_bytes"]]
            aim = AIMS.get(case_of(row))
            table.add_row(
                *(str(row[key]) for key in ("batch", "context", "nodes")),
                *(f"{size / 1e6:.2f}" for size in sizes),
                f"{row['operations'] / 1e9:.2f}",
                f"{row['floor_microseconds']:.1f}",
                row["floor"],
                f"{aim:.0f}" if aim else "",
            )
        console.print(table)


def case_of(row: Row) -> Case:
    return Case(*(row[key] for key in Case._fields))


def show(rows: Sequence[Row], arms: Sequence[str], ceilings: Ceilings, console: Console) -> None:
    """Times of all arms, and whether the aims were reached; every error in words below."""
    peers = [name for name in arms if name != OURS]
    columns = ("B", "context", "q", "floor us", "by", "us", "min", "max", "of floor", "GB/s", "TFLOP/s")
    measured = [row for row in rows if "arms" in row]
    for name in dict.fromkeys(row["shape"] for row in measured):
        shape = SHAPES[name]
        table = make_table(
            f"{name} (heads {shape.heads}/{shape.kv_heads}, D {shape.head_dim}), bf16, one layer, medians; "
            f"floors at {stated(ceilings)}",
            (*columns, *(text for peer in peers for text in (f"{peer} us", "x"))),
        )
        for row in (row for row in measured if row["shape"] == name):
            mine = row["arms"].get(OURS, {"error": "not run"})
            cells = [str(row[key]) for key in ("batch", "context", "nodes")]
            cells += [f"{row['floor_microseconds']:.1f}", row["floor"], arm_cell(mine)]
            if "microseconds" in mine:
                cells += [f"{mine['min_microseconds']:.1f}", f"{mine['max_microseconds']:.1f}"]
                cells += [f"{row['share_of_floor']:.0%}", f"{row['gigabytes_per_second']:.0f}"]
                cells += [f"{row['teraflops']:.0f}"]
            else:
                cells += [""] * 5
            for peer in peers:
                record = row["arms"].get(peer)
                cells += [arm_cell(record), f"{record['times_ours']:.2f}" if "times_ours" in record else ""]
            table.add_row(*cells)
        console.print(table)
    for text in errors(rows, case_of):
        console.print(text, highlight=False, markup=False)
    for text in aims(measured):
        console.print(text, highlight=False)


def aims(rows: Sequence[Row]) -> list[str]:
    """What was aimed at, and what was found."""
    by_case = {case_of(row): row["arms"] for row in rows}
    found = []
    for case, aim in AIMS.items():
        got = by_case.get(case, {}).get(OURS, {}).get("microseconds")
        outcome = "not measured" if got is None else f"{got:.1f} us, {'reached' if got <= aim else 'missed'}"
        found.append(f"aim: {case} in {aim:.0f} us: {outcome}")
    ratios = {
        case: arms["FlashInfer"]["times_ours"]
        for case, arms in by_case.items()
        if case.context <= AIM_CONTEXT and "times_ours" in arms.get("FlashInfer", {})
    }
    outcome = "not measured"
    if ratios:
        reached = sum(ratio >= AIM_OVER_FLASHINFER for ratio in ratios.values())
        least = min(ratios, key=lambda case: ratios[case])
        outcome = f"{reached} of {len(ratios)} cases; least {ratios[least]:.2f} ({least})"
    text = f"aim: {AIM_OVER_FLASHINFER} times as fast as FlashInfer up to {AIM_CONTEXT} positions: {outcome}"
    return [*found, text]


def plot(rows: Sequence[Row], arms: Sequence[str], file: Path) -> None:
    """Time over context, a panel for each number of queries, for the first shape and the smallest batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if "arms" in row]
    if not measured:
        return
    name = measured[0]["shape"]
    batch = min(row["batch"] for row in measured if row["shape"] == name)
    chosen = [row for row in measured if row["shape"] == name and row["batch"] == batch]
    chosen.sort(key=lambda row: row["context"])
    queries = sorted({row["nodes"] for row in chosen})
    figure, axes = plt.subplots(
        1, len(queries), figsize=(3.4 * len(queries), 3.6), squeeze=False, sharey=True
    )
    for panel, nodes in zip(axes[0], queries):
        some = [row for row in chosen if row["nodes"] == nodes]
        panel.plot([row["context"] for row in some], [row["floor_microseconds"] for row in some], "k--",
                   label="floor")  # fmt: skip
        for arm in arms:
            points = [
                (row["context"], row["arms"][arm]["microseconds"])
                for row in some
                if "microseconds" in row["arms"].get(arm, {})
            ]
            if points:
                panel.plot(*zip(*points), "o-", label=arm)
        panel.set(xscale="log", yscale="log", title=f"q = {nodes}", xlabel="context")
    axes[0][0].set_ylabel("microseconds")
    axes[0][0].legend()
    figure.suptitle(f"Tree attention, {name}, batch {batch}, bf16, one layer")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
