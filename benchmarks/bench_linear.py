"""linear and lm_head_topk: weights of every format streamed against the read bandwidth, and against torch.

    python benchmarks/bench_linear.py [--backend cpu] [--rows 1 2 4 8 16 32] [--formats bf16 int8]
                                      [--copies 4] [--rounds 10] [--json FILE]
    python benchmarks/bench_linear.py --backend cuda [--matrices "llama8b down"] [--rows 1 8 16 32 64 256]
                                      [--topk-rows 10] [--formats bf16 fp8] [--compiled-rows 16] [--minutes 3]
                                      [--rounds 30] [--json FILE]
    python benchmarks/bench_linear.py --floors [--ceilings 4300 790]

On the CPU: more weights than the caches hold are multiplied one matrix after the other, as a model does; x is
bf16. The yardstick reads the same packed bytes and does nothing with them. All arms run in turn; a time is
the sum over the matrices of each one's fastest round.

On a GPU (linear_gpu.py, gpu_timing.py): the matrices of four published draft heads and an LM head of a whole
vocabulary, cold, in CUDA graphs, in every format and for every number of rows, until --minutes are over;
SwiGLU behind gate and up. lm_head_topk finds the ten best of --topk-rows rows. Peers (peers/linear.py) have
bf16 weights, or codes on both sides. Floors as in linear_cases.py, at the rates of a plain read and of a
matrix product of the same run. Without a GPU nothing is timed: floors, and how the kernels would share the
work out, are printed and written for an H200's datasheet, or for --ceilings GB/s TFLOP/s.
"""

from __future__ import annotations

import argparse
import os

# Before torch starts its threads: they would spin on the cores of whatever is timed after it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from ceilings import given
from gpu_timing import Clock, CudaClock
from head_shapes import FORMATS
from linear_cases import MATRICES as GPU_MATRICES
from linear_cases import ROWS, TOPK_ROWS, Case, chosen, row_of
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, paired_ratio, parse_for_backend, parser, ratio, start, write_json

from eagle_cuda._extension import _C
from eagle_cuda.linear import PackedWeight, linear, pack_weight, unpack_weight

# (N, K, how many): the four shapes of a 135M and a 1B model's layers, and the square ones of a 7B model.
MATRICES = [
    (960, 576, 20),
    (576, 576, 20),
    (3072, 576, 20),
    (576, 1536, 20),
    (2048, 2048, 5),
    (4096, 4096, 4),
]
TOLERANCE = 0.05  # of the largest result: int8_dynamic rounds x to 8 bits
DEFAULTS = {  # backend -> what runs unless the command line says otherwise
    "cpu": {"rows": [1, 2, 4, 8, 16, 32], "rounds": 10},
    "cuda": {"rows": list(ROWS), "rounds": 30},
}


def check(packed: PackedWeight) -> None:
    """Two rows are multiplied as torch multiplies them with what the weight is worth."""
    x = torch.randn(2, packed.k).bfloat16()
    want = x.float() @ unpack_weight(packed).float().T
    error = float((linear(x, packed).float() - want).abs().max() / want.abs().max())
    if not error <= TOLERANCE:
        raise SystemExit(f"linear {packed}: differs from torch by {error:.2e} of the largest value")


def measure(
    rows: list[int], formats: list[str], copies: int, rounds: int
) -> tuple[dict[str, int], int, dict[str, Samples]]:
    """(bytes of the weights by format, their elements, samples per arm): "read FORMAT", "FORMAT M" and,
    beside bf16, "torch M"."""
    weights = [
        torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5
        for n, k, count in MATRICES
        for _ in range(min(count, copies))
    ]
    packed = {f: [pack_weight(w, f) for w in weights] for f in formats}
    for each in packed.values():
        for weight in {(p.n, p.k): p for p in each}.values():
            check(weight)
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
        sizes = {f: sum(p.data.numel() for p in packed[f]) for f in formats}
        return sizes, sum(w.numel() for w in weights), interleave(arms, rounds=rounds)


def report(
    sizes: dict[str, int], elements: int, rows: list[int], samples: dict[str, Samples], console: Console
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
                "gigaflops": 2 * elements * m / ours.minimum / 1e9,
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


def on_cpu(options: argparse.Namespace, console: Console) -> dict[str, object]:
    sizes, elements, samples = measure(options.rows, options.formats, options.copies, options.rounds)
    results = report(sizes, elements, options.rows, samples, console)
    read = {name: size / samples[f"read {name}"].minimum / 1e9 for name, size in sizes.items()}
    return {"bytes": sizes, "read_gigabytes_per_second": read, "linear": results}


def on_gpu(
    cases: list[Case], options: argparse.Namespace, console: Console, clock: Clock, device: torch.device
) -> None:
    from gpu_report import stated
    from gpu_timing import COLD, Budget, measure_ceilings
    from linear_gpu import Settings, run
    from linear_report import show

    budget, rows = Budget(options.minutes), []
    with torch.no_grad():
        ceilings, details = measure_ceilings(clock, device)
        console.print(stated(ceilings), details, highlight=False, markup=False)
        settings = Settings(
            rounds=options.rounds,
            cold_bytes=COLD * clock.l2_bytes,
            compiled_rows=options.compiled_rows,
            ceilings=ceilings,
        )
        for row in run(cases, settings, clock, device, budget, console.log):
            rows.append(row)
            if options.json:  # after every case: whatever happens, what was measured is kept
                write_json(options.json, {"ceilings": ceilings._asdict() | details, "linear": rows})
    show(rows, ceilings, console)


def floors(cases: list[Case], options: argparse.Namespace, console: Console) -> dict[str, object]:
    from linear_report import show_floors

    ceilings = given(options.ceilings)
    rows = [row_of(case, ceilings) for case in cases]
    show_floors(rows, ceilings, console)
    return {"ceilings": ceilings._asdict(), "floors": rows}


def parse() -> argparse.Namespace:
    line = parser(__doc__, rounds=None)
    line.add_argument("--backend", choices=list(DEFAULTS), help="default: cuda where there is a GPU")
    line.add_argument("--rows", type=int, nargs="+", metavar="M")
    line.add_argument("--topk-rows", type=int, nargs="+", default=[TOPK_ROWS], metavar="M")
    line.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    line.add_argument("--copies", type=int, default=20, help="of each matrix on the CPU, at most")
    line.add_argument("--matrices", nargs="+", choices=list(GPU_MATRICES), help="on a GPU")
    line.add_argument("--compiled-rows", type=int, nargs="*", default=[16], metavar="M",
                      help="for which torch.compile tunes the first head's products")  # fmt: skip
    line.add_argument("--minutes", type=float, help="no weight begins that would end later")
    return parse_for_backend(line, DEFAULTS, "cases")


def main() -> None:
    options = parse()
    console = start()
    results: dict[str, object] = {}
    names, formats, rows = options.matrices, options.formats, options.rows
    if options.backend == "cpu":
        results = on_cpu(options, console)
        names, formats, rows = ["llama8b gate_up", "llama8b lm_head"], ["bf16", "fp8", "int4"], ROWS
    cases = chosen(names, formats, rows, options.topk_rows)
    if options.backend == "cuda" and torch.cuda.is_available() and not options.floors:
        on_gpu(cases, options, console, CudaClock(), torch.device("cuda"))
        return
    results |= floors(cases, options, console)
    if not torch.cuda.is_available():
        console.print(
            "No GPU is here: floors and planned launches only, nothing was timed on one (--floors: of all)."
        )
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
