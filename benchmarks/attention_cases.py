"""What the attention benchmark runs, free of any device: shapes and their order, trees and masks, floors.

A floor is what no kernel of this kind can do without, at stated rates. Bytes of memory: keys and values of
the prefix once per KV head and tile of 256 packed rows (a row is a node and a query head), those of the tail
once per KV head, queries, output, mask and page table once, and one partial result for each row and each 2048
positions, written and read. Operations: two for every multiply-add that the mask asks for. The floor is the
longer of the two. A tree's tail, its last 32 to 47 positions, is loaded again for every node; those loads
find it in the cache on the chip and are listed beside the floor, not in it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from ceilings import Ceilings

from eagle_cuda.tree import DraftTree, tree_from_parents

ELEMENT = torch.bfloat16.itemsize
TILE_ROWS = 256
GROUP = 2048  # positions whose partials are folded among themselves first
MAX_DEPTH = 8


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


SHAPES = {
    "smollm2": Shape(9, 3, 64, 30),
    "llama8b": Shape(32, 8, 128, 32),
    "vicuna13b": Shape(40, 40, 128, 40),
}


class Case(NamedTuple):
    shape: str
    batch: int
    context: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.shape} B={self.batch} context={self.context} q={self.nodes}"


# Microseconds that we aim at on an H200 (page size 16).
AIMS = {
    Case("llama8b", 1, 32768, 16): 37.0,
    Case("llama8b", 1, 2048, 60): 8.0,
    Case("llama8b", 1, 32768, 60): 68.0,
}
AIM_OVER_FLASHINFER, AIM_CONTEXT = 1.5, 8192  # times as fast, in contexts up to this one


def importance(case: Case) -> tuple:
    """Key to sort cases by: those with an aim in its order, then small batches before large, grouped heads
    before others, contexts with an aim over FlashInfer before longer ones."""
    aim = list(AIMS).index(case) if case in AIMS else len(AIMS)
    grouped = SHAPES[case.shape].group > 1
    long = case.context > AIM_CONTEXT
    return aim, case.batch, not grouped, long, -case.nodes, case.context


# ---- trees and masks ---------------------------------------------------------------------------------


def random_parents(nodes: int, seed: int) -> list[int]:
    """Parents of a tree as drafting makes them: a best path first, then nodes that hang anywhere above
    MAX_DEPTH."""
    path = min(nodes - 1, MAX_DEPTH, 1 + nodes // 4)
    draws = torch.rand(nodes, generator=torch.Generator().manual_seed(seed)).tolist()
    parents, depths = [-1], [0]
    for i in range(1, nodes):
        open_nodes = [node for node in range(i) if depths[node] < MAX_DEPTH]
        parents.append(i - 1 if i <= path else open_nodes[int(draws[i] * len(open_nodes))])
        depths.append(depths[parents[i]] + 1)
    return parents


def random_trees(batch: int, nodes: int, seed: int = 0) -> DraftTree:
    """A tree of its own for every request."""
    parents = [random_parents(nodes, seed + b) for b in range(batch)]
    return tree_from_parents([[0] * nodes] * batch, parents)


def sees(mask: torch.Tensor) -> torch.Tensor:
    """[B, N, N] bool of a tree's mask words: column is an ancestor of the row, or the row itself."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return (mask.long()[..., columns // 32] >> columns % 32 & 1).bool()


def visible(mask: torch.Tensor, context: int) -> torch.Tensor:
    """[B, N, context + N] bool: which keys each node sees, the prefix first."""
    prefix = torch.ones(*mask.shape[:2], context, dtype=torch.bool, device=mask.device)
    return torch.cat([prefix, sees(mask)], dim=2)


def additive(seen: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, group * N, keys]: 0 where seen and -inf elsewhere; the rows of a KV head's query heads in turn.
    Rows begin at multiples of 16 elements: otherwise torch's kernels would copy the mask at every call."""
    batch, nodes, keys = seen.shape
    width = -(-keys // 16) * 16
    bias = torch.full((batch, 1, group * nodes, width), -torch.inf, dtype=dtype, device=seen.device)
    bias = bias[..., :keys]
    bias.view(batch, group, nodes, keys).masked_fill_(seen[:, None], 0.0)
    return bias


def mask_mod(mask: torch.Tensor, context: int):
    """FlexAttention's mask function: reads the tree's mask words as they are."""
    nodes = mask.shape[1]

    def visible_to(b, h, row, key):
        node = (key - context).clamp(0, nodes - 1)
        return (key < context) | ((mask[b, row, node // 32] >> (node % 32)) & 1).bool()

    return visible_to


def packed_bits(seen: torch.Tensor) -> torch.Tensor:
    """uint8: each request's [N, keys] as one string of bits, lowest bit first, padded to whole bytes: what
    FlashInfer reads."""
    flat = seen.flatten(1)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).view(len(flat), -1, 8)
    weights = 2 ** torch.arange(8, device=seen.device)
    return (padded * weights).sum(-1).to(torch.uint8).flatten()


def tail_shift(context: int, head_dim: int) -> float:
    """What to add to every element of a tree's keys, where queries are 1 on average: each of them then weighs
    about as much as a sixteenth of the prefix, so that a wrong mask shows however long the context is."""
    return math.log(max(context / 16, 1)) / math.sqrt(head_dim)


# ---- floors ------------------------------------------------------------------------------------------


class Floor(NamedTuple):
    kv_bytes: int  # the prefix: once per KV head and tile of rows
    tail_bytes: int
    q_bytes: int
    out_bytes: int
    partials_bytes: int
    mask_bytes: int
    tail_loads_bytes: int  # beside the floor
    operations: int

    @property
    def bytes(self) -> int:
        return sum(self[:6])

    def seconds(self, ceilings: Ceilings) -> tuple[float, str]:
        """(the floor, what sets it)."""
        return ceilings.seconds(self.bytes, self.operations)


def floor(case: Case, depths: torch.Tensor, page_size: int = 0) -> Floor:
    """What the case cannot do without. depths: [B, N] of its trees; page_size: 0 for no page table."""
    shape, (batch, nodes) = SHAPES[case.shape], depths.shape
    position = case.context + depths.long()
    limit = ((position - 31).clamp(min=0) // 16) * 16  # where a node's tail begins
    row = 2 * shape.kv_heads * shape.head_dim * ELEMENT  # a position's keys and values
    tiles = -(-nodes * shape.group // TILE_ROWS)
    prefix = limit.amax(1)
    groups = -(-prefix // GROUP)
    rows = nodes * shape.heads
    partial = (shape.head_dim + 2) * 4
    table = batch * -(-(case.context + nodes) // page_size) * 4 if page_size else 0
    vectors = batch * rows * shape.head_dim * ELEMENT
    return Floor(
        kv_bytes=int(prefix.sum()) * row * tiles,
        tail_bytes=int((case.context + nodes - prefix).sum()) * row,
        q_bytes=vectors,
        out_bytes=vectors,
        partials_bytes=2 * int(groups.sum()) * rows * partial,
        mask_bytes=batch * nodes * -(-nodes // 32) * 4 + table,
        tail_loads_bytes=int((position + 1 - limit).sum()) * row,
        operations=4 * shape.heads * shape.head_dim * int((position + 1).sum()),
    )
