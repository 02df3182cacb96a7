"""What each CUDA kernel does in one typical case, as the emulator counts it: global traffic to the byte
whatever the compiler, shared memory and synchronisation to the wavefront under the compiler that the figures
are of.

A change of a kernel that moves a figure is meant to fail here: read the new figures in the message, and
change the line if they are the better ones.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import eagle_cuda
import on_device
from attention_requests import build_cache, random_request, random_tree
from draft_rig import HEADS, Rig
from eagle_cuda.attention import append_kv, rope_table, tree_attention
from eagle_cuda.kv_cache import KVCache, compact_kv
from eagle_cuda.linear import linear, lm_head_topk, pack_weight, rms_norm, unpack_weight
from eagle_cuda.sampling import gumbel_noise, sample_tokens
from eagle_cuda.tree import build_tree, empty_candidates, expand_tree, retrieve_indices, tree_from_parents
from eagle_cuda.verify import verify, verify_rejection
from on_device import op_of
from reference.attention import ancestors, mask_words
from traffic import packed_bytes

COMPILER = "GNU 12.2.0"  # of SHARED: what it keeps in registers does not show as a shared access


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def grown(levels: int = 8, top_k: int = 10):
    """Candidates and beam of EAGLE's default tree, before the last level is grown, and that level."""
    generator = torch.Generator().manual_seed(1)
    candidates, beam = empty_candidates(2, top_k, levels)
    for level in range(1, levels + 1):
        shape = (2, 1 if level == 1 else top_k, top_k)
        tokens = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
        log_probs = -torch.rand(shape, generator=generator)
        last = lambda tokens=tokens, log_probs=log_probs, level=level: expand_tree(  # noqa: E731
            tokens, log_probs, candidates, beam, level=level, levels=levels
        )
        if level < levels:
            last()
    return candidates, last


def expand():
    return grown()[1]


def build():
    candidates, last = grown()
    last()
    return lambda: build_tree(int32([7, 8]), candidates, max_nodes=60)


def retrieve():
    tree = build()()
    return lambda: retrieve_indices(tree, max_leaves=60, max_path=9)


