"""Calls of every op with a CUDA kernel, as data: the arrays it reads and writes, and the call. A case is
called like its op; further ones of it, like "draft, static tree".

The arrays of every seed have the same shapes, and their last request is padding, as in a captured graph that
is larger than the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from eagle_cuda.attention import append_kv, tree_attention
from eagle_cuda.kv_cache import KVCache, compact_kv
from eagle_cuda.sampling import Sampled, SamplingState, gumbel_noise, sample_tokens
from eagle_cuda.tree import (
    Beam,
    Candidates,
    DraftTree,
    RetrieveIndices,
    TreeShape,
    build_tree,
    expand_tree,
    retrieve_indices,
    tree_from_parents,
)
from eagle_cuda.verify import Accepted, AcceptedByRejection, verify, verify_rejection
from gpu import draft_op_cases, linear_op_cases
from on_device import op_of, ops_with_kernels

Arrays = dict[str, torch.Tensor]
BATCH, TOP_K, LEVELS, NODES, VOCAB = 4, 4, 3, 12, 1031
CANDIDATES = TOP_K + (LEVELS - 1) * TOP_K**2
# Whose level 1 is the beam of expand_tree's arrays; the second beam has one row without a node.
SHAPE = TreeShape(
    [(rank,) for rank in range(TOP_K)]
    + [(0, 0), (0, 3), (1, 1), (2, 0), (3, 2)]
    + [(0, 3, 0), (1, 1, 2), (3, 2, 1), (3, 2, 3)]
)


class Case(NamedTuple):
    arrays: Callable[[int], Arrays]  # by seed; inputs, and outputs full of garbage
    call: Callable[[Arrays], object]


class Make:
    """Arrays of chance and of garbage."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def garbage(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.integers(-(2**31), 2**31 - 1, *shape).view(dtype)

    def log_probs(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).abs().neg().sort(-1, descending=True).values


def padding(values: torch.Tensor, value: int) -> torch.Tensor:
    values[-1] = value
    return values


def candidates_of(make: Make) -> Arrays:
    """Grown trees: level 1 below the root, then each level below one row of the level before."""
    parents = [-1] * TOP_K
    for level in range(2, LEVELS + 1):
        first = 0 if level == 2 else TOP_K + (level - 3) * TOP_K**2
        parents += [first + row for row in range(TOP_K) for _ in range(TOP_K)]
    scores = make.log_probs(BATCH, CANDIDATES)
    return {
        "candidate_tokens": make.integers(0, VOCAB, BATCH, CANDIDATES),
        "candidate_scores": scores,
        "candidate_parents": torch.tensor([parents] * BATCH, dtype=torch.int32),
    }


def tree_of(make: Make) -> Arrays:
    """Trees of 1 to NODES nodes with children of few different tokens; the last request is absent."""
    counts = [int(n) for n in make.integers(1, NODES + 1, BATCH - 1)] + [0]
    tokens = make.integers(0, 3, BATCH, NODES)
    parents = [[-1] + [int(make.integers(max(0, i - 3), i, 1)) for i in range(1, NODES)] for _ in counts]
    return dict(tree_from_parents(tokens, parents, torch.tensor(counts))._asdict())


def tree_in(a: Arrays) -> DraftTree:
    return DraftTree(*(a[name] for name in DraftTree._fields))


# ---- the ops ---------------------------------------------------------------------------------------


def arrays_of_expand_tree(seed: int) -> Arrays:
    make = Make(seed)
    words = (LEVELS * TOP_K + 31) // 32
    first = torch.arange(TOP_K, dtype=torch.int32).repeat(BATCH, 1)
    return {
        **candidates_of(make),
        "tokens": make.integers(0, VOCAB, BATCH, TOP_K, TOP_K),
        "log_probs": make.log_probs(BATCH, TOP_K, TOP_K),
        "num_accepted": padding(make.integers(0, 5, BATCH), -1),
        "beam_candidates": first.clone(),
        "beam_scores": make.log_probs(BATCH, TOP_K),
        "beam_tokens": make.integers(0, VOCAB, BATCH, TOP_K),
        "beam_rows": torch.zeros(BATCH, TOP_K, dtype=torch.int32),
        "beam_mask": (1 << first).unsqueeze(-1).expand(-1, -1, words).contiguous(),
    }


