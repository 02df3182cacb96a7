"""draft with a static tree against a naive head run along every node's own path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import draft_rig
from draft_rig import HEADS, Rig, accepted, trees_of
from eagle_cuda.draft import draft
from eagle_cuda.tree import MC_SIM_7B_63, TreeShape, empty_draft_tree
from reference import draft as reference
from reference.sampling import gumbel

COMB = [(0,) * n for n in range(1, 7)] + [(0,) * n + (1,) for n in range(6)]
SHAPES = {
    "mc_sim_7b_63": MC_SIM_7B_63,
    "chain": TreeShape.chain(5),
    "one node": TreeShape([(0,)]),
    "second choices": TreeShape([(1,), (1, 0), (1, 2), (1, 2, 1)]),
    "comb": TreeShape(COMB),
    "long chain": TreeShape.chain(36),
    "more rows than ranks": TreeShape(
        [(0,), (1,), *((i, j) for i in (0, 1) for j in (0, 1))]
        + [(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)]
    ),
    "wide": TreeShape([(i,) for i in range(15)] + [(i, j) for i in range(15) for j in range(16)]),
}
assert SHAPES["wide"].num_nodes == 255


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def wanted(rig: Rig, b: int, shape: TreeShape, **options):
    naive, (known, follow) = rig.naive(torch.float64), rig.history[b]
    g = naive.extend(known.double(), follow)[-1]
    return reference.static_tree(naive, g, int(follow[-1]), shape.paths, **options)


def assert_equals(got: dict, want: dict, tolerance: float = 2e-4) -> None:
    for part in ("tokens", "parents", "depths", "mask"):
        assert got[part] == want[part], part
    np.testing.assert_allclose(got["scores"], want["scores"], atol=tolerance)


@pytest.mark.unchecked
@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    ("name", "head"),
    [(name, i) for i, name in enumerate(SHAPES)] + [("mc_sim_7b_63", 2), ("mc_sim_7b_63", 4)],
)
def test_static_trees_equal_a_naive_walk(name, head):
    """Every node of the shape, with its rank's token, whatever it scores."""
    shape = SHAPES[name]
    rig = Rig.random(HEADS[head % len(HEADS)], torch.float32, seed=head)
    features, tokens = rig.fill([9])
    (got,) = trees_of(rig.draft_rows(features, tokens, shape=shape, order="candidate"))
    assert len(got["tokens"]) == shape.num_nodes + 1
    assert_equals(got, wanted(rig, 0, shape))


@pytest.mark.op("draft", "extend_draft")
def test_a_batch_of_its_own_lengths_and_limits():
    """Where fewer nodes are wanted, the best of the shape; in order of paths the same nodes."""
    rig = Rig.random(HEADS[1], torch.float32, batch=6, paged=4, spare=1)
    features, tokens = rig.fill([6, 1, 11, 3, 8, 2])
    limits = int32(0, 1, 5, 99, 26, 12)
    options = {"shape": MC_SIM_7B_63, "node_limit": limits}
    trees = rig.draft_rows(features, tokens, order="candidate", **options)
    assert trees.tokens.shape == (6, 26)
    assert trees.num_nodes.tolist() == [0, 1, 5, 26, 26, 12]
    paths = trees_of(rig.draft_rows(features, tokens, again=True, order="path", **options))
    for b, got in enumerate(trees_of(trees)):
        if b > 0:
            assert_equals(got, wanted(rig, b, MC_SIM_7B_63, num_nodes=min(int(limits[b]), 26)))
        both = [sorted(zip(tree["tokens"], tree["depths"], tree["scores"])) for tree in (got, paths[b])]
        assert both[0] == both[1]
        # The chain of best children comes first.
        chain = 0
        while chain + 1 < len(paths[b]["tokens"]) and paths[b]["parents"][chain + 1] == chain:
            chain += 1
        leaf = paths[b]["parents"].count(chain) == 0
        assert leaf


@pytest.mark.unchecked
@pytest.mark.op("draft", "extend_draft")
def test_fewer_levels_than_the_shape_has():
    rig = Rig.random(HEADS[0], torch.float32)
    features, tokens = rig.fill([7])
    for again, levels in enumerate((1, 3, 5)):
        tree = rig.draft_rows(
            features, tokens, shape=MC_SIM_7B_63, levels=levels, order="candidate", again=again > 0
        )
        (got,) = trees_of(tree)
        assert len(got["tokens"]) == 1 + (4, 12, 20, 23, 25)[levels - 1]
        assert_equals(got, wanted(rig, 0, MC_SIM_7B_63, levels=levels))


@pytest.mark.unchecked
@pytest.mark.op("draft", "extend_draft")
def test_coupled_static_trees_equal_a_naive_walk():
    """Ranks are those of the noisy scores."""
    rig = Rig.random(HEADS[1], torch.float32, batch=3)
    features, tokens = rig.fill([6, 6, 11])
    temperature, seeds, tau = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, -7, 2**40]), 1.25
    options = {"shape": MC_SIM_7B_63, "order": "candidate"}
    tree = rig.draft_rows(features, tokens, temperature=temperature, seeds=seeds, tau=tau, **options)
    for b, got in enumerate(trees_of(tree)):

        def noise(position, ids, seed=int(seeds[b])):
            return torch.from_numpy(gumbel(seed, position, 96))[ids]

        want = wanted(rig, b, MC_SIM_7B_63, temperature=float(temperature[b]), tau=tau, noise=noise)
        assert_equals(got, want, 1e-3)
    plain = trees_of(rig.draft_rows(features, tokens, again=True, **options))
    assert plain[0] == trees_of(tree)[0]
    assert plain[1] != trees_of(tree)[1]