def walk():
    parents = [-1] + [i // 2 for i in range(63)]
    tree = tree_from_parents([list(range(64))] * 4, [parents] * 4, [64] * 4)
    targets = int32([[2 * i + 2 for i in range(64)]] * 4)
    stop, budget = int32([[-1, 500]] * 4), int32([100] * 4)
    return lambda: verify(tree, targets, int32([9] * 4), stop_tokens=stop, budget=budget, max_path=9)


def reject():
    """The root's first child is accepted, its children are not."""
    tree = tree_from_parents([[0, 1, 2, 3, 4]], [[-1, 0, 0, 1, 1]])
    p = torch.full((1, 5, 32001), 2.0**-15)
    p[0, 1, 3:5] = 0.0
    coins = {"coins": torch.zeros(1, 5), "final_coins": torch.full((1,), 0.5)}
    return lambda: verify_rejection(tree, p, int32([9]), scheme="point_mass", **coins)


def compact():
    pages = int32([[5, 1, 7]])
    caches = [KVCache(*torch.zeros(2, 8, 16, 8, 128, dtype=torch.bfloat16), pages) for _ in range(2)]
    path = int32([[0, 1, 2, 5, 9, 11, 30, -1]])
    return lambda: compact_kv(caches, path, int32([6]), int32([12]), max_nodes=60)


def greedy():
    logits = torch.randn(1, 1, 32001, generator=torch.Generator().manual_seed(1)).bfloat16()
    settings = {
        "temperature": torch.zeros(1),
        "seeds": torch.zeros(1, dtype=torch.int64),
        "positions": int32([[3]]),
    }
    return lambda: sample_tokens(logits, **settings)


def attention_inputs(
    nodes=16, heads=8, kv_heads=2, dim=128, length=600, batch=1, dtype=torch.bfloat16, codes="none"
):
    """A request with a random tree in pages of 16; the others of the batch are empty."""
    generator = torch.Generator().manual_seed(1)
    parents = random_tree(nodes, generator)
    tree = random_request(length, parents, heads, kv_heads, dim, dtype, generator, codes)
    cache = build_cache([tree], page_size=16)
    if codes != "none":  # its rows lie at odd addresses, which are not for vectors
        cache = cache._replace(k=cache.k.contiguous(), v=cache.v.contiguous())
    table = torch.full((batch, cache.page_table.shape[1]), -1, dtype=torch.int32)
    table[0] = cache.page_table[0]
    lengths, counts = torch.zeros(2, batch, dtype=torch.int32)
    lengths[0], counts[0] = length, nodes
    return tree, cache._replace(page_table=table), {"seq_lens": lengths, "num_nodes": counts}


def append():
    tree, cache, sizes = attention_inputs()
    cos, sin = rope_table(1024, 128, 10000.0, None)
    depths = int32([[len(ancestors(tree.parents, node)) - 1 for node in range(16)]])
    q, k, v = tree.q[None], tree.k[None, :16], tree.v[None, :16]
    weight = torch.ones(128, dtype=torch.bfloat16)
    rotation = {"depths": depths, "cos": cos, "sin": sin}
    return lambda: append_kv(q, k, v, cache, **sizes, **rotation, q_norm=weight, k_norm=weight)


def attend(**options):
    tree, cache, sizes = attention_inputs(**options)
    batch, nodes = len(sizes["num_nodes"]), len(tree.parents)
    q = torch.zeros(batch, *tree.q.shape, dtype=tree.q.dtype)
    mask = torch.zeros(batch, nodes, -(-nodes // 32), dtype=torch.int32)
    q[0], mask[0] = tree.q, mask_words(tree.parents, nodes)
    return lambda: tree_attention(q, cache, **sizes, mask=mask)


def product():
    """Ten rows and one slice of K in two: weights once, x once for each of 12 blocks, partial sums."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(10, 512, generator=generator), torch.randn(96, 512, generator=generator)
    packed = pack_weight(weight, "bf16")
    return lambda: linear(x.bfloat16(), packed)


def norm():
    x = torch.randn(10, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    return lambda: rms_norm(x, x[0])


def head():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(10, 256, generator=generator), torch.randn(1000, 256, generator=generator)
    packed = pack_weight(weight, "bf16")
    return lambda: lm_head_topk(x.bfloat16(), packed, 10)


WEIGHT = (96, 512)


def pack(weight_format: str):
    weight = torch.randn(WEIGHT, generator=torch.Generator().manual_seed(1)).bfloat16()
    return lambda: pack_weight(weight, weight_format)


def unpack():
    packed = pack("bf16")()
    return lambda: unpack_weight(packed)


def noise():
    seeds, positions = torch.arange(3), int32([5, 6, 7])
    return lambda: gumbel_noise(seeds, positions, 1031)


def prompt():
    """40 rows of three requests by EAGLE-3's head."""
    rig = Rig.random(HEADS[1], torch.bfloat16, batch=3, paged=16)
    offsets = [0, 9, 39, 40]
    rows = rig.pairs(offsets[-1])
    return lambda: rig.extend(*rows, offsets)


def phase():
    """EAGLE-3's head for one request with 8 rows, which has accepted its root: three levels of 4."""
    rig = Rig.random(HEADS[1], torch.bfloat16, paged=16)
    rows = rig.fill([9])
    return lambda: rig.draft_rows(*rows, max_nodes=60, top_k=4, levels=3)


CASES = {
    "append_kv": append,
    "tree_attention": attend,
    "linear": product,
    "rms_norm": norm,
    "lm_head_topk": head,
    "expand_tree": expand,
    "build_tree": build,
    "retrieve_indices": retrieve,
    "verify": walk,
    "verify_rejection": reject,
    "compact_kv": compact,
    "sample_tokens": greedy,
    "gumbel_noise": noise,
    "pack_weight": lambda: pack("bf16"),
    "pack_weight, fp8": lambda: pack("fp8"),
    "pack_weight, int4": lambda: pack("int4"),
    "unpack_weight": unpack,
    "extend_draft": prompt,
    "draft": phase,
}


NAMES = [pytest.param(name, marks=pytest.mark.op(op_of(name))) for name in CASES]
GLOBAL = ("global_load_bytes", "global_store_bytes", "barriers")
SECTORS = ("global_load_sectors", "global_store_sectors")
SHARED = (
    "shared_load_waves",
    "shared_load_ideal",
    "shared_store_waves",
    "shared_store_ideal",
    "collectives",
    "atomics",
)
# GLOBAL; SECTORS, at most; SHARED
EXPECTED = {
    "append_kv": [(303104, 49152, 0), (5120, 1664), (1280, 1280, 2048, 2048, 512, 0)],
    "tree_attention": [
        (1792872, 232448, 212),
        (52849, 7264),
        (94698, 94570, 14072, 14072, 16534, 0),
    ],
    "linear": [(172032, 14208, 60), (5376, 504), (1920, 1920, 1656, 1656, 588, 12)],
    "rms_norm": [(40960, 10240, 10), (960, 320), (80, 80, 10, 10, 40, 0)],
    "lm_head_topk": [(708096, 29000, 256), (22128, 1330), (10432, 10432, 6232, 6232, 42594, 32)],
    "expand_tree": [(2000, 2960, 8), (75, 112), (50, 44, 38, 38, 150, 0)],
    "build_tree": [(11840, 3848, 53), (473, 175), (1506, 1435, 770, 754, 524, 2038)],
    "retrieve_indices": [(480, 4328, 17), (19, 154), (328, 312, 104, 104, 16, 118)],
    "verify": [(5168, 208, 0), (144, 24), (176, 176, 32, 32, 24, 0)],
    "verify_rejection": [(531532, 60, 23), (16207, 11), (410, 410, 367, 367, 2240, 0)],
    "compact_kv": [(34032, 32768, 4), (1044, 1024), (272, 272, 8, 8, 8, 0)],
    "sample_tokens": [(64020, 12, 7), (2005, 3), (240, 240, 37, 37, 288, 0)],
    "gumbel_noise": [(9288, 12372, 0), (50, 1572), (0, 0, 0, 0, 0, 0)],
    "pack_weight": [(98304, 98304, 0), (6144, 3072), (0, 0, 0, 0, 0, 0)],
    "pack_weight, fp8": [(196608, 49536, 0), (6144, 3168), (0, 0, 0, 0, 480, 0)],
    "pack_weight, int4": [(98304, 26112, 0), (6144, 2304), (0, 0, 0, 0, 3840, 0)],
    "unpack_weight": [(98304, 98304, 0), (3072, 6144), (0, 0, 0, 0, 0, 0)],
    "extend_draft": [(1016312, 121784, 542), (25476, 5453), (24348, 24292, 10394, 10394, 3908, 0)],
    "draft": [(549084, 32272, 683), (14489, 1434), (85481, 85276, 10193, 10081, 6084, 233)],
}

ELEMENTS = WEIGHT[0] * WEIGHT[1]
LAYER = packed_bytes((512, 64), (32, 256), (96, 32), (32, 48))  # of HEADS[1]
FC, LM_HEAD = packed_bytes((32, 96)), packed_bytes((40, 32))
FEATURES, EMBEDDING, HIDDEN, KEY_AND_VALUE = 2 * 96, 2 * 32, 2 * 32, 2 * 2 * 2 * 64
# (bytes that must be loaded, bytes that must be stored); how many times both together are moved at most.
LEAST = {
    "gumbel_noise": ((3 * (8 + 4), 3 * 4 * 1031), 1.13),  # every warp asks for a seed and a position
    "pack_weight": ((2 * ELEMENTS, 2 * ELEMENTS), 1.0),
    # A row once for its scale, once for its codes.
    "pack_weight, fp8": ((2 * ELEMENTS, ELEMENTS + 4 * WEIGHT[0]), 1.67),
    "pack_weight, int4": ((2 * ELEMENTS, ELEMENTS // 2 + 2 * ELEMENTS // 64), 1.0),
    "unpack_weight": ((2 * ELEMENTS, 2 * ELEMENTS), 1.0),
    # Beside weights as small as these, it is mostly what one launch leaves for the next, x for every block.
    "extend_draft": ((FC + LAYER + 40 * FEATURES, 40 * (KEY_AND_VALUE + HIDDEN)), 6.8),
    # Weights once a level; of the cache, the rows of phases before, by the path and by two beams.
    "draft": (
        (
            FC + 3 * (LAYER + LM_HEAD) + FEATURES + 9 * EMBEDDING + (8 + 9 + 13) * KEY_AND_VALUE,
            9 * KEY_AND_VALUE + 4 * (60 * 8 + 1),
        ),
        1.44,
    ),
}


def measure(name: str, simulator) -> list[tuple[int, ...]]:
    call = CASES[name]()
    with simulator.counting() as counters:
        call()
    figures = dataclasses.asdict(counters)
    return [tuple(figures[key] for key in keys) for keys in (GLOBAL, SECTORS, SHARED)]


@pytest.mark.parametrize("name", NAMES)
def test_a_typical_case_costs_what_it_did(name, simulator):
    expected, measured = EXPECTED[name], measure(name, simulator)
    sites = [site for site in simulator.traffic() if site.memory == "global"]
    assert measured[0] == expected[0], f"{name}: {dict(zip(GLOBAL, measured[0]))}"
    assert all(m <= e for m, e in zip(measured[1], expected[1])), f"{name}: {dict(zip(SECTORS, measured[1]))}"
    if simulator.checked and eagle_cuda.build_info()["compiler"] == COMPILER:
        assert measured[2] == expected[2], f"{name}: {dict(zip(SHARED, measured[2]))}"
    if name in LEAST:
        least, times = LEAST[name]
        moved = [sum(site.moved for site in sites if site.access == a) for a in ("load", "store")]
        assert least[0] <= moved[0], f"{name}: {moved}"
        assert least[1] <= moved[1], f"{name}: {moved}"
        assert sum(moved) <= times * sum(least), f"{name}: {moved}"


def test_every_op_with_a_kernel_has_a_case():
    assert {op_of(name) for name in CASES} == set(on_device.ops_with_kernels())


@pytest.mark.parametrize("name", NAMES)
def test_shared_memory_has_few_bank_conflicts(name, simulator):
    if not simulator.checked:
        pytest.skip("shared memory is counted in checked builds")
    load, load_ideal, store, store_ideal, *_ = measure(name, simulator)[2]
    assert load <= 1.25 * load_ideal
    assert store <= 1.25 * store_ideal


@pytest.mark.op("lm_head_topk")
@pytest.mark.parametrize("coupled", [False, True])
def test_the_draft_vocabulary_is_mapped_for_survivors_unless_noise_wants_all(coupled, simulator):
    """The noise of a token is that of its target id: coupled, every row asks for all ids."""
    rows, vocabulary, top_k = 3, 1000, 10
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    packed = pack_weight(torch.randn(vocabulary, 256, generator=generator), "bf16")
    noise = {
        "temperature": torch.ones(rows),
        "seeds": torch.arange(rows),
        "positions": torch.arange(rows, dtype=torch.int32),
    }
    loaded = []
    for ids in (None, torch.arange(0, 2 * vocabulary, 2, dtype=torch.int32)):
        with simulator.counting() as counters:
            lm_head_topk(x, packed, top_k, draft_to_target=ids, **(noise if coupled else {}))
        loaded.append(counters.global_load_bytes)
    survivors = 4 * rows * top_k
    assert loaded[1] - loaded[0] >= (4 * vocabulary if coupled else survivors)
    assert loaded[1] - loaded[0] <= (4 * vocabulary * rows + survivors if coupled else survivors)


# ---- attention: the common pass, which reads the prefix, and the tail, which reads the end of every path


def phases(simulator, **options) -> dict[str, int]:
    """Bytes that a call moves. The common pass leaves partial results, which the tail's kernel reads."""
    call = attend(**options)
    with simulator.counting():
        call()
    found = dict.fromkeys(("sizes", "common", "partials", "tail", "out", "common's mask", "tail's mask"), 0)
    for site in simulator.traffic():
        if site.memory != "global":
            continue
        common = "common_pass.cuh" in site.line
        if stands_at(site.line, MASK):
            name = "common's mask" if common else "tail's mask"
        elif stands_at(site.line, SIZES):
            name = "sizes"
        elif common:
            name = "partials" if site.access == "store" or stands_at(site.line, FOLDS) else "common"
        else:
            name = "out" if site.access == "store" else "partials" if stands_at(site.line, READS) else "tail"
        found[name] += site.moved
    return found


ATTENTION = Path(__file__).resolve().parent.parent / "csrc/cuda/attention"


def lines_with(file: str, *texts: str) -> set[str]:
    """Where they stand in a file of the attention kernels, as the emulator writes it."""
    source = (ATTENTION / file).read_text().splitlines()
    found = {f"{file}:{i}" for i, line in enumerate(source, start=1) if any(text in line for text in texts)}
    assert len(found) >= len(texts), f"{file}: expected {texts}, found {found}"
    return found


def stands_at(chain: str, lines: set[str]) -> bool:
    return not lines.isdisjoint(chain.split(" < "))


MASK = lines_with("positions.cuh", "p.mask")
SIZES = lines_with("positions.cuh", "p.seq_lens", "p.num_nodes")
READS = lines_with("finish.cuh", "partials.stats", "partials.out")
FOLDS = lines_with("common_pass.cuh", "load(to)")  # several groups by one block


@pytest.mark.unchecked
@pytest.mark.op("tree_attention")
@pytest.mark.parametrize("batch", [9, 150], ids=["a block for each chunk", "one block"])
def test_the_prefix_is_read_once_and_the_tail_by_itself(batch, simulator):
    """240 packed rows are one tile. Every block reads its queries, and leaves a partial of each row and unit
    of positions. What each warp asks of the batch's sizes is left out: they are a few words."""
    nodes, heads, kv_heads, dim, length = 60, 8, 2, 128, 2080
    moved = phases(simulator, nodes=nodes, length=length, batch=batch)
    parents = random_tree(nodes, torch.Generator().manual_seed(1))
    positions = [length + len(ancestors(parents, node)) - 1 for node in range(nodes)]
    limits = [(position - 31) // 16 * 16 for position in positions]

    row, partial = dim * 2, dim * 4 + 8
    prefix = 2 * max(limits) * kv_heads * row
    queries = nodes * heads * row
    if batch == 9:
        blocks, written = 9, 9  # of a KV head; partials of a row, one a chunk
        read = sum(-(-limit // 256) for limit in limits) * heads
    else:
        blocks, written = 1, 2  # one a group of chunks, the second folded onto the first
        read = 2 * nodes * heads
    partials = (written * nodes * heads + read) * partial
    common = moved["common"] + moved["common's mask"] + moved["partials"] + moved["out"]
    assert common <= 1.05 * (prefix + blocks * queries + queries + partials)
    assert moved["common"] <= 1.01 * (prefix + blocks * queries)
    tail = 2 * sum(position + 1 - limit for position, limit in zip(positions, limits)) * kv_heads * row
    assert tail + queries <= moved["tail"] <= 1.02 * (tail + queries)


@pytest.mark.unchecked
@pytest.mark.op("tree_attention")
def test_the_mask_is_read_for_nodes_and_not_for_keys(simulator):
    """By the common pass to learn where its rows stand, by the tail to find ancestors: as much behind 300
    keys as behind 1500."""
    few, many = (phases(simulator, nodes=33, length=length, batch=150) for length in (300, 1500))
    assert many["common"] > 3 * few["common"]
    for name in ("common's mask", "tail's mask"):
        assert 0 < many[name] == few[name] < 50_000


SHARED_CASES = [
    *((dim, torch.bfloat16, "none") for dim in (64, 80, 96, 128, 192, 256)),
    (64, torch.float16, "none"),
    (80, torch.float32, "none"),
    (128, torch.bfloat16, "rows"),  # of float8
]


@pytest.mark.op("tree_attention")
@pytest.mark.parametrize(
    ("dim", "dtype", "codes"), SHARED_CASES, ids=lambda value: str(value).removeprefix("torch.")
)
def test_no_access_has_many_bank_conflicts(dim, dtype, codes, simulator):
    """Line by line: all of an instruction's requests together take at most twice the fewest wavefronts."""
    if not simulator.checked:
        pytest.skip("shared memory is counted in checked builds")
    call = attend(nodes=9, heads=6, kv_heads=1, dim=dim, length=310, dtype=dtype, codes=codes)
    with simulator.counting():
        call()
    sites = [site for site in simulator.traffic() if site.memory == "shared"]
    assert len(sites) >= 10
    assert [site for site in sites if site.units > 2 * site.ideal] == []
    assert sum(site.units for site in sites) <= 1.25 * sum(site.ideal for site in sites)
