"""The draft phase in one launch: bit for bit what the same phases give as launches of their own, with as few
barriers and as little traffic as it is meant to have.

A path that is wider than what the persistent kernel takes (65 rows) goes by launches, whatever stands in it.
Of narrower ones any number may be in the batch.
Bits are compared wherever there are CUDA kernels; what it costs is counted under the emulator.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from compare import assert_same_bits
from draft_rig import HEADS, Rig
from traffic import ROWS, WEIGHTS, bytes_moved, lines_of, packed_bytes

THREADS = 256


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Case(NamedTuple):
    head: tuple
    dtype: torch.dtype = torch.bfloat16
    batch: int = 3
    top_k: int = 4
    levels: int = 3
    temperature: float = 0.0
    max_nodes: int = 24
    paged: int = 16
    path: int = 5
    order: str = "path"
    lengths: tuple = ()
    full: bool = False  # most requests accept the whole path


def with_settings(head, **more):
    kind, settings = head
    return kind, settings | more


EAGLE1, EAGLE3, EAGLE31, QWEN = HEADS[:4]
TELLING = {
    "EAGLE-3": Case(EAGLE3),
    "EAGLE-2, coupled, 32 children": Case(EAGLE1, batch=2, top_k=32, levels=2, temperature=0.8),
    "EAGLE-3.1, fp16, coupled": Case(EAGLE31, torch.float16, temperature=1.2),
    "two layers, qk norm, norm before the residual": Case(QWEN, top_k=3, levels=4),
    "64 rows, contiguous": Case(with_settings(EAGLE3, head_dim=128), batch=8, top_k=8, levels=2, paged=0),
    "head size 128, contiguous": Case(with_settings(EAGLE3, head_dim=128), batch=2, levels=2, paged=0),
}
# Paths of more than 64 rows in all: they go through the head in tiles of whole requests.
TILES = {
    "64 rows of 4 levels, 68 of paths": Case(EAGLE3, batch=16, levels=4, full=True),
    "EAGLE-2, contiguous": Case(EAGLE1, batch=8, top_k=8, levels=2, path=12, paged=0, full=True),
    "two layers, fp16, coupled": Case(
        QWEN, torch.float16, batch=9, levels=2, path=10, temperature=0.9, full=True
    ),
}
MORE_TILES = {
    "64 chains": Case(EAGLE31, batch=64, top_k=1, levels=3, path=4, max_nodes=4, full=True),
    "64 rows of 8 levels, 56 of paths": Case(
        EAGLE3, batch=8, top_k=8, levels=8, path=9, max_nodes=60, full=True
    ),
    "long paths": Case(EAGLE3, batch=3, path=40, full=True),
    "fp8, two layers, many tiles": Case(
        with_settings(QWEN, weights="fp8"), batch=48, top_k=1, levels=2, path=12, full=True
    ),
}
# What of these the checker of the emulator sees in tests beside this one.
SEEN = {
    "EAGLE-3.1, fp16, coupled",  # test_draft_cuda.py
    "two layers, qk norm, norm before the residual",
    "64 rows, contiguous",  # test_draft_persistent_edges.py
}
OTHERS = {
    "chain": Case(EAGLE31, top_k=1, levels=20, temperature=0.7, max_nodes=21),
    "deep": Case(EAGLE3, batch=1, top_k=2, levels=31, max_nodes=60),
    "33 rows of paths": Case(EAGLE1, batch=3, path=11),
    "int8": Case(with_settings(EAGLE1, weights="int8"), torch.float16),
    "fp8": Case(with_settings(QWEN, weights="fp8")),
    "int4": Case(with_settings(EAGLE3, weights="int4")),
    "candidate order": Case(QWEN, batch=1, order="candidate", max_nodes=8),
    "two layers of EAGLE-1": Case(("eagle1", {"layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 128})),
    "long prefix": Case(EAGLE3, batch=2, paged=0, lengths=(600, 3)),
}


def run(case: Case, width: int | None = None, counting=nullcontext):
    """A cycle after prompts of some lengths, with paths of several and of no rows; the rig and its tree."""
    batch = case.batch
    lengths = list(case.lengths) or [(37 * b) % 101 + 3 for b in range(batch)]
    capacity = -(-(max(lengths) + case.levels * case.top_k + case.path) // 16) * 16
    options = {"paged": case.paged, "spare": 2 if case.paged else 0}
    rig = Rig.random(case.head, case.dtype, batch=batch, capacity=capacity, **options)
    rig.fill(lengths)
    counts = int32(*(min(b % 5, case.path) - (b == 3) * 4 for b in range(batch)))
    if case.full:
        counts = int32(*(-1 if b == 3 else 0 if b % 7 == 2 else case.path - 1 for b in range(batch)))
    if batch > 1:
        counts[1] = case.path - 1
    path, nodes = torch.full((batch, width or case.path), -1, dtype=torch.int32), max(12, case.path)
    for b, count in enumerate(counts.tolist()):
        path[b, : count + 1] = torch.randperm(nodes, generator=rig.random)[: count + 1]
    features = rig.features(batch, nodes)
    targets = torch.randint(0, 96, (batch, nodes), generator=rig.random).int()
    coupled = {}
    if case.temperature:
        heat = torch.full((batch,), case.temperature)
        heat[0] = 0.0
        coupled = {"temperature": heat, "seeds": torch.arange(batch) * 12345 - 7, "tau": 1.25}
    where = SimpleNamespace(path=path, num_accepted=counts)
    shape = {name: getattr(case, name) for name in ("max_nodes", "top_k", "levels", "order")}
    with counting() as rig.counters:
        tree = rig.draft(features, targets, where, **shape, **coupled)
    return rig, tree


def assert_same(case: Case, kernels):
    rig, tree = run(case, counting=kernels.counting)
    other_rig, other = run(case, 65, kernels.counting)
    if kernels.counts:
        assert rig.counters.launches == 1
        assert other_rig.counters.launches > 10
    for mine, theirs in zip(tree, other):
        assert_same_bits(mine, theirs)
    for cache, other_cache in zip(rig.caches, other_rig.caches):
        for b, length in enumerate(rig.lengths.tolist()):
            rows = rig.rows_of(b)[:length].unbind(1)
            assert_same_bits(cache.k[rows], other_cache.k[rows])
            assert_same_bits(cache.v[rows], other_cache.v[rows])
    assert int(tree.num_nodes.max()) > 2


@pytest.mark.op("draft")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.unchecked] * (name in SEEN)) for name in TELLING]
)
def test_one_launch_gives_what_many_give(name, kernels):
    assert_same(TELLING[name], kernels)


@pytest.mark.full
@pytest.mark.op("draft")
@pytest.mark.parametrize("name", OTHERS)
def test_one_launch_gives_what_many_give_in_other_cases(name, kernels):
    assert_same(OTHERS[name], kernels)


@pytest.mark.unchecked  # with tiles: test_draft_persistent_edges.py
@pytest.mark.op("draft")
@pytest.mark.parametrize("name", TILES)
def test_paths_in_tiles_give_what_many_launches_give(name, kernels):
    assert_same(TILES[name], kernels)


@pytest.mark.full
@pytest.mark.unchecked  # with tiles: test_draft_persistent_edges.py
@pytest.mark.op("draft")
@pytest.mark.parametrize("name", MORE_TILES)
def test_paths_in_tiles_give_what_many_launches_give_in_other_cases(name, kernels):
    assert_same(MORE_TILES[name], kernels)


EARLY = Case(EAGLE3, batch=2, levels=5)  # with few nodes: levels end when no tree can change


@pytest.mark.op("draft")
@pytest.mark.parametrize("max_nodes", [3, pytest.param(4, marks=pytest.mark.full)])
def test_levels_that_end_early_give_what_all_give(max_nodes, kernels):
    assert_same(EARLY._replace(max_nodes=max_nodes), kernels)


@pytest.mark.op("draft")
@pytest.mark.parametrize("device", [(5, 86), pytest.param((1, 90), marks=pytest.mark.full)])
def test_bits_do_not_depend_on_the_number_of_blocks(device, simulator):
    _, tree = run(TELLING["EAGLE-3"])
    with simulator.device(multiprocessors=device[0], compute_capability=device[1]):
        _, other = run(TELLING["EAGLE-3"])
    for mine, theirs in zip(tree, other):
        assert_same_bits(mine, theirs)


# ---- what it costs


class Cost(NamedTuple):
    tree: object
    blocks: int
    barriers: int  # of the grid
    weights: int  # bytes
    asked: int  # bytes between the two halves of a barrier
    rows: int  # bytes of what weights are multiplied with, by all blocks


def draft_cost(case: Case, simulator) -> Cost:
    batch = case.batch
    rig = Rig.random(case.head, case.dtype, batch=batch)
    features, tokens = rig.fill([9] * batch)
    shape = {name: getattr(case, name) for name in ("max_nodes", "top_k", "levels", "order")}
    with simulator.counting() as counters:
        tree = rig.draft_rows(features, tokens, **shape)
    assert counters.launches == 1
    blocks = counters.threads // THREADS
    barriers, left = divmod(counters.grid_arrivals, blocks)
    assert left == 0
    weights, rows = bytes_moved(simulator, WEIGHTS), bytes_moved(simulator, ROWS, WEIGHTS)
    return Cost(tree, blocks, barriers, weights, counters.grid_asked_bytes, rows)


ONCE: dict[str, tuple[Case, int]] = {  # and a compute capability: below 9.0 there are no bulk copies
    "EAGLE-3": (Case(EAGLE3, batch=1), 90),
    "EAGLE-2": (Case(EAGLE1, batch=1), 90),
    "EAGLE-3, int4": (Case(with_settings(EAGLE3, weights="int4"), batch=1), 90),
    "EAGLE-3, fp8, 8.6": (Case(with_settings(EAGLE3, weights="fp8"), batch=1), 86),
    "EAGLE-3, 64 rows": (Case(EAGLE3, batch=8, top_k=8), 90),
    "EAGLE-2, fp8": (Case(with_settings(EAGLE1, weights="fp8"), batch=1), 90),
    "EAGLE-3, int4, 64 rows, 8.6": (Case(with_settings(EAGLE3, weights="int4"), batch=8, top_k=8), 86),
}
NAMES = [*list(ONCE)[:5], *(pytest.param(name, marks=pytest.mark.full) for name in list(ONCE)[5:])]


@pytest.mark.unchecked  # both builds count alike
@pytest.mark.op("draft")
@pytest.mark.parametrize("name", NAMES)
def test_a_level_reads_its_weights_once_and_meets_few_times(name, simulator):
    case, capability = ONCE[name]
    kind, settings = case.head
    with simulator.device(compute_capability=capability):
        few, more = (draft_cost(case._replace(levels=n, max_nodes=256), simulator) for n in (2, 3))
    barriers = 6 if kind == "eagle3" else 7
    assert more.barriers - few.barriers == barriers
    assert few.barriers == 2 * barriers + (2 if kind == "eagle3" else 1)
    # A block's share of a product fits in its ring: all of it is asked for before the block waits.
    assert (few.asked, more.asked) == (few.weights, more.weights)
    width = 64 if kind == "eagle3" else 32
    level = [(512, width), (32, 256), (96, 32), (32, 48), (settings.get("draft_vocab", 96), 32)]
    if kind == "eagle1":
        level.append((32, 64))
    weights = packed_bytes(*level, form=settings.get("weights", "bf16"))
    assert weights <= more.weights - few.weights <= 1.01 * weights
    rows = case.batch * case.top_k * 2 * sum(k for _, k in level)
    # Once by every block; those without a tile ask for none.
    assert 0 < more.rows - few.rows <= 1.2 * rows * more.blocks


@pytest.mark.unchecked
@pytest.mark.op("draft")
def test_a_tile_of_paths_reads_the_layers_once_more(simulator):
    """What counts are the rows that paths have, not those that they could have; the LM head is read once."""
    batch, width = 16, 9
    rig = Rig.random(EAGLE3, torch.bfloat16, batch=batch)
    features = rig.features(batch, width)
    tokens = torch.randint(0, 96, (batch, width), generator=rig.random).int()
    path = torch.arange(width, dtype=torch.int32).repeat(batch, 1)

    def cost(count: int, absent: int = 0) -> tuple[int, int]:
        counts = torch.full((batch,), count, dtype=torch.int32)
        counts[:absent] = -1
        where = SimpleNamespace(path=path, num_accepted=counts)
        with simulator.counting() as counters:
            rig.draft(features, tokens, where, again=True, max_nodes=24, top_k=4, levels=2)
        assert counters.launches == 1
        return counters.grid_arrivals // (counters.threads // THREADS), bytes_moved(simulator, WEIGHTS)

    rig.before = rig.lengths.clone()
    barriers, weights = cost(0)
    assert barriers == 2 + 6 * 2
    layers = packed_bytes((32, rig.head.feature_size), (512, 64), (32, 256), (96, 32), (32, 48))
    for count, tiles in ((3, 1), (4, 2), (8, 3)):  # 64, 80 and 144 rows
        more_barriers, more_weights = cost(count)
        assert more_barriers == barriers + 6 * (tiles - 1)
        assert layers * (tiles - 1) <= more_weights - weights <= 1.01 * layers * (tiles - 1)
    assert cost(8, absent=9)[0] == barriers + 6  # 9 + 7 * 9 rows
    assert cost(8, absent=10)[0] == barriers  # 10 + 6 * 9 rows


PLACES = lines_of("cuda/draft/persistent.cuh", "place")


@pytest.mark.unchecked
@pytest.mark.op("draft")
def test_features_are_moved_of_the_rows_that_paths_have(simulator):
    """However long the arrays are: of the deepest trees they have 32 rows, of which a path is a few."""
    batch, width = 2, 32
    rig = Rig.random(EAGLE3, torch.bfloat16, batch=batch)
    features = rig.features(batch, width)
    tokens = torch.randint(0, 96, (batch, width), generator=rig.random).int()
    path = torch.arange(width, dtype=torch.int32).repeat(batch, 1)

    def moved(*counts: int) -> int:
        with simulator.counting() as counters:
            where = SimpleNamespace(path=path, num_accepted=int32(*counts))
            rig.draft(features, tokens, where, again=True, max_nodes=4, top_k=2, levels=2)
        assert counters.launches == 1
        return bytes_moved(simulator, PLACES)

    rig.before = rig.lengths.clone()
    row, root = 2 * 2 * rig.head.feature_size, moved(0, 0)  # there and back
    assert moved(-1, -1) == root  # of an absent request too
    for counts in ((1, 0), (0, 31), (7, 4)):
        rows = sum(counts)
        # Beside them, what every warp asks of a row, and what the phases take of it.
        assert row * rows <= moved(*counts) - root <= (row + 300) * rows


@pytest.mark.op("draft")
def test_levels_end_when_no_tree_can_change(simulator):
    """One node besides the root is the best child of the root: known after the first level."""
    cost = draft_cost(EARLY._replace(max_nodes=2), simulator)
    assert cost.barriers == 2 + 6
    whole = draft_cost(EARLY._replace(max_nodes=60), simulator)
    assert whole.barriers == 2 + 6 * 5
    assert cost.tree.num_nodes.tolist() == [2, 2]


BESIDE_ATTENTION = lines_of("cuda/draft/layer_work.cuh", "prefetch_o")  # before the barrier in front of it


@pytest.mark.unchecked
@pytest.mark.op("draft")
@pytest.mark.parametrize("form", ["bf16", pytest.param("int4", marks=pytest.mark.full)])
def test_weights_come_while_rows_attend(form, simulator):
    """Those of o as a whole, where they fit beside what attention keeps; else as far as they do, and the rest
    when it is over. Without bulk copies none."""
    settings = {"hidden": 512, "inner": 64, "heads": 8, "head_dim": 128, "kv_heads": 2}
    settings |= {} if form == "bf16" else {"weights": form}
    case = Case(("eagle3", settings), batch=1, max_nodes=256)
    attentions, o = 3, packed_bytes((512, 8 * 128), form=form)
    asked = {}
    for blocks, capability in ((16, 90), (1, 90), (16, 86)):
        with simulator.device(multiprocessors=blocks, compute_capability=capability):
            draft_cost(case, simulator)
            asked[blocks, capability] = bytes_moved(simulator, BESIDE_ATTENTION)
    assert asked[16, 90] == attentions * o
    assert 0 < asked[1, 90] < attentions * o
    assert asked[16, 86] == 0