@pytest.mark.unchecked
@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize("usable", [0, 1, 2, 3])
def test_a_head_with_fewer_tokens_than_ranks(usable, monkeypatch):
    """Nodes without a token are left out, and all below them."""
    whole = draft_rig.random_head

    def poisoned(*args, **kwargs):
        config, tensors = whole(*args, **kwargs)
        tensors["lm_head.weight"][usable:] = float("nan")
        return config, tensors

    monkeypatch.setattr(draft_rig, "random_head", poisoned)
    rig = Rig.random(HEADS[1], torch.float32, batch=2)
    features, tokens = rig.fill([5, 8])
    trees = trees_of(rig.draft_rows(features, tokens, shape=MC_SIM_7B_63, order="candidate"))
    for b, got in enumerate(trees):
        assert len(got["tokens"]) == 1 + sum(max(path) < usable for path in MC_SIM_7B_63.paths)
        assert_equals(got, wanted(rig, b, MC_SIM_7B_63))


@pytest.mark.op("draft", "extend_draft")
def test_absent_requests_and_cycles():
    """A request that sits out, then goes on, as if it had been alone."""
    rig = Rig.random(HEADS[2], torch.float32, batch=3)
    rig.fill([4, 9, 2])
    for counts in (int32(0, -1, 0), int32(-1, 0, 0), int32(0, 0, -1)):
        features, tokens = rig.next_rows()
        options = {"shape": SHAPES["comb"], "order": "path"}
        tree = rig.draft(features[:, None], tokens[:, None], accepted(counts), **options)
        for b, got in enumerate(trees_of(tree)):
            if counts[b] < 0:
                assert got["tokens"] == []
                continue
            alone = Rig(rig.head)
            known, follow = rig.history[b]
            alone.prompt(0, known[:-1], follow[:-1])
            assert [got] == trees_of(alone.draft_last(known[-1], follow[-1], **options))


@pytest.mark.unchecked
@pytest.mark.op("draft", "extend_draft")
def test_a_wider_top_k_changes_nothing():
    rig = Rig.random(HEADS[3], torch.float32)
    features, tokens = rig.fill([7])
    shapes = [TreeShape(SHAPES["second choices"].paths, top_k=k) for k in (3, 5, 32)]
    trees = [
        trees_of(rig.draft_rows(features, tokens, shape=shape, again=i > 0)) for i, shape in enumerate(shapes)
    ]
    assert trees[0] == trees[1] == trees[2]


def test_nodes_are_not_wanted_that_are_no_part_of_it():
    """A dynamic tree of the same size has other nodes: the shape decides, not the scores."""
    rig = Rig.random(HEADS[1], torch.float32, peaked=True)
    features, tokens = rig.fill([7])
    (static,) = trees_of(rig.draft_rows(features, tokens, shape=MC_SIM_7B_63))
    (dynamic,) = trees_of(rig.draft_rows(features, tokens, max_nodes=26, top_k=4, levels=5, again=True))
    assert len(static["tokens"]) == len(dynamic["tokens"]) == 26
    assert sum(static["scores"]) < sum(dynamic["scores"])


def test_bad_arguments():
    rig = Rig.random(HEADS[1], torch.float32)
    features, tokens = rig.fill([4])
    counts = accepted(int32(0))

    def run(**options):
        rows = features[:, None], tokens[:, None], counts, rig.lengths, rig.caches
        return draft(rig.head, *rows, **options)

    for options, message in (
        ({"top_k": 5}, "^top_k: expected the shape's 4, got 5"),
        ({"levels": 6}, "^levels: expected at most the shape's 5, got 6"),
        ({"levels": 0}, "^levels: expected at least 1, got 0"),
        ({"shape": [[0]]}, "^shape: expected a TreeShape or None, got list"),
        ({"shape": None}, "^levels: expected a number where no shape is given, got None"),
        ({"shape": None, "levels": 3}, "^top_k: expected a number where no shape is given, got None"),
        ({"max_nodes": 257}, "^max_nodes: expected 1 to 256, got 257"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**{"shape": MC_SIM_7B_63} | options)
    narrow = TreeShape([(0,)], top_k=32)
    small = Rig.random(("eagle3", {"draft_vocab": 8}), torch.float32)
    features, tokens = small.fill([4])
    with pytest.raises(ValueError, match="^top_k: expected 1 to 8, got 32"):
        small.draft_rows(features, tokens, shape=narrow)
    out = empty_draft_tree(1, 7, like=features)  # narrower than the shape: the best of it
    rig.draft_rows(*rig.next_rows(), shape=MC_SIM_7B_63, out=out)
    assert out.num_nodes.tolist() == [7]
