"""tree_attention against fp64, and at its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention_requests import (
    DTYPES,
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
from compare import assert_same_bits
from eagle_cuda.attention import append_kv, tree_attention
from eagle_cuda.kv_cache import KVCache
from reference import attention as reference

# dtype, Hq, Hkv, D, page size, prefix lengths, nodes, window: every value of a column with every dtype,
# lengths around the chunks of 256 and groups of 2048 keys.
CASES = [
    ("bf16", 9, 3, 64, None, [512], 8, 0),
    ("bf16", 9, 3, 64, 16, [0, 255, 300], 33, 0),
    ("bf16", 4, 4, 80, 4, [257, 31], 1, 0),
    ("bf16", 8, 1, 96, 64, [100], 64, 50),
    ("bf16", 2, 1, 64, 16, [2050], 5, 0),
    ("bf16", 7, 1, 128, None, [250], 16, 0),
    ("bf16", 2, 2, 192, 1, [20], 7, 8),
    ("bf16", 6, 2, 256, 16, [256, 1], 9, 0),
    ("fp32", 9, 3, 64, 64, [300, 0], 32, 0),
    ("fp32", 5, 1, 80, None, [17], 6, 300),
    ("fp32", 4, 2, 96, 1, [255], 12, 0),
    ("fp32", 4, 4, 128, 4, [270], 31, 7),
    ("fp32", 3, 3, 192, 16, [64], 1, 0),
    ("fp32", 2, 1, 256, 64, [40, 513], 10, 260),
    ("fp16", 32, 1, 64, 16, [33], 4, 0),
    ("fp16", 4, 2, 80, 64, [260], 20, 0),
    ("fp16", 6, 6, 96, None, [0], 40, 3),
    ("fp16", 8, 2, 128, 1, [129], 3, 0),
    ("fp16", 3, 1, 192, 4, [254, 255, 256], 3, 0),
    ("fp16", 1, 1, 256, 16, [15], 18, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.op("tree_attention")
def test_tree_attention_matches_fp64(case):
    dtype, heads, kv_heads, dim, page_size, lengths, nodes, window = case
    generator = torch.Generator().manual_seed(nodes * 1000 + dim)
    requests = [
        random_request(
            n, random_tree(max(1, nodes - b), generator), heads, kv_heads, dim, DTYPES[dtype], generator
        )
        for b, n in enumerate(lengths)
    ]
    for request, (out, lse) in zip(requests, attend_batch(requests, page_size=page_size, window=window)):
        check_against_fp64(request, out, lse, window)


# Every group size, with two KV heads up to 8. Dtypes, head sizes and prefix lengths (none, a tail alone,
# common columns of one and of two chunks) take turns beside them.
GROUPS = [
    (group, list(DTYPES)[group % 3], (64, 80, 96, 128, 192, 256)[group % 6], (0, 37, 90, 300)[group % 4])
    for group in (*range(1, 17), 64)
]


@pytest.mark.parametrize(("group", "dtype", "dim", "seq_len"), GROUPS)
@pytest.mark.op("tree_attention")
def test_every_group_size(group, dtype, dim, seq_len):
    """FAULTS G10."""
    generator = torch.Generator().manual_seed(group)
    kv_heads = 2 if group <= 8 else 1
    tree = random_request(
        seq_len, random_tree(5, generator), group * kv_heads, kv_heads, dim, DTYPES[dtype], generator
    )
    got = attend_batch([tree], page_size=16)[0]
    check_against_fp64(tree, *got)
    same(attend_batch([tree.plain(4)])[0], nodes_of(got, [4]))


@pytest.mark.parametrize("seq_len", [128, 120, 256, 250])
@pytest.mark.op("tree_attention")
def test_siblings_of_a_star_do_not_see_each_other(seq_len):
    """FAULTS G5: prefixes that end at and off a tile's edge."""
    generator = torch.Generator().manual_seed(seq_len)
    star = random_request(seq_len, [-1] + [0] * 63, 2, 1, 64, torch.float32, generator)
    check_against_fp64(star, *attend_batch([star])[0])


