"""append_kv into a cache of float8 codes, and what attention and compact_kv make of codes and scales."""

from __future__ import annotations

import pytest
import torch

from attention_requests import DTYPES, NAN, int32
from compare import assert_same_bits
from eagle_cuda.attention import append_kv, rope_table, tree_attention
from eagle_cuda.kv_cache import KVCache, compact_kv
from reference import attention as reference

CODES = torch.float8_e4m3fn


def empty_cache(kind: str, rows: int, kv_heads: int, dim: int, page_size: int | None = 4) -> KVCache:
    cache = KVCache.empty(1, rows, kv_heads, dim, page_size=page_size, dtype=CODES, row_scales=kind == "rows")
    cache.k.view(torch.uint8).fill_(0x7F), cache.v.view(torch.uint8).fill_(0x7F)
    if kind == "tensor":
        return cache._replace(k_scale=torch.tensor([0.02]), v_scale=torch.tensor([0.005]))
    cache.k_scale.fill_(NAN), cache.v_scale.fill_(NAN)
    return cache


def rows_of(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.reshape(-1, *x.shape[2:])[:count]


def append(cache: KVCache, q, k, v, length: int = 0, depths=None, **options):
    nodes = q.shape[0]
    return append_kv(
        q[None],
        k[None],
        v[None],
        cache,
        seq_lens=int32([length]),
        depths=int32([depths if depths is not None else range(nodes)]),
        num_nodes=int32([nodes]),
        **options,
    )[0]


def encoded(dtype: torch.dtype, dim: int, generator: torch.Generator, kind: str = "rows"):
    """(k before, codes of k, of v, scales) of 5 rows: normed and rotated k."""
    q, k, v = (torch.randn(5, heads, dim, generator=generator).to(dtype) for heads in (4, 2, 2))
    cache, table = empty_cache(kind, 8, 2, dim), rope_table(8, dim)
    append(cache, q, k, v, cos=table.cos, sin=table.sin, k_norm=torch.ones(dim, dtype=dtype))
    scales = (rows_of(cache.k_scale, 5), rows_of(cache.v_scale, 5)) if kind == "rows" else (None, None)
    return k, rows_of(cache.k.view(torch.uint8), 5), rows_of(cache.v.view(torch.uint8), 5), *scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rows", "tensor"])
@pytest.mark.parametrize(("dim", "page_size"), [(64, 4), (80, None), (256, 1)])
@pytest.mark.op("append_kv")
def test_codes_and_scales_to_the_bit(dtype, kind, dim, page_size):
    """Without a rotation the numbers are those given: codes and scales are the reference's."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(7, heads, dim, generator=generator).to(DTYPES[dtype]) for heads in (3, 3, 3))
    k[1, 0], v[2, 1] = 0.0, -0.0
    k[3, 1] *= 1e-3
    k[4, 2, 5], v[5, 0, 7], v[6, 2, 1] = NAN, float("inf"), 1e4
    cache = empty_cache(kind, 12, 3, dim, page_size)
    before = cache.k_scale.clone(), cache.v_scale.clone()
    q_out = append(cache, q, k, v, length=2)
    assert_same_bits(q_out, q)
    for x, codes, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        want, want_scale = reference.encode(x, scale if kind == "tensor" else None)
        got = rows_of(codes, 9)[2:]
        zero = want.float() == 0  # -0 and +0 are one
        assert bool((got.float()[zero] == 0).all())
        assert_same_bits(got.view(torch.uint8)[~zero], want.view(torch.uint8)[~zero])
        assert bool((rows_of(codes, 2).view(torch.uint8) == 0x7F).all()), (
            "a row before the prefix was written"
        )
        if kind == "rows":
            assert torch.equal(rows_of(scale, 9)[2:].nan_to_num(-1.0), want_scale.nan_to_num(-1.0))
            assert bool(torch.isnan(rows_of(scale, 2)).all())
    if kind == "tensor":
        assert_same_bits(cache.k_scale, before[0])
        assert_same_bits(cache.v_scale, before[1])


@pytest.mark.op("append_kv")
def test_rows_too_small_for_a_scale():
    """Down to denormal scales, and below what a scale can be: no division by zero, no NaN."""
    k = torch.tensor([1e-38, 1e-42, 1e-45, -1e-45])[:, None, None].expand(4, 1, 64).contiguous()
    cache = empty_cache("rows", 4, 1, 64, None)
    append(cache, k, k, k)
    numbers = cache.k.float()[0] * cache.k_scale[0, ..., None]
    assert bool(torch.isfinite(numbers).all())
    torch.testing.assert_close(numbers, k, rtol=0.07, atol=2e-42)
    assert cache.k_scale[0, 3, 0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.op("append_kv")
def test_rotated_keys_are_rounded_once(dtype):
    """Within half a step of the code of the fp64 rotation: 16 scales at the top; and float32's error."""
    generator = torch.Generator().manual_seed(2)
    dim, table = 64, rope_table(300, 64)
    q, k = (torch.randn(5, heads, dim, generator=generator).to(DTYPES[dtype]) for heads in (4, 2))
    weight = torch.randn(dim, generator=generator).to(DTYPES[dtype])
    cache = empty_cache("rows", 264, 2, dim, 16)
    q_out = append(cache, q, k, k, length=250, cos=table.cos, sin=table.sin, q_norm=weight, k_norm=weight)
    same_q = append(
        KVCache.empty(1, 264, 2, dim, dtype=DTYPES[dtype]), q, k, k, length=250,
        cos=table.cos, sin=table.sin, q_norm=weight, k_norm=weight,
    )  # fmt: skip
    assert_same_bits(q_out, same_q)
    scale = rows_of(cache.k_scale, 255)[250:, :, None].double()
    got = rows_of(cache.k, 255)[250:].double() * scale
    for node in range(5):
        want = reference.rotate(k[node], 250 + node, *table, norm=weight)
        step = torch.exp2((want / scale[node]).abs().clamp(min=2.0**-6).log2().floor() - 3)
        assert bool(((got[node] - want).abs() <= (0.5 * step + 1e-4) * scale[node]).all())
        torch.testing.assert_close(scale[node, :, 0] * 448, want.abs().amax(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["rows", "tensor"])
@pytest.mark.op("append_kv", "tree_attention", "compact_kv")
def test_a_tree_that_is_accepted_is_plain_decoding(kind):
    """Append a tree, attend, accept a path, compact: cache and attention are bit for bit those of appending
    the accepted tokens one after the other."""
    generator = torch.Generator().manual_seed(7)
    prefix, parents, path = 45, [-1, 0, 0, 1, 2, 2, 4, 6], [0, 2, 4, 6]
    depths = [len(reference.ancestors(parents, n)) - 1 for n in range(8)]
    rows, dim, table = 60, 64, rope_table(64, 64)
    q, k, v = (torch.randn(prefix + 8, h, dim, generator=generator).bfloat16() for h in (4, 2, 2))
    rope = {"cos": table.cos, "sin": table.sin}
    sinks = torch.randn(4, generator=generator)

    def begun(page_size):
        cache = empty_cache(kind, rows, 2, dim, page_size)
        append(cache, q[:prefix], k[:prefix], v[:prefix], **rope)
        return cache

    def attend(cache, queries, length, tree):
        return tree_attention(
            queries[None],
            cache,
            seq_lens=int32([length]),
            num_nodes=int32([len(tree)]),
            mask=reference.mask_words(tree, len(tree))[None],
            logit_softcap=4.0,
            sinks=sinks,
            window=37,
        )[0]

    tree = begun(4)
    rotated = append(tree, q[prefix:], k[prefix:], v[prefix:], prefix, depths, **rope)
    verified = attend(tree, rotated, prefix, parents)
    compact_kv([tree], int32([[*path, -1]]), int32([3]), int32([prefix]), max_nodes=8)

    plain = begun(None)
    for i, node in enumerate(path):
        at = slice(prefix + node, prefix + node + 1)
        query = append(plain, q[at], k[at], v[at], prefix + i, [0], **rope)
        assert_same_bits(attend(plain, query, prefix + i, [-1])[0], verified[node])
    for a, b in zip((tree.k, tree.v), (plain.k, plain.v)):
        assert_same_bits(rows_of(a, prefix + 4).view(torch.uint8), rows_of(b, prefix + 4).view(torch.uint8))
    if kind == "rows":
        for a, b in zip((tree.k_scale, tree.v_scale), (plain.k_scale, plain.v_scale)):
            assert_same_bits(rows_of(a, prefix + 4), rows_of(b, prefix + 4))
    else:
        assert (float(tree.k_scale), float(tree.v_scale)) == (
            torch.tensor(0.02).item(),
            torch.tensor(0.005).item(),
        )


@pytest.mark.op("compact_kv")
def test_layers_may_share_the_factor_of_a_tensor():
    one = torch.ones(1)
    caches = [empty_cache("tensor", 8, 1, 64)._replace(k_scale=one, v_scale=one) for _ in range(2)]
    caches[1] = caches[1]._replace(page_table=caches[0].page_table)
    compact_kv(caches, int32([[0, 2]]), int32([1]), int32([0]), max_nodes=4)
    assert one.item() == 1.0


def test_append_kv_refuses_wrong_scales():
    x = torch.zeros(1, 1, 2, 64)
    rows = KVCache.empty(1, 8, 2, 64, dtype=CODES, row_scales=True)

    def call(cache):
        append_kv(x, x, x, cache, seq_lens=int32([0]), depths=int32([[0]]), num_nodes=int32([1]))

    call(rows)
    call(rows._replace(k_scale=torch.ones(1), v_scale=torch.ones(1)))
    for cache, message in [
        (rows._replace(k_scale=None), "k_scale: expected one for a cache of float8_e4m3fn, got none"),
        (rows._replace(v_scale=torch.ones(1)), "v_scale: expected no factor for the whole tensor"),
        (rows._replace(v_scale=torch.ones(1, 1, 1).expand(1, 8, 2)), "v_scale: expected"),
        (
            KVCache.empty(1, 8, 2, 64, row_scales=True),
            "k_scale: expected none for a cache of float32, got one",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(cache)