def call_expand_tree(a: Arrays, shape: TreeShape | None = None) -> None:
    candidates = Candidates(*(a[f"candidate_{name}"] for name in Candidates._fields))
    beam = Beam(*(a[f"beam_{name}"] for name in Beam._fields))
    options = {"level": 2, "levels": LEVELS, "num_accepted": a["num_accepted"], "shape": shape}
    expand_tree(a["tokens"], a["log_probs"], candidates, beam, **options)


def arrays_of_build_tree(seed: int) -> Arrays:
    make = Make(seed)
    tree = {name: make.garbage(BATCH, NODES) for name in DraftTree._fields}
    tree["scores"] = tree["scores"].view(torch.float32)
    tree["mask"], tree["num_nodes"] = make.garbage(BATCH, NODES, 1), make.garbage(BATCH)
    return {
        **candidates_of(make),
        **tree,
        "root_tokens": make.integers(0, VOCAB, BATCH),
        "node_limit": padding(make.integers(1, NODES + 1, BATCH), 0),
        "selected": make.garbage(BATCH, NODES),
    }


def call_build_tree(a: Arrays) -> None:
    candidates = Candidates(*(a[f"candidate_{name}"] for name in Candidates._fields))
    options = {"node_limit": a["node_limit"], "selected": a["selected"], "out": tree_in(a)}
    build_tree(a["root_tokens"], candidates, **options)


def arrays_of_retrieve_indices(seed: int) -> Arrays:
    make = Make(seed)
    return {
        **tree_of(make),
        "indices": make.garbage(BATCH, NODES, NODES),
        "num_leaves": make.garbage(BATCH),
    }


def call_retrieve_indices(a: Arrays) -> None:
    retrieve_indices(tree_in(a), out=RetrieveIndices(a["indices"], a["num_leaves"]))


def arrays_of_sample_tokens(seed: int) -> Arrays:
    make = Make(seed)
    return {
        **tree_of(make),
        "logits": make.normal(BATCH, NODES, VOCAB) * 4,
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.0]).roll(seed),
        "top_k": torch.tensor([0, 0, 40, 5], dtype=torch.int32).roll(seed),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.5]).roll(seed),
        "min_p": torch.tensor([0.0, 0.0, 0.05, 0.0]).roll(seed),
        "seeds": make.integers(-(2**62), 2**62, BATCH, dtype=torch.int64),
        "positions": make.integers(0, 10000, BATCH, NODES),
        "prompt_counts": make.integers(0, 2, BATCH, VOCAB),
        "output_counts": make.integers(-1, 2, BATCH, VOCAB),
        "repetition_penalty": torch.tensor([1.0, 1.3, 1.1, 0.8]).roll(seed),
        "presence_penalty": torch.tensor([0.0, 0.5, 0.0, -0.5]).roll(seed),
        "frequency_penalty": torch.tensor([0.0, 0.0, 0.7, 0.2]).roll(seed),
        "bias_tokens": make.integers(-1, 50, BATCH, 3),
        "bias_values": make.normal(BATCH, 3),
        "min_new_tokens": make.integers(0, 10000, BATCH),
        "prompt_lens": make.integers(0, 50, BATCH),
        "stop_tokens": make.integers(-1, VOCAB, BATCH, 5),
        "token_mask": make.integers(-(2**31), 2**31 - 1, BATCH, NODES, (VOCAB + 31) // 32),
        "out_tokens": make.garbage(BATCH, NODES),
        "out_log_probs": make.garbage(BATCH, NODES, dtype=torch.float32),
        "flags": make.garbage(BATCH, NODES),
        "top_tokens": make.garbage(BATCH, NODES, 6),
        "top_log_probs": make.garbage(BATCH, NODES, 6, dtype=torch.float32),
    }


def call_sample_tokens(a: Arrays) -> None:
    names = ("temperature", "seeds", "positions", "num_nodes", "top_k", "top_p", "min_p")
    out = Sampled(a["out_tokens"], a["out_log_probs"], a["flags"], a["top_tokens"], a["top_log_probs"])
    state = SamplingState(*(a[name] for name in SamplingState._fields))
    options = {name: a[name] for name in names}
    sample_tokens(a["logits"], **options, tree=tree_in(a), state=state, out=out)


