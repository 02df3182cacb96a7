"""draft: the whole draft phase in one call, against reading its weights, and on a GPU against torch.

    python benchmarks/bench_draft.py [--backend cpu] [--trees 4:3:2 8:4:4 32:5:8 32:6:8 5:4:1 mc_sim_7b_63]
                                     [--context 256] [--rounds 30] [--json FILE]
    python benchmarks/bench_draft.py --backend cuda [--heads llama8b-eagle3 qwen8b-eagle3]
                                     [--formats bf16 fp8 int4] [--context 1024] [--tuned llama8b-eagle3]
                                     [--minutes 3] [--rounds 30] [--json FILE]
    python benchmarks/bench_draft.py --floors [--ceilings 4300 790]

On the CPU: a random EAGLE-3 head of the size of the demo's, bf16, one request, three rows to extend by (two
accepted tokens and the new one). A tree is nodes:levels:top_k, the root among its nodes; 5:4:1 is a chain of
4. Or a static one, as in `eagle-cuda generate --tree-shape`: mc_sim_7b_63, chain:4, a JSON file of paths.
Floor: the packed weights of the layer and the LM head once a level, the fusion matrix once, and the committed
keys and values once a level, at the rate of a plain read of the same weights. Where the caches hold them, the
read finds them there too, and a draft phase that finds them nearer may be faster than that read.
"x memory": how many times as long as the same bytes at the rate of memory that no cache holds.

On a GPU (draft_gpu.py, gpu_timing.py): random heads of the real shapes of draft_cases.py, 8 levels of 10, 60
nodes, in CUDA graphs, until --minutes are over. Peers: the same head and search in PyTorch (peers/draft.py),
eager, and captured in a CUDA graph as it is and behind torch.compile, which tunes the products of the heads
--tuned. Floors as in draft_cases.py, at the rate of a plain read of the same run. Without a GPU nothing is
timed: the floors are printed and written for an H200's datasheet, or for --ceilings GB/s TFLOP/s.
"""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

# Before torch starts its threads: they would spin on the cores of whatever is timed after it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from ceilings import given
from draft_cases import CONTEXT, FORMATS, Cycle, row_of
from gpu_timing import Clock, CudaClock
from head_shapes import HEADS as GPU_HEADS
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, paired_ratio, parse_for_backend, parser, start, write_json

import eagle_cuda
from eagle_cuda._extension import _C
from eagle_cuda.attention import rope_table
from eagle_cuda.draft import DraftHead, DraftLayer, draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import PackedWeight, pack_weight
from eagle_cuda.tree import DraftTree, TreeShape, empty_draft_tree
from eagle_cuda.verify import Accepted
from eagle_decode.loading import named_shape

BF16 = torch.bfloat16
H, INNER, HEADS, KV_HEADS, D, V, VD, AUX = 576, 1536, 9, 3, 64, 49152, 16384, 3
EPS = 1e-5
ACCEPTED = 2
MEMORY_PIECES, PIECE_BYTES = 12, 16 << 20  # that are read from memory: several times what caches hold
DEFAULTS = {  # backend -> what runs unless the command line says otherwise
    "cpu": {"context": 256},
    "cuda": {"context": CONTEXT},
}


class Shape(NamedTuple):
    name: str
    nodes: int
    levels: int
    top_k: int
    static: TreeShape | None = None


class Weights(NamedTuple):
    per_level: list[PackedWeight]
    fc: PackedWeight
    lm_head: torch.Tensor  # as it was before packing
    norm: torch.Tensor
    draft_to_target: torch.Tensor


