"""tree_attention with a logit soft-cap, sinks and a cache of float8 codes: against fp64, and bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from attention_requests import (
    DTYPES,
    NAN,
    attend_batch,
    build_cache,
    check_against_fp64,
    int32,
    nodes_of,
    random_request,
    random_tree,
    same,
)
from compare import assert_same_bits
from eagle_cuda import _extension
from eagle_cuda.attention import tree_attention
from eagle_cuda.kv_cache import KVCache
from reference import attention as reference

# dtype of q, codes, Hq, Hkv, D, page size, prefix lengths, nodes, window, soft cap, sinks. Pairwise: every
# dtype with every kind of codes, every head size with codes of rows or of the tensor, and for each kind of
# codes a case with and without window, cap and sinks.
CASES = [
    ("bf16", "none", 6, 2, 64, 16, [0, 300], 9, 0, 5.0, True),
    ("fp16", "none", 4, 1, 128, None, [270], 12, 40, 0.0, True),
    ("fp32", "none", 3, 3, 80, 4, [40, 255], 7, 0, 2.0, False),
    ("bf16", "rows", 9, 3, 64, 16, [520, 31], 12, 0, 0.0, False),
    ("bf16", "rows", 4, 2, 80, 4, [0, 290], 5, 100, 3.0, True),
    ("bf16", "rows", 6, 1, 256, 64, [90], 20, 0, 30.0, False),
    ("fp16", "rows", 4, 2, 96, 1, [255], 8, 0, 0.0, True),
    ("fp16", "rows", 2, 1, 192, None, [130], 5, 33, 2.0, False),
    ("fp32", "rows", 4, 2, 128, 16, [300], 6, 0, 4.0, True),
    ("fp32", "rows", 2, 1, 64, None, [17], 3, 9, 0.0, False),
    ("bf16", "tensor", 8, 2, 128, 64, [257], 17, 0, 8.0, True),
    ("bf16", "tensor", 2, 2, 96, 16, [64], 4, 20, 0.0, False),
    ("fp16", "tensor", 5, 1, 256, None, [100], 4, 0, 0.0, True),
    ("fp16", "tensor", 3, 3, 80, 16, [33], 33, 0, 6.0, False),
    ("fp32", "tensor", 4, 1, 192, 4, [260, 0], 5, 50, 1.0, True),
]


def options_of(cap: float, sinks: bool, heads: int, generator: torch.Generator) -> dict:
    return {
        "logit_softcap": cap,
        "sinks": 3 * torch.randn(heads, generator=generator) if sinks else None,
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.op("tree_attention")
def test_features_match_fp64(case):
    dtype, codes, heads, kv_heads, dim, page_size, lengths, nodes, window, cap, sinks = case
    generator = torch.Generator().manual_seed(nodes * 1000 + dim)
    requests = [
        random_request(
            n,
            random_tree(max(1, nodes - b), generator),
            heads,
            kv_heads,
            dim,
            DTYPES[dtype],
            generator,
            codes,
        )
        for b, n in enumerate(lengths)
    ]
    options = options_of(cap, sinks, heads, generator)
    results = attend_batch(requests, page_size=page_size, window=window, **options)
    for request, (out, lse) in zip(requests, results):
        check_against_fp64(request, out, lse, window, **options)


def test_cases_are_pairwise():
    assert {(c[0], c[1]) for c in CASES} == {(d, k) for d in DTYPES for k in ("none", "rows", "tensor")}
    assert {c[4] for c in CASES if c[1] != "none"} == {64, 80, 96, 128, 192, 256}
    for column in (8, 9, 10):
        assert {(c[1], bool(c[column])) for c in CASES if c[1] != "none"} == {
            (k, on) for k in ("rows", "tensor") for on in (False, True)
        }


@pytest.mark.parametrize(
    ("dtype", "codes", "heads", "kv_heads", "dim", "seq_len", "window", "cap", "sinks"),
    [
        ("bf16", "rows", 6, 2, 64, 250, 0, 5.0, True),  # the tree straddles two chunks
        ("fp16", "rows", 2, 1, 128, 600, 300, 3.0, True),
        ("fp32", "rows", 4, 1, 80, 300, 0, 2.0, True),
        # Two groups of chunks; test_attention_bits.py has fewer nodes of one.
        pytest.param("bf16", "tensor", 3, 1, 64, 2044, 0, 5.0, True, marks=pytest.mark.unchecked),
        ("bf16", "none", 9, 3, 64, 250, 40, 5.0, True),
    ],
)
@pytest.mark.op("tree_attention")
def test_a_node_is_plain_decoding_bit_for_bit(
    dtype, codes, heads, kv_heads, dim, seq_len, window, cap, sinks
):
    generator = torch.Generator().manual_seed(seq_len + 1)
    tree = random_request(
        seq_len, random_tree(24, generator), heads, kv_heads, dim, DTYPES[dtype], generator, codes
    )
    options = options_of(cap, sinks, heads, generator) | {"window": window}
    got = attend_batch([tree], page_size=16, **options)[0]
    deepest = max(range(24), key=lambda n: len(reference.ancestors(tree.parents, n)))
    for node in (0, 13, deepest):
        as_chain = attend_batch([tree.path(node)], page_size=4, seed=5, **options)[0]
        same(nodes_of(as_chain, [-1]), nodes_of(got, [node]))
        same(attend_batch([tree.plain(node)], **options)[0], nodes_of(got, [node]))
    # Another order of the slots, other pages, in a batch.
    order = sorted(range(24), key=lambda n: (len(reference.ancestors(tree.parents, n)), -n))
    other = random_request(
        99, random_tree(30, generator), heads, kv_heads, dim, DTYPES[dtype], generator, codes
    )
    for page_size in (1, 64):
        batch = attend_batch([other, tree.permuted(order), other], page_size=page_size, seed=1, **options)
        same(batch[1], nodes_of(got, order))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.op("tree_attention")
def test_threads_and_a_wide_batch_do_not_matter(dtype, one_and_two_threads):
    """On CUDA a row's chunks go to blocks of their own, or all to one, as the batch is small or large."""
    generator = torch.Generator().manual_seed(3)
    tree = random_request(2300, random_tree(6, generator), 4, 1, 64, DTYPES[dtype], generator, "rows")
    short = random_request(0, [-1], 4, 1, 64, DTYPES[dtype], generator, "rows")
    options = options_of(5.0, True, 4, generator)
    one, two = one_and_two_threads(lambda: attend_batch([tree], page_size=64, **options))
    same(one[0], two[0])
    same(attend_batch([short, tree, *[short] * 100], page_size=256, **options)[1], one[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.op("tree_attention")
def test_features_that_are_off_change_nothing(dtype):
    """A sink of -inf is none; a cap far above the scores leaves them alone, a tiny one evens them."""
    generator = torch.Generator().manual_seed(4)
    tree = random_request(150, random_tree(6, generator), 4, 2, 64, DTYPES[dtype], generator)
    plain = attend_batch([tree])[0]
    same(attend_batch([tree], logit_softcap=0.0, sinks=None)[0], plain)
    same(attend_batch([tree], sinks=torch.full((4,), -torch.inf))[0], plain)
    wide = attend_batch([tree], logit_softcap=1e4)[0]
    torch.testing.assert_close(wide[1], plain[1], rtol=1e-4, atol=1e-4)
    out, lse = attend_batch([tree], logit_softcap=1e-3)[0]  # nearly equal weights
    count = torch.tensor([150.0 + len(reference.ancestors(tree.parents, n)) for n in range(6)])
    torch.testing.assert_close(lse, count.log()[:, None].expand(6, 4), rtol=0, atol=2e-3)
    sinks = torch.tensor([0.0, torch.inf, NAN, 200.0])
    out, lse = attend_batch([tree], sinks=sinks)[0]
    assert bool((out[:, 1] == 0).all()), "an infinite sink takes all"
    assert bool(torch.isnan(out[:, 2]).all() and torch.isnan(lse[:, 2]).all())
    assert bool((lse[:, 3] == 200.0).all())
    assert bool(torch.isfinite(out[:, [0, 3]]).all())


@pytest.mark.parametrize("codes", ["none", "rows"])
@pytest.mark.op("tree_attention")
def test_a_sink_alone(codes):
    """No key that exists: the output is zero, the denominator the sink's."""
    generator = torch.Generator().manual_seed(5)
    tree = random_request(70, random_tree(3, generator), 4, 2, 64, torch.bfloat16, generator, codes)
    cache = build_cache([tree], 16)
    cache.page_table[:] = -1
    sinks, lse = torch.tensor([0.5, -3.0, 0.0, -torch.inf]), torch.zeros(1, 3, 4)
    out = tree_attention(
        tree.q[None],
        cache,
        seq_lens=int32([70]),
        num_nodes=int32([3]),
        mask=reference.mask_words(tree.parents, 3)[None],
        sinks=sinks,
        lse=lse,
    )
    assert bool((out == 0).all())
    assert_same_bits(lse[0], sinks.expand(3, 4).contiguous())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.op("tree_attention")
def test_missing_pages_of_codes_count_as_masked(dtype):
    """Everything around the rows of a request is NaN: codes and scales (build_cache)."""
    generator = torch.Generator().manual_seed(12)
    tree = random_request(170, random_tree(6, generator), 4, 2, 64, DTYPES[dtype], generator, "rows")
    cache = build_cache([tree], 16)
    cache.page_table[0, 1] = 10**9
    cache.page_table[0, 10] = -1
    out, lse = torch.zeros(1, 6, 4, 64, dtype=tree.q.dtype), torch.zeros(1, 6, 4)
    tree_attention(
        tree.q[None],
        cache,
        seq_lens=int32([170]),
        num_nodes=int32([6]),
        mask=reference.mask_words(tree.parents, 6)[None],
        out=out,
        lse=lse,
        logit_softcap=5.0,
    )
    missing = {*range(16, 32), *range(160, 176)}
    check_against_fp64(tree, out[0], lse[0], missing=missing, logit_softcap=5.0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.op("tree_attention")
def test_codes_that_begin_anywhere(dtype):
    generator = torch.Generator().manual_seed(3)
    tree = random_request(150, random_tree(6, generator), 4, 2, 64, DTYPES[dtype], generator, "rows")
    want = attend_batch([tree])[0][0]

    def shifted(x, shift):
        wide = torch.full((1, *x.shape[:-1], x.shape[-1] + 3), 0x7F, dtype=torch.uint8)
        wide[0, ..., shift : shift + x.shape[-1]] = x.view(torch.uint8)
        return wide.view(x.dtype)[..., shift : shift + x.shape[-1]]

    cache = KVCache(shifted(tree.k, 1), shifted(tree.v, 2), None, tree.k_scale[None], tree.v_scale[None])
    out = tree_attention(
        tree.q[None],
        cache,
        seq_lens=int32([150]),
        num_nodes=int32([6]),
        mask=reference.mask_words(tree.parents, 6)[None],
    )
    assert_same_bits(out[0], want)


@pytest.mark.op("tree_attention")
def test_not_a_number_goes_where_it_is_seen():
    """A NaN code, and a row whose scale is NaN."""
    generator = torch.Generator().manual_seed(15)
    tree = random_request(20, [-1, 0, 1], 2, 1, 64, torch.float32, generator, "rows")
    tree.v.view(torch.uint8)[6, 0, 9] = 0xFF
    tree.k_scale[21] = NAN  # node 1: seen by nodes 1 and 2
    out, lse = attend_batch([tree])[0]
    assert bool(torch.isnan(out[0, :, 9]).all())
    assert bool(torch.isfinite(out[0, :, :9]).all())
    assert bool(torch.isnan(out[1:]).all())
    assert bool(torch.isfinite(lse[0]).all())


# ---- instruction sets --------------------------------------------------------------------------------

_PROGRAM = """
import sys, torch
sys.path[:0] = sys.argv[2:]
import test_attention_features as tests
torch.save(tests.features_of_every_kind(), sys.argv[1])
"""


def features_of_every_kind() -> list[torch.Tensor]:
    from test_append_codes import encoded

    generator, results = torch.Generator().manual_seed(10), []
    for dtype, codes, dim in (
        ("bf16", "rows", 80),
        ("fp16", "tensor", 64),
        ("fp32", "rows", 256),
        ("bf16", "none", 96),
    ):
        tree = random_request(270, random_tree(7, generator), 4, 2, dim, DTYPES[dtype], generator, codes)
        results += attend_batch([tree], page_size=16, **options_of(3.0, True, 4, generator))[0]
        results += [x for x in encoded(DTYPES[dtype], dim, generator)[1:] if x is not None]
    return [x.contiguous().view(torch.uint8) for x in results]


def test_every_instruction_set_gives_the_same_bits(tmp_path):
    order = ["generic", "avx2", "avx512"]
    mine = _extension._C.build_info()["cpu_isa"]
    want = features_of_every_kind()
    for isa in order[: order.index(mine[:6])]:
        command = [sys.executable, "-c", _PROGRAM, str(tmp_path / isa), *sys.path]
        subprocess.run(command, env={**os.environ, "EAGLE_CPU_ISA": isa}, check=True)
        for a, b in zip(torch.load(tmp_path / isa), want):
            assert_same_bits(a, b)


# ---- arguments ---------------------------------------------------------------------------------------


def test_wrong_scales_sinks_and_caps_are_refused():
    codes = KVCache.empty(1, 8, 2, 64, dtype=torch.float8_e4m3fn, row_scales=True)
    one = torch.ones(1)

    def call(cache=codes, dtype=torch.bfloat16, **options):
        tree_attention(
            torch.zeros(1, 3, 4, 64, dtype=dtype),
            cache,
            seq_lens=int32([2]),
            num_nodes=int32([3]),
            mask=torch.zeros((1, 3, 1), dtype=torch.int32),
            **options,
        )

    codes.k.view(torch.uint8).zero_(), codes.v.view(torch.uint8).zero_()
    call()
    call(codes._replace(k_scale=one, v_scale=one))
    for arguments, message in [
        ({"cache": codes._replace(k_scale=None)}, "k_scale: expected one for a cache of float8_e4m3fn"),
        ({"cache": codes._replace(v_scale=None)}, "v_scale: expected one for a cache of float8_e4m3fn"),
        ({"cache": codes._replace(v_scale=one)}, r"v_scale: expected no factor for the whole tensor.*\[1\]"),
        ({"cache": codes._replace(k_scale=one)}, "v_scale: expected one factor for the whole tensor"),
        ({"cache": codes._replace(k_scale=torch.ones(2))}, r"k_scale: expected shape \[1, 8, 2\], got \[2\]"),
        ({"cache": codes._replace(k_scale=torch.ones(1, 8, 1))}, r"k_scale: expected shape \[1, 8, 2\]"),
        ({"cache": codes._replace(v_scale=torch.ones(1, 8, 2).double())}, "v_scale: expected"),
        ({"cache": KVCache.empty(1, 8, 2, 64)._replace(k_scale=one, v_scale=one), "dtype": torch.float32},
         "k_scale: expected none for a cache of float32, got one"),
        ({"dtype": torch.float8_e4m3fn}, "q: dtype float8_e4m3fn is not supported"),
        ({"cache": KVCache.empty(1, 8, 2, 64, dtype=torch.int8)}, "k_cache: expected a dtype of float32"),
        ({"logit_softcap": -1.0}, r"logit_softcap: expected 0 \(none\) or a finite number above, got -1"),
        ({"logit_softcap": NAN}, "logit_softcap: expected 0"),
        ({"logit_softcap": float("inf")}, "logit_softcap: expected 0"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected shape \[4\], got \[3\]"),
        ({"sinks": torch.zeros(4).bfloat16()}, "sinks: expected dtype float32, got bfloat16"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(**arguments)