def arrays_of_gumbel_noise(seed: int) -> Arrays:
    make = Make(seed)
    return {
        "seeds": make.integers(-(2**62), 2**62, BATCH, dtype=torch.int64),
        "positions": make.integers(0, 10000, BATCH),
        "noise": make.garbage(BATCH, VOCAB, dtype=torch.float32),
    }


def call_gumbel_noise(a: Arrays) -> None:
    gumbel_noise(a["seeds"], a["positions"], out=a["noise"])


def arrays_of_verify(seed: int) -> Arrays:
    make = Make(seed)
    return {
        **tree_of(make),
        "target_tokens": make.integers(0, 3, BATCH, NODES),
        "seq_lens": make.integers(0, 100, BATCH),
        "stop_tokens": make.integers(-1, 9, BATCH, 2),
        "budget": padding(make.integers(1, 9, BATCH), 0),
        "path": make.garbage(BATCH, NODES),
        **{name: make.garbage(BATCH) for name in Accepted._fields[1:]},
    }


def call_verify(a: Arrays) -> None:
    out = Accepted(*(a[name] for name in Accepted._fields))
    options = {"stop_tokens": a["stop_tokens"], "budget": a["budget"], "out": out}
    verify(tree_in(a), a["target_tokens"], a["seq_lens"], **options)


def arrays_of_verify_rejection(seed: int) -> Arrays:
    make = Make(seed)
    likely = torch.tensor([30.0, 20.0, 10.0])  # of the tokens that the trees hold
    target, draft = (make.normal(BATCH, NODES, VOCAB).exp() for _ in range(2))
    for probs in (target, draft):
        probs[..., :3] += likely * make.integers(1, 9, BATCH, NODES, 3)
    return {
        **tree_of(make),
        "target_probs": target,
        "draft_probs": draft,
        "seeds": make.integers(-(2**62), 2**62, BATCH, dtype=torch.int64),
        "seq_lens": make.integers(0, 100, BATCH),
        "stop_tokens": make.integers(-1, 9, BATCH, 2),
        "budget": padding(make.integers(1, 9, BATCH), 0),
        "path": make.garbage(BATCH, NODES),
        "emitted": make.garbage(BATCH, NODES),
        **{name: make.garbage(BATCH) for name in (*Accepted._fields[1:], "flags")},
    }


def call_verify_rejection(a: Arrays) -> None:
    names = ("draft_probs", "seeds", "stop_tokens", "budget")
    options = {name: a[name] for name in names}
    out = AcceptedByRejection(*(a[name] for name in AcceptedByRejection._fields))
    verify_rejection(tree_in(a), a["target_probs"], a["seq_lens"], scheme="sampled_tree", out=out, **options)


