"""tree_attention, append_kv: the same bits whatever the layout, batch, tree, threads or instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
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
from eagle_cuda import _extension
from eagle_cuda.attention import append_kv, rope_table
from eagle_cuda.kv_cache import KVCache
from reference import attention as reference


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "seq_len", "window"),
    [
        ("bf16", 9, 3, 64, 250, 0),  # the tree straddles two chunks
        ("bf16", 6, 2, 64, 2044, 0),  # and two groups of chunks
        ("fp32", 4, 1, 80, 300, 0),
        ("fp16", 2, 2, 128, 3, 0),
        ("bf16", 3, 1, 64, 600, 300),
        ("fp32", 2, 1, 64, 251, 7),
        ("bf16", 3, 1, 64, 0, 0),
    ],
)
@pytest.mark.op("tree_attention")
def test_a_node_is_plain_decoding_bit_for_bit(dtype, heads, kv_heads, dim, seq_len, window):
    generator = torch.Generator().manual_seed(seq_len + 1)
    tree = random_request(seq_len, random_tree(24, generator), heads, kv_heads, dim, DTYPES[dtype], generator)
    got = attend_batch([tree], page_size=16, window=window)[0]
    deepest = max(range(24), key=lambda n: len(reference.ancestors(tree.parents, n)))
    for node in (0, 1, 13, 23, deepest) if seq_len < 1000 else (1, deepest):
        as_chain = attend_batch([tree.path(node)], page_size=4, seed=5, window=window)[0]
        same(nodes_of(as_chain, [-1]), nodes_of(got, [node]))
        as_plain = attend_batch([tree.plain(node)], window=window)[0]
        same(as_plain, nodes_of(got, [node]))
    # The whole chain of the deepest path at once equals each of its nodes.
    slots = reference.ancestors(tree.parents, deepest)
    same(attend_batch([tree.path(deepest)], window=window)[0], nodes_of(got, slots))


@pytest.mark.op("tree_attention")
def test_slots_pages_batches_and_threads_do_not_matter(one_and_two_threads, backend):
    generator = torch.Generator().manual_seed(4)
    dtype = torch.bfloat16
    tree = random_request(520, random_tree(40, generator), 6, 2, 64, dtype, generator)
    alone = attend_batch([tree])[0]

    order = sorted(
        range(40), key=lambda n: (len(reference.ancestors(tree.parents, n)), -n)
    )  # parents still come first
    permuted = attend_batch([tree.permuted(order)], page_size=16)[0]
    same(permuted, nodes_of(alone, order))

    for page_size, seed in ((1, 0), (4, 1), (16, 0), (64, 1)):
        same(attend_batch([tree], page_size=page_size, seed=seed)[0], alone)

    others = [
        random_request(n, random_tree(m, generator), 6, 2, 64, dtype, generator)
        for n, m in ((0, 1), (300, 64), (3, 9))
    ]
    for batch in ([tree, *others], [others[1], tree, others[0]]):
        result = attend_batch(batch, page_size=16, width=256)
        same(result[[r is tree for r in batch].index(True)], alone)

    if backend != "cpu":
        return
    one, two = one_and_two_threads(
        lambda: [attend_batch([tree])[0], *attend_batch([others[0], tree], page_size=4)]
    )
    for a, b in zip(one, two):
        same(a, b)
    same(one[0], alone)
    same(one[2], alone)


@pytest.mark.op("tree_attention")
def test_folding_does_not_depend_on_who_reduced_a_chunk(one_and_two_threads):
    """Several chunks in the second group of 2048: one thread folds as it goes, two fold stored chunks."""
    generator = torch.Generator().manual_seed(5)
    tree = random_request(2810, random_tree(3, generator), 2, 1, 64, torch.float32, generator)
    short = random_request(100, chain(2), 2, 1, 64, torch.float32, generator)
    one, two = one_and_two_threads(lambda: attend_batch([tree]))
    same(one[0], two[0])
    same(
        attend_batch([tree, *[short] * 8], page_size=16)[0], one[0]
    )  # enough requests to keep chunks together
    same(attend_batch([tree.plain(2)])[0], nodes_of(one[0], [2]))


@pytest.mark.op("tree_attention")
def test_other_nodes_do_not_matter():
    """A node's result stays when every node that is not its ancestor becomes NaN."""
    generator = torch.Generator().manual_seed(6)
    tree = random_request(100, random_tree(30, generator), 4, 2, 64, torch.float32, generator)
    clean = attend_batch([tree])[0]
    for node in (0, 11, 29):
        slots = reference.ancestors(tree.parents, node)
        k, v, q = tree.k.clone(), tree.v.clone(), tree.q.clone()
        for other in set(range(30)) - set(slots):
            k[100 + other] = NAN
            v[100 + other] = NAN
            q[other] = NAN
        poisoned = Request(100, tree.parents, q, k, v)
        same(nodes_of(attend_batch([poisoned])[0], slots), nodes_of(clean, slots))
    # The first keys lie outside a window, and only there may they be NaN.
    k, v = tree.k.clone(), tree.v.clone()
    k[:50], v[:50] = NAN, NAN
    same(
        attend_batch([Request(100, tree.parents, tree.q, k, v)], window=50)[0],
        attend_batch([tree], window=50)[0],
    )


