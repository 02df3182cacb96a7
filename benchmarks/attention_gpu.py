"""The GPU part of the attention benchmark: tree_attention and its peers, case by case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from attention_cases import AIMS, SHAPES, Case, floor, random_trees, tail_shift, visible
from ceilings import Ceilings
from gpu_arms import Variant, Variants, right, run_cases, time_arms
from gpu_timing import Budget, Clock
from peers.attention import PEERS, Inputs
from timing import Samples

from eagle_cuda.attention import tree_attention, tree_attention_workspace_bytes
from eagle_cuda.kv_cache import KVCache

OURS = "tree_attention"
TOLERANCE = 0.01  # of the largest output: bf16 rounds it, and most peers round the weights too
MAX_SETS = 160


@dataclass
class Settings:
    page_size: int
    rounds: int
    cold_bytes: int  # of distinct keys and values that calls go round
    arms: Sequence[str] = (OURS, *PEERS)
    absent: dict[str, str] = field(default_factory=dict)  # peer -> why
    ceilings: Ceilings | None = None


def make_inputs(case: Case, page_size: int, cold_bytes: int, device: torch.device) -> Inputs:
    """Random keys and values in shuffled pages: as many sets as come to cold_bytes."""
    shape, (_, batch, context, nodes) = SHAPES[case.shape], case
    generator = torch.Generator(device).manual_seed(1)
    tree = random_trees(batch, nodes)
    tree = type(tree)(*(part.to(device) for part in tree))
    rows = context + nodes
    pages = -(-rows // page_size)
    table = torch.randperm(batch * pages, generator=generator, device=device).int().view(batch, pages)
    size = 2 * batch * rows * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize
    sets = min(max(math.ceil(cold_bytes / size), 1), MAX_SETS)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)

    q = draw(batch, nodes, shape.heads, shape.head_dim) + 1
    caches, dense = [], []
    at = torch.arange(context, rows, device=device)
    for _ in range(sets):
        k, v = (draw(batch * pages, page_size, shape.kv_heads, shape.head_dim) for _ in range(2))
        k[table[:, at // page_size].long(), at % page_size] += tail_shift(context, shape.head_dim)
        caches.append(KVCache(k, v, table))
        dense.append(tuple(gather(part, table, rows) for part in (k, v)))
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Inputs(case, tree, q, seq_lens, caches, dense)


def gather(pages: torch.Tensor, table: torch.Tensor, rows: int) -> torch.Tensor:
    """[B, heads, rows, D] of a paged cache."""
    batch, (_, _, heads, dim) = len(table), pages.shape
    return pages[table.long()].view(batch, -1, heads, dim)[:, :rows].transpose(1, 2).contiguous()


def ours(inputs: Inputs) -> Variants:
    """Our kernel; its workspace is its own, as in a captured cycle."""

    def variant() -> Variant:
        out = torch.empty_like(inputs.q)
        size = tree_attention_workspace_bytes(inputs.q, inputs.caches[0])
        workspace = torch.empty(size, dtype=torch.uint8, device=inputs.q.device)

        def call(i: int) -> torch.Tensor:
            return tree_attention(
                inputs.q, inputs.caches[i], seq_lens=inputs.seq_lens, num_nodes=inputs.tree.num_nodes,
                mask=inputs.tree.mask, out=out, workspace=workspace if size else None,
            )  # fmt: skip

        return Variant(call)

    return {"paged": variant}


def expected(inputs: Inputs) -> torch.Tensor:
    """What attention over set 0 is, in float64."""
    shape, (batch, nodes, _, dim) = SHAPES[inputs.case.shape], inputs.q.shape
    hidden = ~visible(inputs.tree.mask, inputs.case.context)
    queries = inputs.q.view(batch, nodes, shape.kv_heads, shape.group, dim).permute(0, 2, 3, 1, 4)
    out = torch.empty(queries.shape, dtype=torch.float64, device=inputs.q.device)
    keys, values = inputs.dense[0]
    for b in range(batch):
        for head in range(shape.kv_heads):
            scores = queries[b, head].double() @ keys[b, head].double().T / math.sqrt(dim)
            weights = torch.softmax(scores.masked_fill(hidden[b], -torch.inf), dim=-1)
            out[b, head] = weights @ values[b, head].double()
    return out.permute(0, 3, 1, 2, 4).reshape(inputs.q.shape)


def measure(case: Case, settings: Settings, clock: Clock, device: torch.device) -> dict[str, object]:
    """The figures of one case. A wrong result of ours ends the run; a peer's failure is noted."""
    inputs = make_inputs(case, settings.page_size, settings.cold_bytes, device)
    want = expected(inputs)
    offered = {
        name: lambda make=ours if name == OURS else PEERS[name]: make(inputs) for name in settings.arms
    }
    records, samples = time_arms(
        case, offered, OURS, lambda name, got: right(got, want, TOLERANCE), clock=clock,
        sets=len(inputs.caches), rounds=settings.rounds, absent=settings.absent,
    )  # fmt: skip
    return row(case, settings, inputs, records, samples)


def row(
    case: Case,
    settings: Settings,
    inputs: Inputs,
    records: dict[str, dict],
    samples: dict[str, Samples],
) -> dict[str, object]:
    needed = floor(case, inputs.tree.depths.cpu(), settings.page_size)
    made: dict[str, object] = {
        **case._asdict(), "page_size": settings.page_size, "sets": len(inputs.caches),
        **needed._asdict(), "bytes": needed.bytes,
    }  # fmt: skip
    seconds, limit = needed.seconds(settings.ceilings)
    made |= {"floor_microseconds": seconds * 1e6, "floor": limit}
    if OURS in samples:
        mine = samples[OURS]
        made |= {
            "gigabytes_per_second": needed.bytes / mine.median / 1e9,
            "teraflops": needed.operations / mine.median / 1e12,
            "share_of_floor": seconds / mine.median,
        }
    if case in AIMS:
        made["aim_microseconds"] = AIMS[case]
    return made | {"arms": records}


def run(
    cases: Sequence[Case], settings: Settings, clock: Clock, device: torch.device, budget: Budget,
    progress: Callable[[str], None],
) -> Iterator[dict[str, object]]:  # fmt: skip
    """Rows of the cases in turn, until the time is up."""
    yield from run_cases(
        cases, lambda case: [measure(case, settings, clock, device)], Case._asdict, clock, budget, progress
    )
