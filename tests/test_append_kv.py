"""append_kv against fp64, and rope_table against transformers."""

from __future__ import annotations

import pytest
import torch

from attention_requests import DTYPES, build_cache, int32, random_request, random_tree
from compare import assert_close_to_fp64, assert_same_bits
from eagle_cuda.attention import append_kv, rope_table
from eagle_cuda.kv_cache import KVCache
from reference import attention as reference


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "rotary", "interleaved", "norm", "page_size"),
    [
        ("bf16", 9, 3, 64, 64, False, False, 16),
        ("bf16", 4, 2, 128, 128, False, True, None),
        ("bf16", 4, 2, 80, 32, True, False, 4),
        ("fp32", 9, 3, 64, 64, False, True, 1),
        ("fp32", 4, 4, 96, 96, True, True, 64),
        ("fp32", 2, 1, 256, 64, False, False, None),
        ("fp32", 2, 1, 64, 0, False, True, 4),
        ("fp16", 7, 1, 80, 80, False, True, 16),
        ("fp16", 2, 2, 192, 96, True, False, 4),
    ],
)
@pytest.mark.op("append_kv")
def test_append_kv_matches_fp64(dtype, heads, kv_heads, dim, rotary, interleaved, norm, page_size):
    generator = torch.Generator().manual_seed(20)
    dtype = DTYPES[dtype]
    lengths, nodes = [0, 37], 5
    trees = [
        random_request(n, random_tree(m, generator), heads, kv_heads, dim, dtype, generator)
        for n, m in zip(lengths, (5, 3))
    ]
    cache = build_cache(trees, page_size)
    cache.k.copy_(torch.randn(cache.k.shape, generator=generator).to(dtype))
    cache.v.copy_(torch.randn(cache.v.shape, generator=generator).to(dtype))
    before = cache.k.clone(), cache.v.clone()
    table = rope_table(64, rotary, 500.0) if rotary else (None, None)
    q = torch.randn(2, nodes, heads, dim, generator=generator).to(dtype)
    qkv = torch.randn(2, nodes, heads + 2 * kv_heads, dim, generator=generator).to(
        dtype
    )  # as one projection gives them
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    weights = [torch.randn(dim, generator=generator).to(dtype) if norm else None for _ in range(2)]
    depths = torch.zeros(2, nodes, dtype=torch.int32)
    for b, tree in enumerate(trees):
        depths[b, : len(tree.parents)] = int32(
            [len(reference.ancestors(tree.parents, n)) - 1 for n in range(len(tree.parents))]
        )
    q_out = torch.full((2, nodes, heads, dim), 77.0).to(dtype)
    append_kv(
        q,
        k,
        v,
        cache,
        seq_lens=int32(lengths),
        depths=depths,
        num_nodes=int32([5, 3]),
        cos=table[0],
        sin=table[1],
        interleaved=interleaved,
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-5,
        q_out=q_out,
    )
    cos, sin = table if rotary else (torch.zeros(1, 0), torch.zeros(1, 0))
    written = torch.zeros(cache.k.shape[:2], dtype=torch.bool)
    for b, tree in enumerate(trees):
        size = cache.k.shape[1]
        for node in range(len(tree.parents)):
            row, position = lengths[b] + node, lengths[b] + int(depths[b, node])
            at = (b if page_size is None else int(cache.page_table[b, row // size]), row % size)
            written[at] = True
            for got, x, weight in (
                (q_out[b, node], q[b, node], weights[0]),
                (cache.k[at], k[b, node], weights[1]),
            ):
                options = {"interleaved": interleaved, "norm": weight, "eps": 1e-5}
                want = reference.rotate(x, position if rotary else 0, cos, sin, **options)
                naive = reference.rotate(
                    x, position if rotary else 0, cos, sin, dtype=torch.float32, **options
                )
                assert_close_to_fp64(got, want, naive.to(dtype))
            assert_same_bits(cache.v[at], v[b, node])
    assert bool((q_out[1, 3:] == 77.0).all()), "rows beyond num_nodes were written"
    assert_same_bits(cache.k[~written], before[0][~written])
    assert_same_bits(cache.v[~written], before[1][~written])
    # In place, and the same.
    append_kv(
        q,
        k,
        v,
        cache,
        seq_lens=int32(lengths),
        depths=depths,
        num_nodes=int32([5, 3]),
        cos=table[0],
        sin=table[1],
        interleaved=interleaved,
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-5,
        q_out=q,
    )
    assert_same_bits(q[0], q_out[0])
    assert_same_bits(q[1, :3], q_out[1, :3])


@pytest.mark.op("append_kv")
def test_positions_beyond_the_table_take_its_last_row():
    generator = torch.Generator().manual_seed(21)
    table = rope_table(32, 64)  # FAULTS K1: a table shorter than the positions
    request = random_request(40, [-1], 2, 1, 64, torch.float32, generator)

    def run(length, depth):
        cache = KVCache.empty(1, 64, 1, 64)
        return append_kv(
            request.q[None],
            request.k[None, :1],
            request.v[None, :1],
            cache,
            seq_lens=int32([length]),
            depths=int32([[depth]]),
            num_nodes=int32([1]),
            cos=table.cos,
            sin=table.sin,
        )

    for length, depth in ((32, 0), (31, 1), (60, 2**31 - 1)):
        assert_same_bits(run(length, depth), run(31, 0))
    assert_same_bits(run(3, -50), run(0, 0))


def test_append_kv_refuses_wrong_arguments():
    def call(**changed):
        arguments = {
            "q": torch.zeros(1, 3, 4, 64),
            "k": torch.zeros(1, 3, 2, 64),
            "v": torch.zeros(1, 3, 2, 64),
            "cache": KVCache.empty(1, 8, 2, 64),
            "seq_lens": int32([2]),
            "depths": int32([[0, 1, 1]]),
            "num_nodes": int32([3]),
            "cos": torch.zeros(9, 32),
            "sin": torch.zeros(9, 32),
        } | changed
        append_kv(
            arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), arguments.pop("cache"), **arguments
        )

    call()
    for changed, message in [
        ({"k": torch.zeros(1, 3, 4, 64)}, r"k: expected shape \[1, 3, 2, 64\], got \[1, 3, 4, 64\]"),
        ({"v": torch.zeros(1, 3, 2, 64).bfloat16()}, "v: expected dtype float32, got bfloat16"),
        ({"depths": int32([0, 1, 1])}, r"depths: expected shape \[1, 3\], got \[3\]"),
        ({"sin": None}, "sin: expected a tensor, got None"),
        ({"sin": torch.zeros(9, 31)}, r"sin: expected shape \[9, 32\], got \[9, 31\]"),
        ({"cos": torch.zeros(9, 33), "sin": torch.zeros(9, 33)}, "at most head_dim = 64, got 66"),
        ({"cos": torch.zeros(0, 32), "sin": torch.zeros(0, 32)}, "cos: expected at least 1 position, got 0"),
        ({"cos": torch.zeros(9, 32).double()}, "cos: expected"),
        ({"q_norm": torch.zeros(63)}, r"q_norm: expected shape \[64\], got \[63\]"),
        ({"q_norm": torch.zeros(64), "eps": -1.0}, "eps: expected 0 or more, got -1"),
        ({"q_out": torch.zeros(1, 3, 4, 64).bfloat16()}, "q_out: expected dtype float32, got bfloat16"),
        ({"q": torch.zeros(1, 3, 4, 63)}, r"k_cache: expected shape \[-1, -1, -1, 63\]"),
        (
            {"cache": KVCache.empty(1, 8, 2, 64, page_size=4)._replace(page_table=int32([[0], [1]]))},
            "page_table: expected shape",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**changed)


# ---- rope_table ----------------------------------------------------------------------------------


def test_plain_and_linear_tables():
    want = reference.angles(300, 64, 10000.0)
    table = rope_table(300, 64)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    torch.testing.assert_close(
        table.cos.double(), want.cos(), rtol=0, atol=2**-25
    )  # half a unit in the last place of 1
    torch.testing.assert_close(table.sin.double(), want.sin(), rtol=0, atol=2**-25)
    half = rope_table(300, 64, scaling={"type": "linear", "factor": 2.0})
    torch.testing.assert_close(half.cos.double(), (want / 2).cos(), rtol=0, atol=2**-25)


SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{s['factor']:g}")
def test_scaled_tables_match_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta = 500000.0
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    frequency, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    angle = torch.arange(200)[:, None] * frequency.double()
    table = rope_table(200, 64, theta, scaling)
    # Their frequencies are fp32: relative 1e-6 of angles up to 200.
    torch.testing.assert_close(table.cos.double(), angle.cos() * factor, rtol=0, atol=2e-4)
    torch.testing.assert_close(table.sin.double(), angle.sin() * factor, rtol=0, atol=2e-4)
    plain = rope_table(200, 64, theta)
    assert not torch.allclose(table.cos, plain.cos, atol=1e-3) or not torch.allclose(
        table.sin, plain.sin, atol=1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16, 63), "head_dim: expected an even number of at least 2, got 63"),
        ((0, 64), "max_positions: expected at least 1, got 0"),
        ((16, 64, 1e4, {"rope_type": "dynamic", "factor": 2.0}), "got dynamic"),
        ((16, 64, 1e4, {"type": "longrope"}), "got longrope"),
        ((16, 64, 1e4, {"rope_type": "yarn", "factor": 2.0}), "original_max_position_embeddings"),
        ((16, 64, 1e4, {"rope_type": "linear"}), "expected a value for factor"),
    ],
)
def test_rope_table_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        rope_table(*arguments)