@hypothesis.given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 70),
    seq_len=st.sampled_from([0, 1, 15, 240, 256, 511]),
    page_size=st.sampled_from([None, 1, 4, 16, 64]),
    window=st.sampled_from([0, 0, 1, 20, 257]),
    branch=st.integers(1, 12),
)
@hypothesis.settings(max_examples=12)
@pytest.mark.op("tree_attention")
def test_any_tree_equals_its_chains(seed, nodes, seq_len, page_size, window, branch):
    generator = torch.Generator().manual_seed(seed)
    tree = random_request(seq_len, random_tree(nodes, generator, branch), 2, 1, 64, torch.bfloat16, generator)
    deepest = max(len(reference.ancestors(tree.parents, n)) for n in range(nodes)) - 1
    hypothesis.assume(branch == 1 or deepest <= 31)  # as far as a tree may branch
    got = attend_batch([tree], page_size=page_size, window=window)[0]
    picked = sorted({0, nodes // 2, nodes - 1})
    for node, result in zip(
        picked, attend_batch([tree.plain(n) for n in picked], page_size=16, window=window)
    ):
        same(result, nodes_of(got, [node]))
    check_against_fp64(tree, *got, window)


def row_invariance_cases():
    """(name, run, number of rows): run(rows) gives the outputs of those rows when computed together."""
    generator = torch.Generator().manual_seed(8)
    tree = random_request(300, random_tree(20, generator), 6, 2, 64, torch.bfloat16, generator)
    table = rope_table(400, 64)

    def attention(rows):
        return torch.stack([r[0][-1] for r in attend_batch([tree.path(n) for n in rows], page_size=16)])

    def append(rows):
        # k is rotated as q is: put it through q_out's place by taking it back from the cache.
        n = len(rows)
        cache = KVCache.empty(n, 330, 2, 64, dtype=torch.bfloat16)
        q = append_kv(
            tree.q[rows][:, None],
            tree.k[rows][:, None],
            tree.v[rows][:, None],
            cache,
            seq_lens=int32(rows),
            depths=torch.zeros((n, 1), dtype=torch.int32),
            num_nodes=torch.ones(n, dtype=torch.int32),
            cos=table.cos,
            sin=table.sin,
            q_norm=tree.k[0, 0],
            k_norm=tree.k[1, 0],
        )
        k = torch.stack([cache.k[b, rows[b]] for b in range(n)])
        v = torch.stack([cache.v[b, rows[b]] for b in range(n)])
        return torch.cat([q[:, 0], k, v], dim=1)

    yield "tree_attention", attention, 20
    yield "append_kv", append, 20


@pytest.mark.parametrize(
    ("name", "run", "rows"), list(row_invariance_cases()), ids=["tree_attention", "append_kv"]
)
def test_row_invariance(name, run, rows, one_and_two_threads):
    everything = list(range(rows))
    together, two = one_and_two_threads(lambda: run(everything))
    assert_same_bits(together, two)
    assert_same_bits(run(everything), together)
    for row in (0, 7, rows - 1):
        assert_same_bits(run([row]), together[row : row + 1])


@pytest.mark.op("tree_attention")
def test_the_bit_tests_can_fail():
    """One wrong mask bit, or two ancestors that change places (exactly equal in theory): the bits differ."""
    generator = torch.Generator().manual_seed(9)
    tree = random_request(200, random_tree(24, generator, branch=1), 4, 2, 64, torch.float32, generator)
    right = attend_batch([tree])[0]
    same(attend_batch([tree.path(23)])[0], nodes_of(right, reference.ancestors(tree.parents, 23)))

    words = reference.mask_words(tree.parents, 24)
    words[23, 0] ^= 1 << reference.ancestors(tree.parents, 23)[1]
    broken = attend_batch([tree], masks=[words])[0]
    same(nodes_of(broken, [22]), nodes_of(right, [22]))
    with pytest.raises(AssertionError, match="elements differ"):
        same(nodes_of(broken, [23]), nodes_of(right, [23]))

    rows = list(range(224))
    rows[203], rows[209] = rows[209], rows[203]
    swapped = Request(200, tree.parents, tree.q, tree.k[rows], tree.v[rows])
    with pytest.raises(AssertionError, match="elements differ"):
        same(nodes_of(attend_batch([swapped])[0], [23]), nodes_of(right, [23]))


# ---- instruction sets ------------------------------------------------------------------------------

_PROGRAM = """
import importlib.util, sys
import numpy as np
spec = importlib.util.spec_from_file_location("eagle_cuda._C", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
data = np.load(sys.argv[2])
results = {}
for name in data["names"]:
    a = {key.split("/")[1]: data[key] for key in data.files if key.startswith(name + "/")}
    q, k, v, seq_lens, num_nodes = a["q"], a["k"], a["v"], a["seq_lens"], a["num_nodes"]
    out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
    native.tree_attention(q, k, v, None, seq_lens, num_nodes, a["mask"], 0.1, 0, out, lse)
    native.append_kv(q, a["new_k"], a["new_v"], k, v, None, seq_lens, a["depths"], num_nodes, a["cos"],
                     a["sin"], False, a["norm"], a["norm"], 1e-6, q)
    results |= {f"{name}/{i}": x for i, x in enumerate((out, lse, q, k, v))}
results["isa"] = np.array(native.build_info()["cpu_isa"])
np.savez(sys.argv[3], **results)
"""


def supported_isas() -> list[str]:
    order = ["generic", "avx2", "avx512", "avx512_bf16"]
    return order[: order.index(_extension._C.build_info()["cpu_isa"]) + 1]


def test_every_instruction_set_gives_the_same_bits(tmp_path):
    """Without torch in the child, which is slow to import: numpy has fp32 and fp16. bf16: next test."""
    generator = torch.Generator().manual_seed(10)
    arrays = {"names": np.array(["fp32_64", "fp32_80", "fp16_96", "fp16_256"])}
    for name in arrays["names"]:
        dtype, dim = DTYPES[name.split("_")[0]], int(name.split("_")[1])
        tree = random_request(270, random_tree(7, generator), 4, 2, dim, dtype, generator)
        cache = build_cache([tree], None)
        table = rope_table(300, dim)
        new = random_request(0, chain(7), 4, 2, dim, dtype, generator)
        values = {
            "q": tree.q[None],
            "k": cache.k.contiguous(),
            "v": cache.v.contiguous(),
            "mask": reference.mask_words(tree.parents, 7)[None],
            "seq_lens": int32([270]),
            "num_nodes": int32([7]),
            "depths": int32([range(7)]),
            "cos": table.cos,
            "sin": table.sin,
            "norm": new.q[0, 0],
            "new_k": new.k[None],
            "new_v": new.v[None],
        }
        arrays |= {f"{name}/{key}": value.numpy() for key, value in values.items()}
    np.savez(tmp_path / "in.npz", **arrays)
    results = {}
    for isa in supported_isas():
        target = tmp_path / f"{isa}.npz"
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, _extension._C.__file__, str(tmp_path / "in.npz"), str(target)],
            env={**os.environ, "EAGLE_CPU_ISA": isa},
            check=True,
        )
        results[isa] = dict(np.load(target))
        assert str(results[isa].pop("isa")) == isa
    for isa, got in results.items():
        for key, want in results["generic"].items():
            assert np.array_equal(got[key].view(np.uint8), want.view(np.uint8)), (
                f"{key}: {isa} is not generic"
            )


@pytest.mark.full
@pytest.mark.parametrize("isa", supported_isas())
def test_fp64_and_bits_on_every_instruction_set(isa):
    """The fp64 oracle and the bit tests, bf16 included, under each instruction set."""
    chosen = ["-m", "not full", "-k", "fp64 or bit_for_bit or any_tree"]
    files = [
        Path(__file__).with_name(f"test_{name}.py")
        for name in ("attention", "attention_bits", "attention_features", "append_kv", "append_codes")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *chosen, *map(str, files)],
        env={**os.environ, "EAGLE_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
