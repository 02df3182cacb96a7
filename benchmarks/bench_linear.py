"""linear: bf16 weights streamed against the machine's read bandwidth, and against torch.

    python benchmarks/bench_linear.py [--rows 1 2 4 8 16 32] [--rounds 10] [--json FILE]

More weights than the caches hold are multiplied one matrix after the other, as a model does. The yardstick
reads the same packed bytes and does nothing with them. All arms run in turn; a time is the sum over the
matrices of each one's fastest round.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, paired_ratio, parser, ratio, start, write_json

from eagle_cuda._extension import _C
from eagle_cuda.linear import linear, pack_weight

# (N, K, how many): the four shapes of a 135M and a 1B model's layers, and the square ones of a 7B model.
MATRICES = [
    (960, 576, 20),
    (576, 576, 20),
    (3072, 576, 20),
    (576, 1536, 20),
    (2048, 2048, 5),
    (4096, 4096, 4),
]


def measure(rows: list[int], rounds: int) -> tuple[int, dict[str, Samples]]:
    """(bytes of the weights, samples per arm): "read", and "linear M" and "torch M" for every M."""
    weights = [
        torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5 for n, k, count in MATRICES for _ in range(count)
    ]
    packed = [pack_weight(w) for w in weights]
    arms = {"read": [lambda p=p: _C.read_probe(p.data) for p in packed]}
    for m in rows:
        x = {k: torch.randn(m, k, dtype=torch.bfloat16) for _, k, _ in MATRICES}
        out = {n: torch.empty(m, n, dtype=torch.bfloat16) for n, _, _ in MATRICES}
        arms[f"linear {m}"] = [lambda p=p, x=x, out=out: linear(x[p.k], p, out=out[p.n]) for p in packed]
        arms[f"torch {m}"] = [lambda w=w, x=x: torch.nn.functional.linear(x[w.shape[1]], w) for w in weights]
    with torch.inference_mode():
        return sum(p.data.numel() for p in packed), interleave(arms, rounds=rounds)


def report(
    size: int, rows: list[int], samples: dict[str, Samples], console: Console
) -> list[dict[str, float]]:
    read = samples["read"]
    table = Table(
        title=f"linear, bf16, {size / 1e6:.0f} MB of weights; read {size / read.minimum / 1e9:.1f} GB/s"
    )
    for column in (
        "M",
        "ms",
        "GB/s",
        "of read",
        "GFLOP/s",
        "x M=1",
        "torch ms",
        "x torch",
        "x torch, paired",
    ):
        table.add_column(column, justify="right")
    results = []
    for m in rows:
        ours, torchs = samples[f"linear {m}"], samples[f"torch {m}"]
        row = {
            "rows": m,
            "milliseconds": ours.minimum * 1e3,
            "median_milliseconds": ours.median * 1e3,
            "gigabytes_per_second": size / ours.minimum / 1e9,
            "share_of_read": ratio(read, ours),
            "paired_share_of_read": paired_ratio(read, ours),
            "gigaflops": size * m / ours.minimum / 1e9,
            "against_first": ratio(ours, samples[f"linear {rows[0]}"]),
            "torch_milliseconds": torchs.minimum * 1e3,
            "speedup_over_torch": ratio(torchs, ours),
            "paired_speedup_over_torch": paired_ratio(torchs, ours),
        }
        results.append(row)
        table.add_row(
            str(m),
            f"{row['milliseconds']:.2f}",
            f"{row['gigabytes_per_second']:.1f}",
            f"{row['share_of_read']:.0%}",
            f"{row['gigaflops']:.0f}",
            f"{row['against_first']:.2f}",
            f"{row['torch_milliseconds']:.2f}",
            f"{row['speedup_over_torch']:.1f}",
            f"{row['paired_speedup_over_torch']:.1f}",
        )
    console.print(table)
    return results


def main() -> None:
    line = parser(__doc__, rounds=10)
    line.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="M")
    options, console = line.parse_args(), start()
    size, samples = measure(options.rows, options.rounds)
    results = report(size, options.rows, samples, console)
    if options.json:
        read = size / samples["read"].minimum / 1e9
        write_json(options.json, {"bytes": size, "read_gigabytes_per_second": read, "linear": results})


if __name__ == "__main__":
    main()