def make_head(max_positions: int) -> tuple[DraftHead, Weights]:
    def matrix(n: int, k: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(n, k) * scale * k**-0.5).to(BF16)

    def gain() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(H)).to(BF16)

    layer = DraftLayer(
        qkv=pack_weight(matrix((HEADS + 2 * KV_HEADS) * D, 2 * H)),
        o=pack_weight(matrix(H, HEADS * D)),
        gate_up=pack_weight(matrix(2 * INNER, H), paired=True),
        down=pack_weight(matrix(H, INNER)),
        post_norm=gain(),
        input_norm=gain(),
        hidden_norm=gain(),
    )
    lm_head, fc = matrix(VD, H, 3.0), pack_weight(matrix(H, AUX * H))
    packed, norm = pack_weight(lm_head), gain()
    draft_to_target = torch.randperm(V)[:VD].sort().values.int()
    head = DraftHead(
        kind="eagle3", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D, norm_eps=EPS,
        embedding=torch.randn(V, H).to(BF16), fc=fc, lm_head=packed, layers=[layer], norm=norm,
        draft_to_target=draft_to_target, **rope_table(max_positions, D)._asdict(),
    )  # fmt: skip
    per_level = [layer.qkv, layer.o, layer.gate_up, layer.down, packed]
    return head, Weights(per_level, fc, lm_head, norm, draft_to_target)