@pytest.mark.op("tree_attention")
@pytest.mark.vast
def test_offsets_beyond_32_bits():
    """FAULTS G7: rows past element 2^31 of the pool, of which only the touched pages take memory."""
    generator = torch.Generator().manual_seed(18)
    tree = random_request(20, random_tree(4, generator), 2, 1, 64, torch.bfloat16, generator)
    pages = 2**31 // (16 * 64) + 4
    pool = torch.empty((pages, 16, 1, 128), dtype=torch.bfloat16)
    cache = KVCache(pool[..., :64], pool[..., 64:], int32([[pages - 1, pages - 3]]))
    for row in range(24):
        at = int(cache.page_table[0, row // 16]), row % 16
        cache.k[at], cache.v[at] = tree.k[row], tree.v[row]
    out = tree_attention(
        tree.q[None],
        cache,
        seq_lens=int32([20]),
        num_nodes=int32([4]),
        mask=reference.mask_words(tree.parents, 4)[None],
    )
    assert_same_bits(out[0], attend_batch([tree])[0][0])


def test_cases_are_pairwise():
    """Every dtype meets every head size, page size and a window."""
    assert {(c[0], c[3]) for c in CASES} == {(d, s) for d in DTYPES for s in (64, 80, 96, 128, 192, 256)}
    assert {(c[0], c[4]) for c in CASES} == {(d, s) for d in DTYPES for s in (None, 1, 4, 16, 64)}
    assert {c[0] for c in CASES if c[7]} == set(DTYPES)


# ---- edges ---------------------------------------------------------------------------------------


@pytest.mark.op("tree_attention")
def test_a_window_wider_than_the_context_is_none_and_of_one_is_the_value():
    generator = torch.Generator().manual_seed(11)
    tree = random_request(300, random_tree(9, generator), 4, 2, 64, torch.float32, generator)
    same(attend_batch([tree], window=10**6)[0], attend_batch([tree])[0])
    out, _ = attend_batch([tree], window=1)[0]
    assert_same_bits(out, tree.v[300:].repeat_interleave(2, dim=1))


@pytest.mark.op("tree_attention")
def test_missing_pages_count_as_masked():
    generator = torch.Generator().manual_seed(12)
    tree = random_request(70, random_tree(6, generator), 4, 2, 64, torch.float32, generator)
    cache = build_cache([tree], 16)
    cache.page_table[0, 1] = 10**9
    cache.page_table[0, 3] = -1
    out, lse = torch.zeros(1, 6, 4, 64), torch.zeros(1, 6, 4)
    tree_attention(
        tree.q[None],
        cache,
        seq_lens=int32([70]),
        num_nodes=int32([6]),
        mask=reference.mask_words(tree.parents, 6)[None],
        out=out,
        lse=lse,
    )
    check_against_fp64(tree, out[0], lse[0], missing={*range(16, 32), *range(48, 64)})


@pytest.mark.parametrize("seq_len", [2**31 - 1, 10**6, 64, -1, -(2**31)])
@pytest.mark.op("tree_attention")
def test_garbage_lengths_and_counts_give_finite_results(seq_len):
    generator = torch.Generator().manual_seed(13)
    q = torch.randn((2, 3, 4, 64), generator=generator)
    for table in (None, int32([[0, 2**31 - 1, 1], [-(2**31), -1, 7]])):
        cache = KVCache(torch.ones(2, 32, 2, 64), torch.ones(2, 32, 2, 64), table)
        out = torch.full((2, 3, 4, 64), 77.0)
        tree_attention(
            q,
            cache,
            seq_lens=int32([seq_len, 5]),
            num_nodes=int32([1000, -4]),
            mask=torch.full((2, 3, 1), -1).int(),
            out=out,
        )
        assert bool(torch.isfinite(out).all())
        assert bool((out[1] == 77.0).all())
        before = cache.k.clone()
        append_kv(
            q,
            q[:, :, :2],
            q[:, :, :2],
            cache,
            seq_lens=int32([seq_len, -3]),
            depths=torch.full((2, 3), 2**31 - 1).int(),
            num_nodes=int32([1000, -4]),
            cos=torch.ones(4, 32),
            sin=torch.ones(4, 32),
        )
        if seq_len >= 96:  # beyond every page
            assert_same_bits(cache.k, before)


@pytest.mark.op("tree_attention")
def test_malformed_masks():
    generator = torch.Generator().manual_seed(14)
    tree = random_request(10, random_tree(40, generator), 2, 1, 64, torch.float32, generator)
    right = attend_batch([tree])[0]
    words = reference.mask_words(tree.parents, 40)
    own_missing, above = words.clone(), words.clone()
    for node in range(40):
        bit = (1 << node % 32) if node % 32 < 31 else -(1 << 31)
        own_missing[node, node // 32] &= ~bit
        for slot in range(node + 1, 64):
            above[node, slot // 32] |= (1 << slot % 32) if slot % 32 < 31 else -(1 << 31)
    same(attend_batch([tree], masks=[own_missing])[0], right)
    same(attend_batch([tree], masks=[above])[0], right)
    empty = Request(0, [-1], tree.q[:1], tree.k[:1], tree.v[:1])
    out, lse = attend_batch([empty], masks=[torch.zeros(1, 1, dtype=torch.int32)])[0]
    assert_same_bits(out[0], tree.v[0].repeat_interleave(2, dim=0))
    assert bool(torch.isfinite(lse).all())


@pytest.mark.op("tree_attention")
def test_non_finite_keys_and_values_go_where_they_are_seen():
    generator = torch.Generator().manual_seed(15)
    tree = random_request(20, chain(3), 2, 1, 64, torch.float32, generator)
    tree.v[5, 0, 7] = float("inf")
    tree.v[6, 0, 9] = NAN
    tree.k[21] = NAN  # node 1: seen by nodes 1 and 2
    out, lse = attend_batch([tree])[0]
    assert bool(torch.isinf(out[0, :, 7]).all())
    assert bool(torch.isnan(out[0, :, 9]).all())
    assert bool(torch.isfinite(out[0, :, :7]).all())
    assert bool(torch.isnan(out[1:]).all())
    assert bool(torch.isfinite(lse[0]).all())


@pytest.mark.op("tree_attention")
def test_large_scores_do_not_overflow():
    generator = torch.Generator().manual_seed(16)
    tree = random_request(300, chain(4), 2, 1, 64, torch.float32, generator)
    tree.q *= 1000.0
    out, lse = attend_batch([tree])[0]
    check_against_fp64(tree, out, lse)


@pytest.mark.op("tree_attention")
def test_empty_batches_and_trees():
    cache = build_cache([random_request(4, [-1], 2, 1, 64, torch.float32, torch.Generator())], None)
    none = torch.zeros((0,), dtype=torch.int32)
    out = tree_attention(
        torch.zeros(0, 3, 2, 64),
        cache,
        seq_lens=none,
        num_nodes=none,
        mask=torch.zeros((0, 3, 1), dtype=torch.int32),
    )
    assert out.shape == (0, 3, 2, 64)
    out = tree_attention(
        torch.zeros(1, 0, 2, 64),
        cache,
        seq_lens=int32([4]),
        num_nodes=int32([0]),
        mask=torch.zeros((1, 0, 0)).int(),
    )
    assert out.shape == (1, 0, 2, 64)
    q = append_kv(
        torch.zeros(0, 3, 2, 64),
        torch.zeros(0, 3, 1, 64),
        torch.zeros(0, 3, 1, 64),
        cache,
        seq_lens=none,
        depths=torch.zeros((0, 3), dtype=torch.int32),
        num_nodes=none,
    )
    assert q.shape == (0, 3, 2, 64)


@pytest.mark.op("tree_attention")
def test_strided_inputs_and_outputs_and_numpy():
    generator = torch.Generator().manual_seed(17)
    tree = random_request(33, random_tree(5, generator), 4, 2, 64, torch.float32, generator)
    want = attend_batch([tree])[0][0]
    cache = build_cache([tree], 4)
    wide = torch.full((1, 4, 7, 96), 77.0).transpose(1, 2)
    out = wide[:, 1:6, :, 16:80]
    q = torch.stack([tree.q, tree.q], dim=1)[:, 0][None]
    kwargs = {
        "seq_lens": int32([33]),
        "num_nodes": int32([5]),
        "mask": reference.mask_words(tree.parents, 5)[None],
    }
    tree_attention(q, cache, out=out, **kwargs)
    assert_same_bits(out[0], want)
    out[:] = 77.0
    assert bool((wide == 77.0).all()), "written outside the output"
    in_place = tree.q[None].clone()
    tree_attention(in_place, cache, out=in_place, **kwargs)
    assert_same_bits(in_place[0], want)
    numpy_cache = KVCache(*(x.contiguous().numpy() for x in cache[:3]))
    result = tree_attention(tree.q[None].numpy(), numpy_cache, **{k: v.numpy() for k, v in kwargs.items()})
    assert isinstance(result, np.ndarray)
    assert_same_bits(torch.from_numpy(result)[0], want)


def test_tree_attention_refuses_wrong_arguments():
    def call(q=None, cache=None, seq_lens=None, num_nodes=None, mask=None, **options):
        tree_attention(
            torch.zeros(1, 3, 4, 64) if q is None else q,
            KVCache.empty(1, 8, 2, 64) if cache is None else cache,
            seq_lens=int32([2]) if seq_lens is None else seq_lens,
            num_nodes=int32([3]) if num_nodes is None else num_nodes,
            mask=torch.zeros((1, 3, 1), dtype=torch.int32) if mask is None else mask,
            **options,
        )

    call()
    for options, message in [
        ({"mask": torch.zeros((1, 3, 2)).int()}, r"mask: expected shape \[1, 3, 1\], got \[1, 3, 2\]"),
        ({"mask": torch.zeros((1, 3, 1)).long()}, "mask: expected dtype int32, got int64"),
        ({"mask": torch.zeros((1, 3, 2)).int()[:, :, ::2]}, "mask: expected a contiguous tensor"),
        ({"q": torch.zeros(1, 3, 3, 64)}, "q: expected a number of heads that is a multiple of 2, got 3"),
        ({"q": torch.zeros(1, 3, 4, 64).half()}, "q: expected dtype float32, got float16"),
        ({"q": torch.zeros(3, 4, 64)}, r"q: expected 4 dimensions, got 3 \(shape \[3, 4, 64\]\)"),
        ({"q": torch.zeros(1, 3, 64, 4).transpose(2, 3)}, "q: expected the last dimension to be contiguous"),
        ({"q": torch.zeros(1, 3, 4, 80)}, r"k_cache: expected shape \[-1, -1, -1, 80\]"),
        (
            {"q": torch.zeros(1, 3, 4, 72), "cache": KVCache.empty(1, 8, 2, 72)},
            "head_dim = 72 is not supported; supported: 64 80 96 128 192 256",
        ),
        (
            {"q": torch.zeros(1, 257, 4, 64), "mask": torch.zeros((1, 257, 9)).int()},
            "q: expected at most 256 nodes a request, got 257",
        ),
        ({"seq_lens": int32([1, 2])}, r"seq_lens: expected shape \[1\], got \[2\]"),
        ({"num_nodes": torch.ones(1)}, "num_nodes: expected dtype int32, got float32"),
        ({"window": -1}, r"window: expected 0 \(no limit\) or more, got -1"),
        ({"softmax_scale": NAN}, "softmax_scale: expected a finite number"),
        ({"out": torch.zeros(1, 3, 4, 63)}, "out: expected shape"),
        (
            {"out": torch.zeros(1, 1, 4, 64).expand(1, 3, 4, 64)},
            "out: expected an output without overlapping",
        ),
        (
            {"lse": torch.zeros(1, 3, 4).double()},
            "lse: expected a dtype that some op takes|lse: expected dtype float32",
        ),
        ({"cache": KVCache.empty(0, 8, 2, 64)}, "k_cache: expected a page for each of 1 requests"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**options)
