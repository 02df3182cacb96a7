"""linear: weights of every format streamed against the machine's read bandwidth, and bf16 against torch.

    python benchmarks/bench_linear.py [--rows 1 2 4 8 16 32] [--formats bf16 int8] [--rounds 10] [--json FILE]

More weights than the caches hold are multiplied one matrix after the other, as a model does; x is bf16. The
yardstick reads the same packed bytes and does nothing with them. All arms run in turn; a time is the sum over
the matrices of each one's fastest round.
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
ELEMENTS = sum(n * k * count for n, k, count in MATRICES)


FORMATS = ("bf16", "fp8", "int8", "int4", "int8_dynamic")


def measure(rows: list[int], formats: list[str], rounds: int) -> tuple[dict[str, int], dict[str, Samples]]:
    """(bytes of the weights by format, samples per arm): "read FORMAT", "FORMAT M" and, beside bf16,
    "torch M"."""
    weights = [
        torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5 for n, k, count in MATRICES for _ in range(count)
    ]
    packed = {f: [pack_weight(w, f) for w in weights] for f in formats}
    arms = {f"read {f}": [lambda p=p: _C.read_probe(p.data) for p in packed[f]] for f in formats}
    for m in rows:
        x = {k: torch.randn(m, k, dtype=torch.bfloat16) for _, k, _ in MATRICES}
        out = {n: torch.empty(m, n, dtype=torch.bfloat16) for n, _, _ in MATRICES}
        for f in formats:
            arms[f"{f} {m}"] = [lambda p=p, x=x, out=out: linear(x[p.k], p, out=out[p.n]) for p in packed[f]]
        if "bf16" in formats:
            arms[f"torch {m}"] = [
                lambda w=w, x=x: torch.nn.functional.linear(x[w.shape[1]], w) for w in weights
            ]
    with torch.inference_mode():
        return {f: sum(p.data.numel() for p in packed[f]) for f in formats}, interleave(arms, rounds=rounds)


def report(
    sizes: dict[str, int], rows: list[int], samples: dict[str, Samples], console: Console
) -> list[dict[str, object]]:
    results = []
    for name, size in sizes.items():
        read = samples[f"read {name}"]
        table = Table(
            title=f"linear, {name}, {size / 1e6:.0f} MB of weights; read {size / read.minimum / 1e9:.1f} GB/s"
        )
        columns = ["M", "ms", "GB/s", "of read", "GFLOP/s", "x M=1"]
        columns += (
            ["torch ms", "x torch", "x torch, paired"] if name == "bf16" else ["x bf16", "x bf16, paired"]
        )
        for column in columns if "bf16" in sizes else columns[:6]:
            table.add_column(column, justify="right")
        for m in rows:
            ours = samples[f"{name} {m}"]
            row: dict[str, object] = {
                "format": name,
                "rows": m,
                "milliseconds": ours.minimum * 1e3,
                "median_milliseconds": ours.median * 1e3,
                "gigabytes_per_second": size / ours.minimum / 1e9,
                "share_of_read": ratio(read, ours),
                "paired_share_of_read": paired_ratio(read, ours),
                "gigaflops": 2 * ELEMENTS * m / ours.minimum / 1e9,
                "against_first": ratio(ours, samples[f"{name} {rows[0]}"]),
            }
            cells = [
                str(m),
                f"{row['milliseconds']:.2f}",
                f"{row['gigabytes_per_second']:.1f}",
                f"{row['share_of_read']:.0%}",
                f"{row['gigaflops']:.0f}",
                f"{row['against_first']:.2f}",
            ]
            if name == "bf16":
                torchs = samples[f"torch {m}"]
                row["torch_milliseconds"] = torchs.minimum * 1e3
                row["speedup_over_torch"] = ratio(torchs, ours)
                row["paired_speedup_over_torch"] = paired_ratio(torchs, ours)
                cells += [
                    f"{row['torch_milliseconds']:.2f}",
                    f"{row['speedup_over_torch']:.1f}",
                    f"{row['paired_speedup_over_torch']:.1f}",
                ]
            elif "bf16" in sizes:
                row["speedup_over_bf16"] = ratio(samples[f"bf16 {m}"], ours)
                row["paired_speedup_over_bf16"] = paired_ratio(samples[f"bf16 {m}"], ours)
                cells += [f"{row['speedup_over_bf16']:.2f}", f"{row['paired_speedup_over_bf16']:.2f}"]
            results.append(row)
            table.add_row(*cells)
        console.print(table)
    return results


def main() -> None:
    line = parser(__doc__, rounds=10)
    line.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="M")
    line.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    options, console = line.parse_args(), start()
    sizes, samples = measure(options.rows, options.formats, options.rounds)
    results = report(sizes, options.rows, samples, console)
    if options.json:
        read = {name: size / samples[f"read {name}"].minimum / 1e9 for name, size in sizes.items()}
        write_json(options.json, {"bytes": sizes, "read_gigabytes_per_second": read, "linear": results})


if __name__ == "__main__":
    main()
