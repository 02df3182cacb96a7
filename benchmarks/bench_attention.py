"""attention: append_kv and tree_attention against the machine's bandwidth and arithmetic, and against others.

    python benchmarks/bench_attention.py [--backend cpu] [--shapes smollm2 llama8b] [--nodes 1 8 32 60]
                                         [--contexts 256 2048 8192] [--batches 1 4] [--rounds 3] [--json FILE]
    python benchmarks/bench_attention.py --backend cuda [--shapes llama8b vicuna13b] [--nodes 1 8 16 32 60]
                                         [--contexts 512 2048 8192 32768] [--batches 1 8 32] [--page-size 16]
                                         [--arms tree_attention FlashInfer] [--minutes 8] [--json FILE]
                                         [--plot FILE]
    python benchmarks/bench_attention.py --floors [--ceilings 4300 790]

On the CPU: bf16, contiguous caches, a random tree. As in a model, the caches of several layers are gone
through one after the other: as many as come to MIN_BYTES, but no more than the model has. Figures are per
layer. Floor: every key and value read once per KV head, q and out once, at the rate of a plain read of the
same caches; or the multiply-adds that the mask asks for, at the rate of the fastest fp32 matrix product of
this run; whichever takes longer. torch: scaled_dot_product_attention with the same mask as an additive bf16
one, query heads that share a KV head folded into rows beforehand, so that it too may read each key once.

On a GPU (attention_gpu.py, gpu_timing.py): bf16, paged caches, a random tree for every request,
tree_attention against the peers of peers/attention.py, the cases with an aim first, until --minutes are over.
Floors as in attention_cases.py, at the rates of a plain read and of a matrix product of the same run. Without
a GPU they are printed for an H200's datasheet, or for --ceilings GB/s TFLOP/s.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

# Before torch starts its threads: they would spin on the cores of whatever is timed after it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from attention_cases import AIMS, SHAPES, Case, Shape, importance, sees
from ceilings import given
from gpu_timing import Clock, CudaClock
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, paired_ratio, parse_for_backend, parser, ratio, start, write_json

import eagle_cuda
from eagle_cuda._extension import _C
from eagle_cuda.attention import append_kv, rope_table, tree_attention
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import linear, pack_weight
from eagle_cuda.tree import DraftTree, tree_from_parents

BF16 = torch.bfloat16
MIN_BYTES = 64e6  # more than a layer's share of the caches, so that keys come from where a model's would
TOLERANCE = 0.02  # of the largest output: both sides round to bf16, torch its weights too
DEFAULTS = {  # backend -> what runs unless the command line says otherwise
    "cpu": {
        "shapes": ["smollm2", "llama8b"], "nodes": [1, 8, 32, 60], "contexts": [256, 2048, 8192],
        "batches": [1, 4], "rounds": 3,
    },
    "cuda": {
        "shapes": ["llama8b", "vicuna13b"], "nodes": [1, 8, 16, 32, 60], "contexts": [512, 2048, 8192, 32768],
        "batches": [1, 8, 32], "rounds": 30,
    },
}  # fmt: skip


def fma_rate() -> float:
    """fp32 multiply-adds a second of the fastest product at hand, operands in the caches: torch's or ours."""
    n, m = 384, 64
    a, b, c = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    x, packed, out = torch.randn(m, n), pack_weight(b), torch.empty(m, n)
    arms = {"torch": lambda: torch.mm(a, b, out=c), "linear": lambda: linear(x, packed, out=out)}
    samples = interleave(arms, rounds=100)
    return max(n**3 / samples["torch"].minimum, m * n * n / samples["linear"].minimum)


def make_tree(batch: int, nodes: int) -> DraftTree:
    """The same random tree for every request: parents a few nodes back."""
    draws = torch.rand(nodes, generator=torch.Generator().manual_seed(0)).tolist()
    parents = [-1] + [max(0, i - 1 - int(4 * draws[i])) for i in range(1, nodes)]
    return tree_from_parents([[0] * nodes] * batch, [parents] * batch)


def rotated(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, N, H, D] in float32, halves as pairs."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def expect_close(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error, scale = (got.float() - want.float()).abs().max().item(), want.float().abs().max().item()
    if not error <= TOLERANCE * scale:
        raise SystemExit(f"{what}: differs from the reference by {error:.2e}, largest value {scale:.2e}")


def make_caches(shape: Shape, batch: int, rows: int) -> list[KVCache]:
    """As many layers' caches as come to MIN_BYTES, at most the model's."""
    size = 2 * batch * rows * shape.kv_heads * shape.head_dim * BF16.itemsize
    layers = min(shape.layers, max(1, round(MIN_BYTES / size)))
    caches = [KVCache.empty(batch, rows, shape.kv_heads, shape.head_dim, dtype=BF16) for _ in range(layers)]
    noise = torch.randn(caches[0].k.shape).to(BF16)
    for i, cache in enumerate(caches):
        cache.k.copy_(noise.roll(i, 1))
        cache.v.copy_(noise.roll(i + 1, 1))
    return caches


