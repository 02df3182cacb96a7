"""The CUDA kernels of attention: their launch shapes and limits. What holds on every backend runs on the CPU
too."""

from __future__ import annotations

import pytest
import torch

from attention_requests import (
    NAN,
    Request,
    attend_batch,
    build_cache,
    chain,
    check_against_fp64,
    int32,
    nodes_of,
    random_request,
    random_tree,
    same,
)
from eagle_cuda.attention import tree_attention
from eagle_cuda.kv_cache import KVCache
from reference import attention as reference
from workspace_checks import check_workspace


def attend_in_batch_of(tree: Request, batch: int, page_size: int, window: int = 0):
    """The request in a batch whose others are empty: the more there are, the fewer blocks a request has."""
    cache = build_cache([tree], page_size)
    nodes, heads, dim = tree.q.shape
    q = torch.full((batch, nodes, heads, dim), NAN).to(tree.q.dtype)
    at = batch // 2
    q[at] = tree.q
    mask = torch.zeros((batch, nodes, -(-nodes // 32)), dtype=torch.int32)
    mask[at] = reference.mask_words(tree.parents, nodes)
    table = torch.full((batch, cache.page_table.shape[1]), -1, dtype=torch.int32)
    table[at] = cache.page_table[0]
    counts, lengths = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    counts[at], lengths[at] = nodes, tree.seq_len
    lse = torch.zeros((batch, nodes, heads))
    out = tree_attention(
        q,
        cache._replace(page_table=table),
        seq_lens=lengths,
        num_nodes=counts,
        mask=mask,
        window=window,
        lse=lse,
    )
    return out[at], lse[at]


@pytest.mark.op("tree_attention")
@pytest.mark.parametrize(
    ("seq_len", "window", "codes"),
    [(4300, 0, "none"), (4100, 2500, "none"), (2047, 0, "none"), (290, 100, "none"), (4100, 2500, "rows")],
)
def test_chunks_groups_or_everything_to_a_block(seq_len, window, codes):
    """A block for each chunk (batch 1), for several groups (88), for everything of a request (300)."""
    generator = torch.Generator().manual_seed(seq_len)
    tree = random_request(seq_len, random_tree(5, generator), 2, 1, 64, torch.bfloat16, generator, codes)
    alone = attend_in_batch_of(tree, 1, 64, window)
    check_against_fp64(tree, *alone, window)
    for batch in (88, 300):
        same(attend_in_batch_of(tree, batch, 64, window), alone)
    plain = tree.plain(4)
    same(attend_in_batch_of(plain, 300, 16, window), nodes_of(alone, [4]))


@pytest.mark.op("tree_attention")
# Unchecked: those for which a smaller case takes as many blocks of rows.
@pytest.mark.parametrize(
    ("heads", "dim", "nodes", "codes"),
    [
        (64, 64, 9, "none"),
        pytest.param(8, 128, 60, "none", marks=pytest.mark.unchecked),
        (4, 256, 40, "none"),
        pytest.param(16, 80, 33, "none", marks=pytest.mark.unchecked),
        (16, 128, 20, "rows"),
        (8, 256, 18, "tensor"),
    ],
)
def test_many_rows_of_one_key_head(heads, dim, nodes, codes):
    """Several warps, and several blocks of rows where they fill more than one."""
    generator = torch.Generator().manual_seed(dim)
    tree = random_request(350, random_tree(nodes, generator), heads, 1, dim, torch.bfloat16, generator, codes)
    together = attend_in_batch_of(tree, 1, 16)
    check_against_fp64(tree, *together)
    same(attend_in_batch_of(tree, 300, 16), together)  # as few blocks of rows as can be
    for node in (0, nodes - 1):
        same(attend_in_batch_of(tree.plain(node), 1, 16), nodes_of(together, [node]))


@pytest.mark.op("tree_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_that_begin_anywhere(dtype):
    """Addresses and strides that are no multiples of 16 bytes, or of a pair of elements."""
    generator = torch.Generator().manual_seed(3)
    tree = random_request(150, random_tree(6, generator), 4, 2, 64, dtype, generator)
    want = attend_batch([tree])[0][0]
    rows = len(tree.k)

    def shifted(x, shift):
        wide = torch.full((1, *x.shape[:-1], x.shape[-1] + 3), NAN).to(dtype)[
            ..., shift : shift + x.shape[-1]
        ]
        wide[0] = x
        return wide

    out = shifted(torch.zeros_like(tree.q), 1)
    cache = KVCache(shifted(tree.k, 1), shifted(tree.v, 3))
    assert cache.k.shape == (1, rows, 2, 64)
    tree_attention(
        shifted(tree.q, 2),
        cache,
        seq_lens=int32([150]),
        num_nodes=int32([6]),
        mask=reference.mask_words(tree.parents, 6)[None],
        out=out,
    )
    assert torch.equal(out[0], want)


@pytest.mark.op("tree_attention")
def test_a_workspace(backend):
    """Partial results of three chunks."""
    generator = torch.Generator().manual_seed(5)
    tree = random_request(600, random_tree(5, generator), 2, 1, 64, torch.bfloat16, generator)
    cache = build_cache([tree], 16)
    lse = torch.zeros(1, 5, 2)
    out = torch.zeros_like(tree.q[None])
    mask = reference.mask_words(tree.parents, 5)[None]

    def outputs(workspace):
        options = {"seq_lens": int32([600]), "num_nodes": int32([5]), "mask": mask, "lse": lse, "out": out}
        return [tree_attention(tree.q[None], cache, **options, workspace=workspace).clone(), lse.clone()]

    check_workspace(outputs, backend, [out, lse])


@pytest.mark.op("tree_attention")
@pytest.mark.parametrize("seq_len", [160, 161, 175])
def test_branches_of_31_levels(seq_len):
    """Two chains that take turns in the slots: no node below the first level stands at its slot."""
    generator = torch.Generator().manual_seed(seq_len)
    parents = [-1, 0, *range(61)]
    tree = random_request(seq_len, parents, 2, 1, 64, torch.bfloat16, generator)
    got = attend_batch([tree], page_size=16)[0]
    check_against_fp64(tree, *got)
    for node in (32, 45, 61, 62):
        same(attend_batch([tree.plain(node)])[0], nodes_of(got, [node]))


@pytest.mark.op("tree_attention")
@pytest.mark.unchecked
def test_a_branching_tree_of_256_nodes():
    """The widest mask, eight words: every node is what plain decoding computes where it is tried."""
    generator = torch.Generator().manual_seed(256)
    parents = [-1, *(int(i * 0.8) for i in range(255))]  # one child or two of every node
    depth = [len(reference.ancestors(parents, node)) - 1 for node in range(256)]
    assert 8 < max(depth) <= 31
    tree = random_request(290, parents, 2, 1, 64, torch.bfloat16, generator)
    got = attend_batch([tree], page_size=16)[0]
    check_against_fp64(tree, *got)
    for node in (0, 31, 32, 128, 200, 255):
        same(attend_batch([tree.plain(node)])[0], nodes_of(got, [node]))


@pytest.mark.op("tree_attention")
def test_long_chains_and_trunks(backend):
    """A chain may be longer than 31 levels, and so may the trunk of a tree: its slots are its positions."""
    generator = torch.Generator().manual_seed(31)
    for parents in (chain(130), [*chain(70), *([69] * 5), *range(70, 95)]):
        tree = random_request(230, parents, 2, 1, 64, torch.bfloat16, generator)
        got = attend_batch([tree], page_size=16)[0]
        check_against_fp64(tree, *got)
        for node in (0, 31, 32, 47, 48, len(parents) - 1):
            same(attend_batch([tree.plain(node)])[0], nodes_of(got, [node]))
    if backend == "cpu":
        return
    # A fork more than 31 levels above a node: NaN instead of a wrong result, and for that node alone. Slot 1
    # is a second child of the root, so that the long path leaves its positions at once.
    forked = [-1, 0, 0, *range(2, 59)]
    tree = random_request(230, forked, 2, 1, 64, torch.bfloat16, generator)
    out, lse = attend_batch([tree])[0]
    deep = [len(reference.ancestors(forked, node)) - 1 for node in range(len(forked))]
    beyond = [(230 + depth - 31) // 16 * 16 > 231 for depth in deep]  # the common pass takes an ancestor
    assert any(beyond)
    for node, wrong in enumerate(beyond):
        assert bool(torch.isnan(out[node]).all()) == wrong
        assert bool(torch.isnan(lse[node]).all()) == wrong
