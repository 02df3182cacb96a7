"""The draft phase in one launch where it is easy to get wrong: requests that are absent or want no node,
full caches, NaN, memory that holds garbage, products whose rings differ. Against the same phases as launches
of their own, which a path of 65 rows takes. A GPU has the blocks that it has, whatever is asked of the
emulator.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draft_rig
from compare import assert_same_bits
from draft_rig import HEADS, Rig
from eagle_cuda.draft import draft
from eagle_cuda.tree import MC_SIM_7B_63, TreeShape

MANY = 65  # rows of a path, more than the persistent kernel takes
EAGLE1, EAGLE3, EAGLE31, QWEN = HEADS[:4]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """A cycle of a batch whose requests have `lengths` rows in the cache and accept `counts` nodes (-1: the
    request is absent)."""

    def __init__(self, head, lengths, counts, *, dtype=torch.bfloat16, paged=16, capacity=None, **rig):
        batch, path = len(lengths), max(max(counts) + 1, 1)
        capacity = capacity or max(lengths) + 64
        self.rig = Rig.random(
            head, dtype, batch=batch, capacity=capacity, paged=paged, spare=2 * bool(paged), **rig
        )
        self.rig.lengths += int32(*lengths)  # of random keys and values
        nodes = max(path, 6)
        self.features = self.rig.features(batch, nodes)
        self.tokens = torch.randint(0, 96, (batch, nodes), generator=self.rig.random).int()
        self.counts = int32(*counts)
        self.path = torch.full((batch, path), -1, dtype=torch.int32)
        for b, count in enumerate(counts):
            self.path[b, : count + 1] = torch.arange(count + 1)
        self.caches = [(cache.k.clone(), cache.v.clone()) for cache in self.rig.caches]

    def run(self, width: int = 0, **options):
        """The tree and the caches behind it; every run begins with the same caches."""
        for cache, (k, v) in zip(self.rig.caches, self.caches):
            cache.k.copy_(k)
            cache.v.copy_(v)
        path = torch.full((len(self.counts), max(width, self.path.shape[1])), -1, dtype=torch.int32)
        path[:, : self.path.shape[1]] = self.path
        where = SimpleNamespace(path=path, num_accepted=self.counts)
        tree = draft(
            self.rig.head, self.features, self.tokens, where, self.rig.lengths, self.rig.caches, **options
        )
        return tree, [(cache.k.clone(), cache.v.clone()) for cache in self.rig.caches]

    def compare(self, kernels, **options):
        """Trees and committed rows of one launch and of many."""
        with kernels.counting() as one:
            tree, caches = self.run(**options)
        with kernels.counting() as many:
            other, other_caches = self.run(MANY, **options)
        if kernels.counts:
            assert one.launches == 1
            assert many.launches > 10
        for mine, theirs in zip(tree, other):
            assert_same_bits(mine, theirs)
        for mine, theirs in zip(caches, other_caches):
            for b, length in enumerate((self.rig.lengths + self.counts + 1).tolist()):
                rows = self.rig.rows_of(b)[:length].unbind(1)
                for x, y in zip(mine, theirs):
                    assert_same_bits(x[rows], y[rows])
        return tree


GROW: dict[str, Any] = {"top_k": 4, "levels": 3, "max_nodes": 24}


@pytest.mark.op("draft")
def test_requests_that_are_absent_or_want_no_node(kernels):
    step = Step(EAGLE3, [20, 3, 9, 40, 5], [2, -1, 0, 3, -1])
    tree = step.compare(kernels, **GROW, node_limit=int32(0, 24, 1, 2, 0))
    assert tree.num_nodes.tolist() == [0, 0, 1, 2, 0]
    tree = step.compare(kernels, **GROW, node_limit=int32(99, 5, -3, 24, 1))
    assert tree.num_nodes.tolist() == [24, 0, 0, 24, 0]


@pytest.mark.op("draft")
@pytest.mark.parametrize(
    "counts",
    [
        (15, -1, 15, 15, 12, 0, -1, 15),  # 64 rows without the last, and 16
        pytest.param((-1,) * 5 + (62,) * 2 + (-1,), marks=pytest.mark.unchecked),  # 5, 63, 64 rows
    ],
    ids=["2 tiles", "tiles of the absent"],
)
def test_paths_in_tiles(counts, kernels):
    """More than 64 rows in all; requests without any stand at both ends of a tile."""
    step = Step(EAGLE3, [20, 3, 9, 40, 5, 1, 33, 60], counts, capacity=160)
    tree = step.compare(kernels, **GROW | {"levels": 2})
    assert tree.num_nodes.tolist() == [0 if count < 0 else 21 for count in counts]


@pytest.mark.op("draft")
def test_a_batch_without_anybody(kernels):
    """Its caches stay as they are, and no level is grown for it."""
    step = Step(EAGLE1, [20, 3], [-1, -1])
    with kernels.counting() as short:
        tree, caches = step.run(**GROW)
    with kernels.counting() as long:
        step.run(**GROW | {"levels": 9})
    assert tree.num_nodes.tolist() == [0, 0]
    for (k, v), (k_before, v_before) in zip(caches, step.caches):
        assert_same_bits(k, k_before)
        assert_same_bits(v, v_before)
    if kernels.counts:
        assert long.barriers == short.barriers


@pytest.mark.op("draft")
@pytest.mark.parametrize(
    ("head", "batch", "options"),
    [
        pytest.param(EAGLE3, 8, {"top_k": 8, "levels": 3, "max_nodes": 40}, marks=pytest.mark.full),
        (EAGLE31, 5, {"top_k": 1, "levels": 6, "max_nodes": 7}),
        pytest.param(QWEN, 2, {"top_k": 32, "levels": 2, "max_nodes": 256}, marks=pytest.mark.full),
        pytest.param(
            *(EAGLE3, 1, {"top_k": 32, "levels": 8, "max_nodes": 256}),
            marks=pytest.mark.unchecked,
        ),
    ],
    ids=["64 rows", "chains", "1056 candidates", "7200 candidates"],
)
def test_the_largest_and_the_smallest_beams(head, batch, options, kernels):
    step = Step(head, [(29 * b) % 50 + 1 for b in range(batch)], [b % 3 for b in range(batch)])
    tree = step.compare(kernels, **options)
    assert int(tree.num_nodes.min()) > 1
    if options["levels"] == 8:
        assert int(tree.depths.max()) > 5  # grown beyond 4096 candidates


COMB = [(0,) * n for n in range(1, 7)] + [(0,) * n + (1,) for n in range(6)]
WIDE = [(i,) for i in range(31)] + [(i, j) for i in range(32 - 4) for j in (0, 1, 2, 3, 7, 9, 20, 30)]
STATIC = {
    "coupled, in candidate order": (EAGLE1, MC_SIM_7B_63, {"order": "candidate", "temperature": 0.8}),
    "published": (EAGLE3, MC_SIM_7B_63, {}),
    "fewer levels and nodes": (QWEN, MC_SIM_7B_63, {"levels": 3, "node_limit": int32(9, 4, 2, 99)}),
    "comb": (EAGLE31, TreeShape(COMB), {}),
    "second choices": (EAGLE3, TreeShape([(1,), (1, 0), (1, 2), (1, 2, 1)]), {}),
    "chain": (EAGLE31, TreeShape.chain(35), {}),
}


def static_options(shape, options, batch):
    options = {"shape": shape} | options
    if (heat := options.pop("temperature", None)) is not None:
        options |= {"temperature": torch.full((batch,), heat), "seeds": torch.arange(batch) * 77 - 5}
    return options


@pytest.mark.op("draft")
@pytest.mark.parametrize(
    "name",
    [name if i == 0 else pytest.param(name, marks=pytest.mark.unchecked) for i, name in enumerate(STATIC)],
)
def test_static_trees(name, simulator):
    head, shape, options = STATIC[name]
    step = Step(head, [20, 3, 9, 40], [2, 0, -1, 1])
    tree = step.compare(simulator, **static_options(shape, options, 4))
    nodes = 1 + shape.nodes_within(options.get("levels", shape.levels))
    limits = options.get("node_limit", torch.full((4,), 256))
    assert tree.num_nodes.tolist() == [
        0 if count < 0 else min(nodes, int(limit)) for count, limit in zip(step.counts, limits)
    ]


@pytest.mark.unchecked
@pytest.mark.op("draft")
def test_the_largest_static_tree(simulator):
    """255 nodes in beams of 31 rows."""
    shape = TreeShape(WIDE)
    assert (shape.num_nodes, shape.top_k) == (255, 31)
    step = Step(QWEN, [29, 7], [1, 0])
    tree = step.compare(simulator, shape=shape)
    assert tree.num_nodes.tolist() == [256, 256]


@pytest.mark.unchecked
@pytest.mark.op("draft")
def test_levels_of_a_static_tree_end_when_no_tree_can_change(simulator):
    """Its beam is not sorted: on level 2 the second row is the better one, and goes on where the first could
    not."""
    shape = TreeShape([(0,), (1,), (0, 7), (1, 0), (0, 7, 0), (1, 0, 0)])
    step = Step(EAGLE3, [20, 3], [2, 0], peaked=True)
    arrivals = {}
    for limit, depth in ((2, 1), (5, 3), (7, 3)):
        options = {"shape": shape, "node_limit": int32(limit, limit)}
        with simulator.counting() as counters:
            step.run(**options)
        arrivals[limit] = counters.grid_arrivals
        tree = step.compare(simulator, **options)
        assert tree.num_nodes.tolist() == [limit, limit]
        assert tree.depths.max(1).values.tolist() == [depth, depth]
    assert arrivals[2] < arrivals[5] == arrivals[7]


@pytest.mark.op("draft")
@pytest.mark.parametrize(
    ("left", "paged"),
    [(0, 16), (2, 0), (9, 16)]
    + [pytest.param(*case, marks=pytest.mark.unchecked) for case in ((0, 0), (2, 16), (9, 0))],
)
def test_a_full_cache(left, paged, kernels):
    """The path, or the beam, has no row any more: it attends to what there is."""
    step = Step(EAGLE3, [32 - left, 11], [3, 2], paged=paged, capacity=32)
    step.compare(kernels, **GROW)


@pytest.mark.op("draft")
@pytest.mark.parametrize("weight", ["lm_head.weight", "midlayer.mlp.down_proj.weight", "fc.weight"])
def test_weights_that_are_not_numbers(weight, kernels, monkeypatch):
    """A NaN in one row of a weight, in all of it, or infinities."""
    whole = draft_rig.random_head

    def poisoned(*args, **kwargs):
        config, tensors = whole(*args, **kwargs)
        tensors[weight][3] = float("nan")
        tensors[weight][5] = float("inf")
        return config, tensors

    monkeypatch.setattr(draft_rig, "random_head", poisoned)
    Step(EAGLE3, [20, 3], [2, 0]).compare(kernels, **GROW)


@pytest.mark.op("draft")
def test_what_one_request_holds_is_nothing_to_the_others(kernels):
    """NaN in every feature of a request, and in all rows that nobody has written."""
    step = Step(EAGLE31, [20, 3, 37], [2, 0, 1])
    clean, _ = step.run(**GROW)
    step.features[1] = float("nan")
    for k, v in step.caches:
        rows = torch.ones(k.shape[:2], dtype=torch.bool)
        for b, length in enumerate(step.rig.lengths.tolist()):
            rows[step.rig.rows_of(b)[:length].unbind(1)] = False
        k[rows] = v[rows] = float("nan")
    tree = step.compare(kernels, **GROW)
    for mine, theirs in zip(tree, clean):
        assert_same_bits(mine[::2], theirs[::2])
    assert tree.num_nodes[1] == 1


@pytest.mark.op("draft")
def test_a_workspace_may_hold_anything(kernels):
    """The second cycle finds what the first left, the third garbage."""
    step = Step(EAGLE1, [20, 3], [2, 0])
    want, _ = step.run(**GROW)
    room = torch.full((1 << 22,), 0xA5, dtype=torch.uint8)
    for _ in range(2):
        for options in (GROW | {"levels": 2}, GROW):
            got, _ = step.run(**options, workspace=room)
        for mine, theirs in zip(got, want):
            assert_same_bits(mine, theirs)


@pytest.mark.unchecked
@pytest.mark.op("draft")
@pytest.mark.parametrize("blocks", [1, 8])
def test_long_prefixes(blocks, kernels):
    """By one block several groups of 2048 positions, folded as they come; by more, chunks."""
    wide = ("eagle3", {"head_dim": 128, "qk_norm": True})
    step = Step(wide, [4500, 300], [1, 0], paged=0)
    with kernels.device(multiprocessors=blocks):
        step.compare(kernels, **GROW | {"levels": 2})


@pytest.mark.unchecked
@pytest.mark.op("draft")
@pytest.mark.parametrize("blocks", [1, 3])
def test_products_of_different_rings(blocks, kernels):
    """Some products have 16 row tiles a block and a ring of 6 places, which is gone round an odd number of
    times, the next one a few tiles and a longer ring."""
    wide = ("eagle3", {"hidden": 512, "inner": 320})
    step = Step(wide, [20], [1])
    with kernels.device(multiprocessors=blocks):
        step.compare(kernels, **GROW | {"levels": 2})