def measure(case: Case, caches: list[KVCache], rounds: int) -> tuple[dict, dict[str, Samples]]:
    """(layers, bytes and multiply-adds of one layer; samples of the arms read, append, attention, torch)."""
    shape, batch, context, nodes = SHAPES[case.shape], case.batch, case.context, case.nodes
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    group, rows = heads // kv_heads, context + nodes
    tree = make_tree(batch, nodes)
    seq_lens = torch.full((batch,), context, dtype=torch.int32)
    table = rope_table(rows, dim)
    q = torch.randn(batch, nodes, heads, dim).to(BF16)
    k, v = (torch.randn(batch, nodes, kv_heads, dim).to(BF16) for _ in range(2))
    q_out, out = torch.empty_like(q), torch.empty_like(q)

    def append(cache: KVCache) -> None:
        append_kv(
            q, k, v, cache, seq_lens=seq_lens, depths=tree.depths, num_nodes=tree.num_nodes, cos=table.cos,
            sin=table.sin, q_out=q_out,
        )  # fmt: skip

    def attend(cache: KVCache) -> None:
        tree_attention(
            q_out, cache, seq_lens=seq_lens, num_nodes=tree.num_nodes, mask=tree.mask, out=out
        )  # fmt: skip

    def read(cache: KVCache) -> None:
        _C.read_probe(cache.k.view(-1).view(torch.uint8))
        _C.read_probe(cache.v.view(-1).view(torch.uint8))

    for cache in caches:
        append(cache)
    positions = context + tree.depths.long()
    expect_close("append_kv, q", q_out, rotated(q, positions, *table))
    expect_close("append_kv, k", caches[0].k[:, context:rows], rotated(k, positions, *table))
    if not torch.equal(caches[0].v[:, context:rows], v):
        raise SystemExit("append_kv, v: rows differ from what was given")

    folded = q_out.view(batch, nodes, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, group * nodes, dim)
    visible = torch.cat([torch.ones(nodes, context, dtype=torch.bool), sees(tree.mask)[0]], dim=1)
    mask = torch.zeros(nodes, rows).masked_fill(~visible, -torch.inf).to(BF16).repeat(group, 1)[None, None]

    def peer(cache: KVCache) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            folded, cache.k[:, :rows].transpose(1, 2), cache.v[:, :rows].transpose(1, 2), attn_mask=mask
        )

    attend(caches[0])
    want = peer(caches[0]).view(batch, kv_heads, group, nodes, dim).permute(0, 3, 1, 2, 4).reshape(out.shape)
    expect_close("tree_attention", out, want)

    functions = {"read": read, "append": append, "attention": attend, "torch": peer}
    arms = {name: [lambda c=c, f=f: f(c) for c in caches] for name, f in functions.items()}
    size = {
        "layers": len(caches),
        "read_bytes": 2 * caches[0].k.numel() * BF16.itemsize,  # the probe reads the spare rows too
        "bytes": (2 * batch * rows * kv_heads * dim + q.numel() + out.numel()) * BF16.itemsize,
        "multiply_adds": 2 * batch * heads * dim * int(visible.sum()),
    }
    return size, interleave(arms, rounds=rounds)


def figures(case: Case, size: dict[str, float], samples: dict[str, Samples], peak: float) -> dict:
    """The row of one case; times are of one layer."""
    read, ours, torchs = samples["read"], samples["attention"], samples["torch"]
    layers = size["layers"]
    rate = size["read_bytes"] * layers / read.minimum
    by_bytes, by_arithmetic = size["bytes"] / rate, size["multiply_adds"] / peak
    return {
        **case._asdict(),
        **size,
        "milliseconds": ours.minimum / layers * 1e3,
        "median_milliseconds": ours.median / layers * 1e3,
        "append_milliseconds": samples["append"].minimum / layers * 1e3,
        "read_gigabytes_per_second": rate / 1e9,
        "floor": "read" if by_bytes >= by_arithmetic else "fma",
        "floor_bytes_milliseconds": by_bytes * 1e3,
        "floor_fma_milliseconds": by_arithmetic * 1e3,
        "share_of_floor": max(by_bytes, by_arithmetic) * layers / ours.minimum,
        "torch_milliseconds": torchs.minimum / layers * 1e3,
        "speedup_over_torch": ratio(torchs, ours),
        "paired_speedup_over_torch": paired_ratio(torchs, ours),
    }


def short(value: float) -> str:
    """Three or four digits that say something."""
    return f"{value:.{3 if value < 10 else 1 if value < 1000 else 0}f}"