def arrays_of_compact_kv(seed: int) -> Arrays:
    make = Make(seed)
    pages, page_size, heads, dim = 8, 16, 2, 24
    jumps = make.integers(1, 3, BATCH, 5).cumsum(1, dtype=torch.int32)
    path = torch.cat([torch.zeros(BATCH, 1, dtype=torch.int32), jumps], 1)
    caches: Arrays = {}
    for side in ("k", "v"):
        for layer in range(2):
            caches[f"{side}_{layer}"] = make.garbage(pages, page_size, heads, dim)
        caches[f"{side}_2"] = make.garbage(pages, page_size, heads, dim // 4).view(torch.int8)
        caches[f"{side}_scale"] = make.normal(pages, page_size, heads)
    order = torch.randperm(pages, generator=make.generator).int()
    return {
        **caches,
        "page_table": order.reshape(BATCH, 2),
        "path": path,
        "num_accepted": padding(make.integers(0, 6, BATCH), -1),
        "seq_lens": make.integers(0, 20, BATCH),
    }


def call_compact_kv(a: Arrays) -> None:
    caches = [KVCache(a[f"k_{layer}"], a[f"v_{layer}"], a["page_table"]) for layer in range(2)]
    caches.append(KVCache(a["k_2"], a["v_2"], a["page_table"], a["k_scale"], a["v_scale"]))
    compact_kv(caches, a["path"], a["num_accepted"], a["seq_lens"], max_nodes=NODES)


def arrays_of_append_kv(seed: int) -> Arrays:
    make = Make(seed)
    pages, page_size, heads, dim = 8, 16, 2, 64
    return {
        "q": make.normal(BATCH, NODES, 3 * heads, dim),
        "k": make.normal(BATCH, NODES, heads, dim),
        "v": make.normal(BATCH, NODES, heads, dim),
        "k_cache": make.garbage(pages, page_size, heads, dim, dtype=torch.float32),
        "v_cache": make.garbage(pages, page_size, heads, dim, dtype=torch.float32),
        "page_table": torch.randperm(pages, generator=make.generator).int().reshape(BATCH, 2),
        "seq_lens": make.integers(0, 20, BATCH),
        "depths": make.integers(0, 5, BATCH, NODES),
        "num_nodes": padding(make.integers(1, NODES + 1, BATCH), 0),
        "cos": make.normal(40, dim // 2),
        "sin": make.normal(40, dim // 2),
        "q_norm": make.normal(dim),
        "k_norm": make.normal(dim),
        "q_out": make.garbage(BATCH, NODES, 3 * heads, dim, dtype=torch.float32),
    }


def call_append_kv(a: Arrays) -> None:
    names = ("seq_lens", "depths", "num_nodes", "cos", "sin", "q_norm", "k_norm", "q_out")
    cache = KVCache(a["k_cache"], a["v_cache"], a["page_table"])
    append_kv(a["q"], a["k"], a["v"], cache, **{name: a[name] for name in names})


def arrays_of_tree_attention(seed: int) -> Arrays:
    """Queries of zero attend to all keys alike, and values are small integers: every sum is exact, so that
    the order of the sums, which is each backend's own, does not show."""
    make = Make(seed)
    pages, page_size, heads, dim = 16, 16, 2, 64
    tree = tree_of(make)
    return {
        "q": torch.zeros(BATCH, NODES, 3 * heads, dim, dtype=torch.bfloat16),
        "k_cache": make.normal(pages, page_size, heads, dim).bfloat16(),
        "v_cache": make.integers(-8, 8, pages, page_size, heads, dim).bfloat16(),
        "page_table": torch.randperm(pages, generator=make.generator).int().reshape(BATCH, 4),
        "seq_lens": make.integers(0, 50, BATCH),
        "num_nodes": tree["num_nodes"],
        "mask": tree["mask"],
        "out": make.garbage(BATCH, NODES, 3 * heads, dim // 2).view(torch.bfloat16),
    }


def call_tree_attention(a: Arrays) -> None:
    cache = KVCache(a["k_cache"], a["v_cache"], a["page_table"])
    tree_attention(a["q"], cache, **{name: a[name] for name in ("seq_lens", "num_nodes", "mask", "out")})


_ALL = {
    **{
        name: Case(lambda seed, of=of: of(Make(seed)), call)
        for name, (of, call) in (linear_op_cases.CASES | draft_op_cases.CASES).items()
    },
    "expand_tree": Case(arrays_of_expand_tree, call_expand_tree),
    "expand_tree, static tree": Case(arrays_of_expand_tree, partial(call_expand_tree, shape=SHAPE)),
    "build_tree": Case(arrays_of_build_tree, call_build_tree),
    "retrieve_indices": Case(arrays_of_retrieve_indices, call_retrieve_indices),
    "sample_tokens": Case(arrays_of_sample_tokens, call_sample_tokens),
    "gumbel_noise": Case(arrays_of_gumbel_noise, call_gumbel_noise),
    "verify": Case(arrays_of_verify, call_verify),
    "verify_rejection": Case(arrays_of_verify_rejection, call_verify_rejection),
    "compact_kv": Case(arrays_of_compact_kv, call_compact_kv),
    "append_kv": Case(arrays_of_append_kv, call_append_kv),
    "tree_attention": Case(arrays_of_tree_attention, call_tree_attention),
}
CASES = {name: case for name, case in _ALL.items() if op_of(name) in ops_with_kernels()}
