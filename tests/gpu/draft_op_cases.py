"""The cases of draft's ops for op_cases.py, of its Make: arrays and the call.

The head is EAGLE-3's, of weights for which no sum depends on its order, which is each backend's own. Rows of
weights with one entry that is not zero give sums of one term; queries are zero, so that all keys count alike,
and values small integers, as embeddings of +-1 have the norm 1; logits are so far apart that exponentials are
0 or 1.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from eagle_cuda.attention import rope_table
from eagle_cuda.draft import DraftHead, DraftLayer, draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import pack_weight
from eagle_cuda.tree import DraftTree, TreeShape

Arrays = dict[str, torch.Tensor]
BATCH, ROWS, TOP_K, LEVELS, NODES = 4, 3, 3, 3, 17
HIDDEN, FEATURES, HEADS, DIM, INNER, VOCAB, DRAFT_VOCAB = 40, 48, 2, 64, 24, 97, 61
PAGES, PAGE_SIZE = 8, 16
DYNAMIC = {"top_k": TOP_K, "levels": LEVELS}
STATIC = {
    "shape": TreeShape(
        [(0,), (1,), (2,), (0, 1), (0, 2), (1, 0), (2, 0), (2, 2), (0, 2, 0), (2, 0, 0), (2, 0, 1), (2, 2, 2)]
    )
}
WEIGHTS = ("fc", "lm_head", "qkv", "o", "gate_up", "down")
NORMS = ("input_norm", "hidden_norm", "post_norm")


def picks(make: Any, rows: int, columns: int, scale: int = 1) -> torch.Tensor:
    """One entry a row, an integer of 1 to 3 times `scale` with a sign."""
    weight = torch.zeros(rows, columns)
    signs = make.integers(0, 2, rows) * 2 - 1
    weight[torch.arange(rows), make.integers(0, columns, rows).long()] = (
        make.integers(1, 4, rows) * signs * scale
    ).float()
    return weight.bfloat16()


def arrays_of_head(make: Any) -> Arrays:
    values = torch.zeros(DIM, 2 * HIDDEN)  # of embeddings alone, which are whole numbers behind the norm
    values[:, :HIDDEN] = picks(make, DIM, HIDDEN) + picks(make, DIM, HIDDEN)
    queries = torch.zeros(HEADS * DIM, 2 * HIDDEN, dtype=torch.bfloat16)
    cos, sin = rope_table(DIM, 64)
    return {
        "embedding": (make.integers(0, 2, VOCAB, HIDDEN) * 2 - 1).bfloat16(),
        "fc": picks(make, HIDDEN, FEATURES),
        "lm_head": picks(make, DRAFT_VOCAB, HIDDEN, 1 << 16),
        "qkv": torch.cat([queries, picks(make, DIM, 2 * HIDDEN), values.bfloat16()]),
        "o": picks(make, HIDDEN, HEADS * DIM),
        "gate_up": picks(make, 2 * INNER, HIDDEN),
        "down": picks(make, HIDDEN, INNER),
        "norm": (1 + make.normal(HIDDEN) / 4).bfloat16(),
        "input_norm": make.integers(1, 3, HIDDEN).bfloat16(),
        "hidden_norm": (1 + make.normal(HIDDEN) / 4).bfloat16(),
        "post_norm": (1 + make.normal(HIDDEN) / 4).bfloat16(),
        "draft_to_target": torch.randperm(VOCAB, generator=make.generator)[:DRAFT_VOCAB].sort().values.int(),
        "cos": cos,
        "sin": sin,
        "k_cache": make.normal(PAGES, PAGE_SIZE, 1, DIM).bfloat16(),
        "v_cache": make.integers(-8, 8, PAGES, PAGE_SIZE, 1, DIM).bfloat16(),
        "page_table": torch.randperm(PAGES, generator=make.generator).int().reshape(BATCH, -1),
    }


def head_in(a: Arrays) -> DraftHead:
    packed = {name: pack_weight(a[name], paired=name == "gate_up") for name in WEIGHTS}
    layer = DraftLayer(
        **{name: packed[name] for name in WEIGHTS[2:]},
        **{name: a[name] for name in NORMS},
    )
    return DraftHead(
        kind="eagle3", num_heads=HEADS, num_kv_heads=1, head_dim=DIM, norm_eps=1e-6, layers=[layer],
        fc=packed["fc"], lm_head=packed["lm_head"],
        **{name: a[name] for name in ("embedding", "cos", "sin", "norm", "draft_to_target")},
    )  # fmt: skip


def caches_in(a: Arrays) -> list[KVCache]:
    return [KVCache(a["k_cache"], a["v_cache"], a["page_table"])]


def arrays_of_extend_draft(make: Any) -> Arrays:
    """As many rows of every request: the host knows of no absent one."""
    return {
        **arrays_of_head(make),
        "features": make.normal(BATCH, ROWS, FEATURES).bfloat16(),
        "tokens": make.integers(-1, VOCAB + 1, BATCH, ROWS),
        "seq_lens": make.integers(0, 20, BATCH),
        "hidden": make.garbage(BATCH, ROWS, HIDDEN // 2).view(torch.bfloat16),
    }


def call_extend_draft(a: Arrays) -> None:
    rows = [a[name].flatten(0, 1) for name in ("features", "tokens")]
    offsets = [ROWS * request for request in range(len(a["seq_lens"]) + 1)]
    hidden = a["hidden"].view(-1, HIDDEN)
    extend_draft(head_in(a), *rows, offsets, a["seq_lens"], caches_in(a), hidden=hidden)


def arrays_of_draft(make: Any) -> Arrays:
    """Trees with room for every candidate of two levels: the CPU leaves out the cache rows of nodes that
    cannot be wanted, the device does not."""
    num_accepted = make.integers(0, ROWS, BATCH)
    num_accepted[-1] = -1
    tree = {name: make.garbage(BATCH, NODES) for name in DraftTree._fields}
    tree["scores"] = tree["scores"].view(torch.float32)
    tree["mask"], tree["num_nodes"] = make.garbage(BATCH, NODES, 1), make.garbage(BATCH)
    return {
        **arrays_of_head(make),
        **tree,
        "features": make.normal(BATCH, NODES, FEATURES).bfloat16(),
        "target_tokens": make.integers(0, VOCAB, BATCH, NODES),
        "path": make.integers(0, NODES, BATCH, ROWS),
        "num_accepted": num_accepted,
        "seq_lens": make.integers(0, 20, BATCH),
        "node_limit": make.integers(1 + TOP_K + TOP_K**2, NODES + 1, BATCH),
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.0]),
        "seeds": make.integers(-(2**62), 2**62, BATCH, dtype=torch.int64),
    }


def call_draft(a: Arrays, tree: dict[str, Any]) -> None:
    accepted = SimpleNamespace(path=a["path"], num_accepted=a["num_accepted"])
    inputs = a["features"], a["target_tokens"], accepted, a["seq_lens"], caches_in(a)
    options = {name: a[name] for name in ("node_limit", "temperature", "seeds")}
    out = DraftTree(*(a[name] for name in DraftTree._fields))
    draft(head_in(a), *inputs, tau=1.25, out=out, **tree, **options)


CASES = {
    "extend_draft": (arrays_of_extend_draft, call_extend_draft),
    "draft": (arrays_of_draft, partial(call_draft, tree=DYNAMIC)),
    "draft, static tree": (arrays_of_draft, partial(call_draft, tree=STATIC)),
}