class Phase:
    """One request between two cycles: calling it repeats the same draft phase."""

    def __init__(self, context: int, rows: int):
        self.head, self.weights = make_head(context + rows)
        self.cache = KVCache.empty(1, context + rows, KV_HEADS, D, dtype=BF16)
        for part in (self.cache.k, self.cache.v):
            part.copy_(torch.randn(part.shape))
        self.seq_lens = torch.tensor([context], dtype=torch.int32)
        self.features = torch.randn(1, ACCEPTED + 1, AUX * H).to(BF16)
        self.tokens = torch.randint(0, V, (1, ACCEPTED + 1), dtype=torch.int32)
        self.accepted = Accepted(
            path=torch.arange(ACCEPTED + 1, dtype=torch.int32)[None],
            num_accepted=torch.tensor([ACCEPTED], dtype=torch.int32),
            next_tokens=self.tokens[:, -1],
            finished=torch.zeros(1, dtype=torch.int32),
            new_seq_lens=self.seq_lens + ACCEPTED + 1,
        )
        self.coupling = {"temperature": torch.ones(1), "seeds": torch.tensor([7])}

    def draft(self, shape: Shape, coupled: bool, out: DraftTree) -> DraftTree:
        return draft(
            self.head, self.features, self.tokens, self.accepted, self.seq_lens, [self.cache],
            top_k=shape.top_k, levels=shape.levels, shape=shape.static, out=out,
            **(self.coupling if coupled else {}),
        )  # fmt: skip

    def first_level(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(target ids, log-probabilities) of the root's best children: norm and LM head by torch."""
        hidden = torch.empty(ACCEPTED + 1, H, dtype=BF16)
        extend_draft(
            self.head, self.features[0], self.tokens[0], [0, ACCEPTED + 1], self.seq_lens, [self.cache],
            hidden=hidden,
        )  # fmt: skip
        x = hidden[-1].float()
        x = x * torch.rsqrt((x * x).mean() + EPS) * self.weights.norm.float()
        best = torch.log_softmax(self.weights.lm_head.float() @ x.to(BF16).float(), dim=0).topk(count)
        return self.weights.draft_to_target[best.indices], best.values


def children_of(tree: DraftTree, node: int) -> list[int]:
    """In rank order, by the links."""
    children: list[int] = []
    child = int(tree.first_child[0, node])
    while child >= 0 and len(children) < tree.tokens.shape[1]:
        children.append(child)
        child = int(tree.next_sibling[0, child])
    return children


def is_static(tree: DraftTree, shape: TreeShape) -> bool:
    """Whether the nodes are those of the shape, each node's children standing for its ranks in order."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(shape.num_nodes + 1):
        if node not in paths:
            return False
        wanted = [path for path in shape.paths if path[:-1] == paths[node]]
        children = children_of(tree, node)
        if len(children) != len(wanted) or any(int(tree.parents[0, child]) != node for child in children):
            return False
        paths |= zip(children, wanted)
    return len(paths) == shape.num_nodes + 1


def check(phase: Phase, shape: Shape, coupled: bool) -> None:
    """The tree is full, well-formed, of its static shape if it has one; the root's children are torch's."""
    tree = phase.draft(shape, coupled, empty_draft_tree(1, shape.nodes))
    n, depths, parents = int(tree.num_nodes[0]), tree.depths[0].tolist(), tree.parents[0].tolist()
    sound = n == shape.nodes and int(tree.tokens[0, 0]) == int(phase.tokens[0, -1])
    sound = sound and parents[0] == -1 and max(depths) <= shape.levels
    for i in range(1, n):
        sound = sound and 0 <= parents[i] < i and depths[i] == depths[parents[i]] + 1
    sound = sound and (shape.static is None or is_static(tree, shape.static))
    if sound and not coupled:
        ids, log_probs = phase.first_level(shape.top_k)
        known = dict(zip(ids.tolist(), log_probs.tolist()))
        children = children_of(tree, 0)
        static = shape.static.paths if shape.static else [(rank,) for rank in range(len(children))]
        ranks = [path[0] for path in static if len(path) == 1]
        # Rounding differs, so that equally good candidates may change places: the scores must agree.
        scores = sorted(tree.scores[0, children].tolist(), reverse=True)
        sound = all(abs(score - float(log_probs[rank])) < 0.05 for score, rank in zip(scores, ranks))
        for i in children:
            want = known.get(int(tree.tokens[0, i]))
            sound = sound and (abs(float(tree.scores[0, i]) - want) < 0.05 if want is not None else True)
    if not sound:
        raise SystemExit(f"draft {shape.name}: the tree is not what it should be: {tree}")


def measure(phase: Phase, shapes: list[Shape], rounds: int) -> dict[str, Samples]:
    """Arms "memory" (pieces), "read" (a piece per matrix, the fusion matrix last) and "plain NAME", "coupled
    NAME"."""
    pieces = torch.ones(MEMORY_PIECES, PIECE_BYTES, dtype=torch.uint8)
    matrices = [*phase.weights.per_level, phase.weights.fc]
    arms: dict[str, object] = {
        "memory": [lambda p=p: _C.read_probe(p) for p in pieces],
        "read": [lambda p=p: _C.read_probe(p.data) for p in matrices],
    }
    for shape in shapes:
        for kind in ("plain", "coupled"):
            check(phase, shape, kind == "coupled")
            out = empty_draft_tree(1, shape.nodes)
            arms[f"{kind} {shape.name}"] = lambda s=shape, c=kind == "coupled", o=out: phase.draft(s, c, o)
    return interleave(arms, rounds=rounds)  # type: ignore[arg-type]


def report(
    phase: Phase, shapes: list[Shape], context: int, samples: dict[str, Samples], console: Console
) -> list[dict]:
    level = sum(p.data.numel() for p in phase.weights.per_level)
    fc = phase.weights.fc.data.numel()
    committed = 2 * context * KV_HEADS * D * BF16.itemsize
    rate = (level + fc) / samples["read"].minimum
    memory = MEMORY_PIECES * PIECE_BYTES / samples["memory"].minimum
    rates = f"read {rate / 1e9:.1f} GB/s, from memory {memory / 1e9:.1f}"
    table = Table(
        title=f"draft, bf16, {level / 1e6:.1f} MB of head a level, {fc / 1e6:.1f} MB of fusion, {context} "
        f"rows; {rates}; {eagle_cuda.num_threads()} threads"
    )
    columns = ("tree", "kind", "MB", "floor ms", "ms", "median ms", "of floor", "x memory", "x plain, paired")
    for column in columns:
        table.add_column(column, justify="right")
    results = []
    for shape in shapes:
        size = shape.levels * (level + committed) + fc
        for kind in ("plain", "coupled"):
            arm, plain = samples[f"{kind} {shape.name}"], samples[f"plain {shape.name}"]
            row = {
                "tree": shape.name,
                "nodes": shape.nodes,
                "levels": shape.levels,
                "top_k": shape.top_k,
                "coupled": kind == "coupled",
                "bytes": size,
                "bytes_per_level": level,
                "floor_milliseconds": size / rate * 1e3,
                "milliseconds": arm.minimum * 1e3,
                "median_milliseconds": arm.median * 1e3,
                "share_of_floor": size / rate / arm.minimum,
                "memory_gigabytes_per_second": memory / 1e9,
                "times_memory": arm.minimum * memory / size,
                "paired_against_plain": paired_ratio(arm, plain),
            }
            results.append(row)
            table.add_row(
                shape.name,
                kind,
                f"{size / 1e6:.1f}",
                f"{row['floor_milliseconds']:.2f}",
                f"{row['milliseconds']:.2f}",
                f"{row['median_milliseconds']:.2f}",
                f"{row['share_of_floor']:.0%}",
                f"{row['times_memory']:.2f}",
                f"{row['paired_against_plain']:.2f}",
            )
    console.print(table)
    return results


def parse_tree(text: str) -> Shape:
    parts = text.split(":")
    if len(parts) == 3 and all(part.isdecimal() for part in parts):
        nodes, levels, top_k = map(int, parts)
        return Shape(f"chain {levels}" if top_k == 1 else text, nodes, levels, top_k)
    try:
        static = named_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected nodes:levels:top_k or a static tree: {error}") from None
    return Shape(text, static.num_nodes + 1, static.levels, static.top_k, static)


def on_cpu(options: argparse.Namespace, console: Console) -> dict[str, object]:
    with torch.inference_mode():
        spare = ACCEPTED + 1 + max((s.levels - 1) * s.top_k for s in options.trees)
        phase = Phase(options.context, spare)
        samples = measure(phase, options.trees, options.rounds)
        return {"draft": report(phase, options.trees, options.context, samples, console)}


def on_gpu(options: argparse.Namespace, console: Console, clock: Clock, device: torch.device) -> None:
    from draft_gpu import Settings, run
    from draft_report import show
    from gpu_report import stated
    from gpu_timing import Budget, measure_ceilings

    budget, rows = Budget(options.minutes), []
    with torch.no_grad():
        ceilings, details = measure_ceilings(clock, device)
        console.print(stated(ceilings), details, highlight=False, markup=False)
        settings = Settings(
            rounds=options.rounds,
            cycle=Cycle(context=options.context),
            formats=options.formats,
            tuned=options.tuned,
            ceilings=ceilings,
        )
        for row in run(options.heads, settings, clock, device, budget, console.log):
            rows.append(row)
            if options.json:  # after every case: whatever happens, what was measured is kept
                write_json(options.json, {"ceilings": ceilings._asdict() | details, "draft": rows})
    show(rows, ceilings, console)


def floors(options: argparse.Namespace, context: int, console: Console) -> dict[str, object]:
    from draft_report import show_floors

    ceilings, cycle = given(options.ceilings), Cycle(context=context)
    rows = [row_of(head, form, cycle, ceilings) for head in options.heads for form in options.formats]
    show_floors(rows, ceilings, console)
    return {"ceilings": ceilings._asdict(), "floors": rows}


def parse() -> argparse.Namespace:
    trees = [parse_tree(text) for text in ("4:3:2", "8:4:4", "32:5:8", "32:6:8", "5:4:1")]
    line = parser(__doc__, rounds=30)
    line.add_argument("--backend", choices=list(DEFAULTS), help="default: cuda where there is a GPU")
    line.add_argument("--trees", type=parse_tree, nargs="+", default=trees, metavar="TREE",
                      help="on the CPU: nodes:levels:top_k, mc_sim_7b_63, chain:N, a JSON file")  # fmt: skip
    line.add_argument("--context", type=int, help="committed rows in the head's cache")
    line.add_argument("--heads", nargs="+", default=list(GPU_HEADS), choices=list(GPU_HEADS), help="on a GPU")
    line.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, help="on a GPU")
    line.add_argument("--tuned", nargs="*", default=[], choices=list(GPU_HEADS),
                      help="heads whose products torch.compile tunes: a minute each")  # fmt: skip
    line.add_argument("--minutes", type=float, help="no head begins that would end later")
    return parse_for_backend(line, DEFAULTS, "heads")


def main() -> None:
    options = parse()
    console = start()
    if options.backend == "cuda" and torch.cuda.is_available() and not options.floors:
        on_gpu(options, console, CudaClock(), torch.device("cuda"))
        return
    results: dict[str, object] = on_cpu(options, console) if options.backend == "cpu" else {}
    results |= floors(options, options.context if options.backend == "cuda" else CONTEXT, console)
    if not torch.cuda.is_available():
        console.print("No GPU is here: floors only, nothing was timed on one.")
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