def show(name: str, rows: list[dict], peak: float, console: Console) -> None:
    shape = SHAPES[name]
    table = Table(
        box=SIMPLE, collapse_padding=True, pad_edge=False,
        title=f"{name} (heads {shape.heads}/{shape.kv_heads}, D {shape.head_dim}), bf16, one layer; "
        f"fp32 {peak / 1e9:.0f} G multiply-adds/s; {eagle_cuda.num_threads()} threads",
    )  # fmt: skip
    columns = (
        "B", "rows", "nodes", "MB", "Mfma", "append us", "ms", "floor ms", "by", "of floor", "torch ms",
        "x torch",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            str(row["context"]),
            str(row["nodes"]),
            short(row["bytes"] / 1e6),
            short(row["multiply_adds"] / 1e6),
            f"{row['append_milliseconds'] * 1e3:.1f}",
            short(row["milliseconds"]),
            short(max(row["floor_bytes_milliseconds"], row["floor_fma_milliseconds"])),
            row["floor"],
            f"{row['share_of_floor']:.0%}",
            short(row["torch_milliseconds"]),
            f"{row['speedup_over_torch']:.1f}",
        )
    console.print(table)


def on_cpu(options: argparse.Namespace, console: Console) -> None:
    results = []
    with torch.inference_mode():
        peak = fma_rate()
        for shape in options.shapes:
            rows = []
            for batch, context in itertools.product(options.batches, options.contexts):
                caches = make_caches(SHAPES[shape], batch, context + max(options.nodes))
                for nodes in options.nodes:
                    case = Case(shape, batch, context, nodes)
                    rows.append(figures(case, *measure(case, caches, options.rounds), peak))
            show(shape, rows, peak, console)
            results += rows
    if options.json:
        write_json(options.json, {"multiply_adds_per_second": peak, "attention": results})


def on_gpu(
    cases: list[Case], options: argparse.Namespace, console: Console, clock: Clock, device: torch.device
) -> None:
    from attention_gpu import Settings, run
    from attention_report import plot, show
    from gpu_report import stated
    from gpu_timing import COLD, Budget, measure_ceilings
    from peers.attention import versions

    budget, peers, rows = Budget(options.minutes), versions(), []
    with torch.no_grad():
        ceilings, details = measure_ceilings(clock, device)
        console.print(stated(ceilings), details, peers, highlight=False, markup=False)
        settings = Settings(
            page_size=options.page_size,
            rounds=options.rounds,
            cold_bytes=COLD * clock.l2_bytes,
            arms=options.arms,
            absent={name: text for name, text in peers.items() if text.startswith("absent")},
            ceilings=ceilings,
        )
        for row in run(cases, settings, clock, device, budget, console.log):
            rows.append(row)
            if options.json:  # after every case: whatever happens, what was measured is kept
                results = {"ceilings": ceilings._asdict() | details, "peers": peers, "attention": rows}
                write_json(options.json, results)
    show(rows, options.arms, ceilings, console)
    if options.plot:
        plot(rows, options.arms, options.plot)


def show_floors(cases: list[Case], options: argparse.Namespace, console: Console, *, write: bool) -> None:
    from attention_report import floors, show_floors

    ceilings = given(options.ceilings)
    rows = floors(cases, ceilings, options.page_size)
    show_floors(rows, ceilings, console)
    if write and options.json:
        write_json(options.json, {"ceilings": ceilings._asdict(), "floors": rows})


def parse() -> argparse.Namespace:
    from attention_report import OURS
    from peers.attention import PEERS

    line = parser(__doc__, rounds=None)
    arms = [OURS, *PEERS]
    line.add_argument("--backend", choices=list(DEFAULTS), help="default: cuda where there is a GPU")
    line.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    line.add_argument("--nodes", type=int, nargs="+", metavar="N")
    line.add_argument("--contexts", type=int, nargs="+", metavar="ROWS")
    line.add_argument("--batches", type=int, nargs="+", metavar="B")
    line.add_argument("--page-size", type=int, default=16, help="of the caches on a GPU")
    line.add_argument("--arms", nargs="+", choices=arms, default=arms, help="what runs on a GPU")
    line.add_argument("--minutes", type=float, help="no case begins that would end later")
    line.add_argument("--plot", type=Path, metavar="FILE", help="also plot the times on a GPU")
    return parse_for_backend(line, DEFAULTS, "cases")


def main() -> None:
    options = parse()
    console = start()
    sizes = itertools.product(options.shapes, options.batches, options.contexts, options.nodes)
    cases = sorted((Case(*size) for size in sizes), key=importance)
    if options.backend == "cpu":
        on_cpu(options, console)
        cases = list(AIMS)
    if options.backend == "cuda" and torch.cuda.is_available() and not options.floors:
        on_gpu(cases, options, console, CudaClock(), torch.device("cuda"))
        return
    show_floors(cases, options, console, write=options.backend == "cuda")
    if not torch.cuda.is_available():
        console.print("No GPU is here: floors only, nothing was run on one (--floors prints all of them).")


if __name__ == "__main__":
    main()
