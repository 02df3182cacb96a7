"""expand_tree, build_tree, retrieve_indices at their limits: the largest trees, ties and broken input at
size, garbage in beams, absent requests and padding rows. Every comparison is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_cuda.tree import (
    Beam,
    Candidates,
    DraftTree,
    RetrieveIndices,
    build_tree,
    empty_candidates,
    empty_draft_tree,
    expand_tree,
    retrieve_indices,
    tree_from_parents,
)
from guarded import Guards
from reference import tree as naive
from test_tree import assert_tree_equals, guarded_tree, int32, mask_integers

INF, NAN = float("inf"), float("nan")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def bits(t: torch.Tensor) -> torch.Tensor:
    """The words of a tensor: NaN equals itself and -0 differs from 0."""
    return t.contiguous().view(torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


# ---- expand_tree -------------------------------------------------------------------------------------------


def log_probs_with_faults(generator, shape, ties):
    """Unsorted rows; ties > 0: that many values, a few of them NaN, -inf, positive or -0."""
    if not ties:
        return -torch.rand(shape, generator=generator) * 5
    values = torch.tensor([0.0, -0.25, -0.5, -1.0, -0.0, NAN, -INF, 0.5][:ties])
    return values[torch.randint(0, len(values), shape, generator=generator)]


@pytest.mark.op("expand_tree")
# The widest tree, EAGLE's default, 1024 candidates a level with few values, the deepest that branches.
@pytest.mark.parametrize(("top_k", "levels"), [(32, 8), (10, 8), (31, 3), (6, 4), (2, 31)])
@pytest.mark.parametrize("ties", [0, 1, 8])
def test_growth_at_size(top_k, levels, ties):
    generator, guards = torch.Generator().manual_seed(100 * top_k + ties), Guards()
    c, words = top_k + (levels - 1) * top_k**2, (levels * top_k + 31) // 32
    candidates = Candidates(guards.new(1, c), guards.new(1, c, dtype=torch.float32), guards.new(1, c))
    beam = Beam(
        guards.new(1, top_k),
        guards.new(1, top_k, dtype=torch.float32),
        guards.new(1, top_k),
        guards.new(1, top_k),
        guards.new(1, top_k, words),
    )
    reference, masks = naive.Growth(top_k), []
    for level in range(1, levels + 1):
        shape = (1, 1 if level == 1 else top_k, top_k)
        log_probs = log_probs_with_faults(generator, shape, ties)
        tokens = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
        expand_tree(tokens, log_probs, candidates, beam, level=level, levels=levels)
        reference.expand(tokens[0].tolist(), log_probs[0].tolist())
        best, n = reference.beams[-1], len(reference.tokens)
        assert beam.candidates[0].tolist() == best
        assert beam.tokens[0].tolist() == [reference.tokens[i] for i in best]
        assert beam.scores[0].tolist() == [float(reference.scores[i]) for i in best]
        above = reference.beams[-2] if level > 1 else []
        rows = [above.index(reference.parents[i]) if above else 0 for i in best]
        assert beam.rows[0].tolist() == rows
        masks = [(masks[r] if masks else 0) | 1 << (level - 1) * top_k + i for i, r in enumerate(rows)]
        assert mask_integers(beam.mask[0]) == masks
        assert candidates.tokens[0, :n].tolist() == reference.tokens
        assert candidates.scores[0, :n].tolist() == [float(s) for s in reference.scores]
        assert candidates.parents[0, :n].tolist() == reference.parents
    guards.check()


@pytest.mark.op("expand_tree")
def test_a_chain_of_8192_levels():
    """top_k = 1: a mask row of 256 words, of which a level changes one bit."""
    levels = 8192
    candidates, beam = empty_candidates(2, 1, levels)
    candidates = Candidates(*(bits(t).fill_(77).view(t.dtype) for t in candidates))
    generator = torch.Generator().manual_seed(5)
    for level in (2, 4095, 8192):
        old = torch.randint(INT_MIN, INT_MAX, (2, 1, 256), generator=generator, dtype=torch.int32)
        beam.mask.copy_(old)
        beam.scores.copy_(torch.tensor([[-1.5], [-0.0]]))
        beam.candidates.copy_(int32([[level - 2], [INT_MIN]]))
        expand_tree(
            int32([[[7]], [[8]]]),
            torch.tensor([[[-0.5]], [[-0.0]]]),
            candidates,
            beam,
            level=level,
            levels=levels,
        )
        at = level - 1
        for b in range(2):
            assert mask_integers(beam.mask[b])[0] == mask_integers(old[b])[0] | 1 << at
        assert beam.candidates.tolist() == [[at], [at]]
        assert beam.rows.tolist() == [[0], [0]]
        assert candidates.tokens[:, at].tolist() == [7, 8]
        assert beam.tokens.tolist() == [[7], [8]]
        assert candidates.parents[:, at].tolist() == [level - 2, INT_MIN]
        assert same_bits(beam.scores, torch.tensor([[-2.0], [-0.0]]))
        assert same_bits(candidates.scores[:, at], torch.tensor([-2.0, -0.0]))
    written = [1, 4094, 8191]
    rest = [i for i in range(levels) if i not in written]
    assert (candidates.tokens[:, rest] == 77).all()
    assert (candidates.parents[:, rest] == 77).all()


@pytest.mark.op("expand_tree")
def test_garbage_in_the_beam():
    """Beam entries are copied, whatever they hold; a score of NaN counts as -inf, and so does a sum that is
    no number."""
    k, levels, level = 3, 4, 3
    rows = [
        ([INT_MAX, INT_MIN, -1], [NAN, INF, -1.0], [[0.0, -1.0, -2.0], [-INF, NAN, -1.0], [-0.5, 0.5, -0.0]]),
        ([0, 0, 0], [-INF, -INF, NAN], [[NAN] * 3] * 3),
        ([7, 7, 8], [INF, INF, INF], [[-INF] * 3, [-INF] * 3, [-INF, -3.0, -2.0]]),
    ]
    batch, words, first = len(rows), 1, k + (level - 2) * k * k
    candidates, _ = empty_candidates(batch, k, levels)
    old_mask = int32([[0x7FFFFFFF, -1, 5]] * batch).reshape(batch, k, words)
    beam = Beam(
        int32([r[0] for r in rows]),
        torch.tensor([r[1] for r in rows]),
        torch.zeros(batch, k, dtype=torch.int32),
        torch.zeros(batch, k, dtype=torch.int32),
        old_mask.clone(),
    )
    tokens = torch.arange(batch * k * k, dtype=torch.int32).reshape(batch, k, k)
    expand_tree(tokens, torch.tensor([r[2] for r in rows]), candidates, beam, level=level, levels=levels)
    for b, (parents, scores, log_probs) in enumerate(rows):
        sums = []
        for parent_score, row in zip(scores, log_probs):
            for log_prob in row:
                total = (-INF if np.isnan(parent_score) else parent_score) + naive.clamp(log_prob)
                sums.append(-INF if np.isnan(total) else total)
        best = sorted(range(k * k), key=lambda i: (-sums[i], i))[:k]
        level_slice = slice(first, first + k * k)
        assert candidates.scores[b, level_slice].tolist() == sums
        assert candidates.tokens[b, level_slice].tolist() == tokens[b].flatten().tolist()
        assert candidates.parents[b, level_slice].tolist() == [p for p in parents for _ in range(k)]
        assert beam.candidates[b].tolist() == [first + i for i in best]
        assert beam.rows[b].tolist() == [i // k for i in best]
        assert beam.scores[b].tolist() == [sums[i] for i in best]
        expected = [mask_integers(old_mask[b])[i // k] | 1 << (level - 1) * k + r for r, i in enumerate(best)]
        assert mask_integers(beam.mask[b]) == expected


@pytest.mark.op("expand_tree")
@pytest.mark.parametrize("level", [1, 2])
def test_absent_requests_stay_as_they_are(level):
    """Rows of an absent request keep every bit, whatever its inputs hold, and its neighbours do not care."""
    k, levels, batch = 10, 3, 5
    absent = [0, 3]
    generator = torch.Generator().manual_seed(2)
    shape = (batch, 1 if level == 1 else k, k)
    tokens = torch.randint(0, 99, shape, generator=generator, dtype=torch.int32)
    log_probs = -torch.rand(shape, generator=generator)
    num_accepted = int32([-1, 0, 2, INT_MIN, INT_MAX])

    def grow(rows):
        guards = Guards()
        c, n, f32 = k + (levels - 1) * k * k, len(rows), torch.float32
        candidates = Candidates(guards.new(n, c), guards.new(n, c, dtype=f32), guards.new(n, c))
        beam = Beam(
            guards.new(n, k),
            guards.new(n, k, dtype=f32),
            guards.new(n, k),
            guards.new(n, k),
            guards.new(n, k, (levels * k + 31) // 32),
        )
        before = [bits(t).clone() for t in (*candidates, *beam)]
        expand_tree(
            tokens[rows],
            log_probs[rows],
            candidates,
            beam,
            level=level,
            levels=levels,
            num_accepted=num_accepted[rows],
        )
        guards.check()
        return before, [bits(t).clone() for t in (*candidates, *beam)]

    before, after = grow(list(range(batch)))
    for b in range(batch):
        unchanged = all(torch.equal(x[b], y[b]) for x, y in zip(before, after))
        assert unchanged == (b in absent)
        assert all(torch.equal(x[b], y[0]) for x, y in zip(after, grow([b])[1]))


# ---- build_tree --------------------------------------------------------------------------------------------


def build_and_compare(candidates, nodes, order, limit=None):
    batch = candidates.tokens.shape[0]
    guards = Guards()
    tree, selected = guarded_tree(guards, batch, nodes), guards.new(batch, nodes)
    roots = torch.arange(50, 50 + batch, dtype=torch.int32)
    build_tree(roots, candidates, node_limit=limit, order=order, selected=selected, out=tree)
    guards.check()
    for b in range(batch):
        expected = naive.build(
            50 + b,
            *(t[b].tolist() for t in candidates),
            max_nodes=nodes,
            limit=None if limit is None else limit[b].item(),
            order=order,
        )
        assert_tree_equals(tree, b, expected, selected)
    return tree


def forest(seed, count, ties, faults):
    """A random recursive tree of candidates; scores fall on the way down only by chance, the last is best."""
    generator = torch.Generator().manual_seed(seed)
    parents = [
        int(torch.randint(-1, max(i, 1), (1,), generator=generator)) if i else -1 for i in range(count)
    ]
    scores = (
        torch.randint(-ties, 1, (1, count), generator=generator).float() / 8
        if ties
        else -torch.rand(1, count, generator=generator)
    )
    tokens = torch.randint(0, 1 << 30, (1, count), generator=generator, dtype=torch.int32)
    if faults:
        for value in (NAN, -INF, INF, -0.0):
            scores[0, torch.randint(0, count, (count // 40,), generator=generator)] = value
        for at in torch.randint(0, count, (count // 20,), generator=generator).tolist():
            garbage = [INT_MIN, INT_MAX, -2, count, count - 1, count + 5, at, at, at + 1]
            parents[at] = garbage[at % len(garbage)]
    scores[0, -1], parents[-1] = 1.0, -1  # the very last counts
    return Candidates(tokens, scores, int32([parents]))


@pytest.mark.op("build_tree")
# Around the sizes at which the work is split differently, and the largest of everything.
@pytest.mark.parametrize(
    ("count", "nodes"), [(8192, 256), (8191, 255), (1025, 256), (1024, 256), (1023, 33), (257, 256), (32, 32)]
)
@pytest.mark.parametrize(("ties", "faults"), [(0, False), (3, False), (3, True), (0, True)])
def test_the_largest_trees(count, nodes, ties, faults):
    candidates = forest(count + ties, count, ties, faults)
    for order in ("path", "candidate"):
        build_and_compare(candidates, nodes, order)


@pytest.mark.op("build_tree")
@pytest.mark.parametrize("count", [300, 8192])
@pytest.mark.parametrize("score", [0.0, -1.0, NAN, -INF, INF, -3e38])
def test_all_scores_equal(count, score):
    """A star of one score: the first ones, or none. The chain of best children is one node long."""
    tokens = torch.arange(count, dtype=torch.int32)[None]
    candidates = Candidates(
        tokens, torch.full((1, count), score), torch.full((1, count), -1, dtype=torch.int32)
    )
    for order in ("path", "candidate"):
        tree = build_and_compare(candidates, 256, order)
        chosen = 0 if np.isnan(score) or score == -INF else 255
        assert tree.num_nodes.tolist() == [1 + chosen]
        assert tree.tokens[0, 1 : 1 + chosen].tolist() == list(range(chosen))


@pytest.mark.op("build_tree")
@pytest.mark.parametrize("broken", [None, 100])
def test_a_chain_of_8192_candidates(broken):
    """The deepest: every effective score is a minimum over the whole way up."""
    count, nodes = 8192, 256
    generator = torch.Generator().manual_seed(8)
    scores = -torch.randint(0, 2000, (count,), generator=generator).float() / 8
    scores[0] = 3.0
    if broken:
        scores[broken] = NAN
    candidates = Candidates(
        torch.arange(count, dtype=torch.int32)[None],
        scores[None],
        torch.arange(-1, count - 1, dtype=torch.int32)[None],
    )
    expected = broken + 1 if broken else nodes
    for order in ("path", "candidate"):
        tree = build_tree(int32([9]), candidates, max_nodes=nodes, order=order)
        assert tree.num_nodes.tolist() == [expected]
        assert tree.tokens[0, :expected].tolist() == [9, *range(expected - 1)]
        assert tree.parents[0, :expected].tolist() == list(range(-1, expected - 1))
        assert tree.depths[0, :expected].tolist() == list(range(expected))
        assert tree.first_child[0, :expected].tolist() == [*range(1, expected), -1]
        assert tree.next_sibling[0].tolist() == [-1] * nodes
        assert tree.scores[0, 1:expected].tolist() == torch.cummin(scores, 0).values[: expected - 1].tolist()
        assert mask_integers(tree.mask[0])[:expected] == [2 ** (i + 1) - 1 for i in range(expected)]
        assert (tree.parents[0, expected:] == -2).all()
        assert (tree.mask[0, expected:] == 0).all()


@pytest.mark.op("build_tree")
def test_the_best_score_may_stand_last():
    """The best candidates of 8192 at the end, under one parent in the middle; all others equal."""
    count, nodes = 8192, 200
    scores, parents = torch.full((1, count), -2.0), torch.full((1, count), -1, dtype=torch.int32)
    scores[0, 4000] = -1.0
    scores[0, -150:] = -0.5
    parents[0, -150:] = 4000
    candidates = Candidates(torch.arange(count, dtype=torch.int32)[None], scores, parents)
    for order in ("path", "candidate"):
        tree = build_and_compare(candidates, nodes, order)
        assert tree.scores[0].tolist().count(-1.0) == 151  # capped by the parent


@pytest.mark.op("build_tree")
def test_zeros_keep_their_sign():
    """0 and -0 are ties; of the two the one nearer to the root is stored, whichever way the chain is cut."""
    signs = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    scores = torch.tensor([[-0.0 if s else 0.0 for s in signs]])
    count = len(signs)
    star = Candidates(torch.arange(count, dtype=torch.int32)[None], scores, torch.full((1, count), -1).int())
    tree = build_tree(int32([1]), star, max_nodes=8, order="path")
    assert tree.tokens[0].tolist() == [1, 0, 1, 2, 3, 4, 5, 6]
    assert same_bits(tree.scores[0, 1:], scores[0, :7])
    for first in (0.0, -0.0):
        scores[0, 0] = first
        chain = star._replace(scores=scores, parents=torch.arange(-1, count - 1, dtype=torch.int32)[None])
        tree = build_tree(int32([1]), chain, max_nodes=12, order="path")
        assert same_bits(tree.scores[0, 1:], torch.full((count,), first))


@pytest.mark.op("build_tree")
def test_limits_of_any_value_and_padding_rows():
    """node_limit is clamped; a captured graph's padding rows (limit 0, any garbage) come out absent and leave
    the rows in use as they are in a smaller batch."""
    candidates = forest(4, 700, 3, True)
    limits = int32([60, 0, INT_MIN, INT_MAX, 1, 2, -1, 61])
    batch, nodes = len(limits), 60
    rows = Candidates(*(t.expand(batch, -1).contiguous() for t in candidates))
    rows.parents[1], rows.scores[1], rows.tokens[1] = INT_MAX, NAN, INT_MIN
    tree = build_and_compare(rows, nodes, "path", limits)
    assert tree.num_nodes.tolist() == [60, 0, 0, 60, 1, 2, 0, 60]
    absent = empty_draft_tree(1, nodes)
    for b in (1, 2, 6):
        assert all(same_bits(t[b : b + 1], a) for t, a in zip(tree, absent))
    alone = build_tree(int32([50]), candidates, max_nodes=nodes, node_limit=limits[:1])
    assert all(same_bits(t[:1], a) for t, a in zip(tree, alone))


@pytest.mark.op("build_tree")
def test_no_requests_and_no_candidates():
    tree = build_tree(int32([]), Candidates(*(t[:0] for t in forest(1, 5, 0, False))), max_nodes=4)
    assert tree.num_nodes.shape == (0,)
    assert retrieve_indices(tree).num_leaves.shape == (0,)
    candidates, beam = empty_candidates(0, 3, 2)
    expand_tree(torch.zeros(0, 1, 3).int(), torch.zeros(0, 1, 3), candidates, beam, level=1, levels=2)
    none = Candidates(torch.zeros(2, 0).int(), torch.zeros(2, 0), torch.zeros(2, 0).int())
    tree = build_tree(int32([5, 6]), none, max_nodes=3)
    assert tree.tokens.tolist() == [[5, 0, 0], [6, 0, 0]]
    assert tree.num_nodes.tolist() == [1, 1]


# ---- retrieve_indices --------------------------------------------------------------------------------------


def parents_of(name):
    generator = torch.Generator().manual_seed(len(name))
    random = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, 256)]
    broken = list(random)
    for at in range(3, 256, 5):
        broken[at] = [at, at + 1, -1, INT_MIN, INT_MAX, 255, -2][at % 7]
    return {
        "chain": [i - 1 for i in range(256)],
        "star": [-1] + [0] * 255,
        "comb": [-1] + [max(0, i - 2) if i % 2 else i - 1 for i in range(1, 256)],
        "random": random,
        "broken": broken,
        "one": [-1],
        "none": [],
    }[name]


@pytest.mark.op("retrieve_indices")
@pytest.mark.parametrize("name", ["chain", "star", "comb", "random", "broken", "one", "none"])
@pytest.mark.parametrize(
    ("max_leaves", "max_path"), [(256, 256), (40, 9), (300, 300), (1, 1), (0, 5), (5, 0)]
)
def test_paths_of_large_trees(name, max_leaves, max_path):
    parents, width = parents_of(name), 256
    row = parents + [INT_MAX] * (width - len(parents))
    guards = Guards()
    out = RetrieveIndices(guards.new(2, max_leaves, max_path), guards.new(2))
    tree = empty_draft_tree(2, width)._replace(
        parents=int32([row, row]), num_nodes=int32([len(parents), INT_MAX if len(parents) == width else 0])
    )
    retrieve_indices(tree, out=out)
    guards.check()
    for b in range(2):
        count = len(parents) if b == 0 or len(parents) == width else 0
        expected = naive.retrieve_indices(parents, count)[:max_leaves]
        padded = [(path + [-1] * max_path)[:max_path] for path in expected]
        padded += [[-1] * max_path] * (max_leaves - len(padded))
        assert out.indices[b].tolist() == padded
        assert out.num_leaves[b].item() == len(expected)


@pytest.mark.op("build_tree", "retrieve_indices")
def test_trees_of_every_width_around_a_word():
    for n in (1, 2, 31, 32, 33, 63, 64, 65, 255, 256):
        parents = [-1] + [(i - 1) // 2 for i in range(1, n)]
        tree = tree_from_parents([list(range(n))], [parents])
        count = n - 1
        candidates = Candidates(
            torch.arange(1, n, dtype=torch.int32)[None],
            -torch.arange(count).float()[None],
            int32([[p - 1 for p in parents[1:]]]).reshape(1, count),
        )
        built = build_tree(int32([0]), candidates, max_nodes=n, order="candidate")
        for name, a, b in zip(DraftTree._fields, tree, built):
            assert name == "scores" or torch.equal(a, b), (n, name)
        paths = [[i for i in row if i >= 0] for row in retrieve_indices(built).indices[0].tolist()]
        assert [p for p in paths if p] == naive.retrieve_indices(parents, n)


# ---- traffic -----------------------------------------------------------------------------------------------


@pytest.mark.op("expand_tree", "build_tree", "retrieve_indices")
# EAGLE's default, and the widest.
@pytest.mark.parametrize(("top_k", "levels", "nodes"), [(10, 8, 60), (32, 8, 256)])
def test_no_byte_moves_twice(simulator, top_k, levels, nodes):
    """Global bytes of each kernel are exactly its arrays: candidates once, tokens of the chosen ones only."""
    batch = 2
    generator = torch.Generator().manual_seed(1)
    candidates, beam = empty_candidates(batch, top_k, levels)
    present, roots = int32([3, 0]), int32([7, 8])
    mask_bytes = 4 * top_k * beam.mask.shape[2]
    for level in range(1, levels + 1):
        count = top_k if level == 1 else top_k**2
        shape = (batch, count // top_k, top_k)
        tokens = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
        log_probs = -torch.rand(shape, generator=generator)
        with simulator.counting() as traffic:
            expand_tree(tokens, log_probs, candidates, beam, level=level, levels=levels, num_accepted=present)
        beam_in = 0 if level == 1 else 8 * top_k + mask_bytes
        assert traffic.global_load_bytes == batch * (8 * count + beam_in + 4)
        assert traffic.global_store_bytes == batch * (12 * count + 16 * top_k + mask_bytes)

    tree, selected = empty_draft_tree(batch, nodes), torch.empty(batch, nodes, dtype=torch.int32)
    limit = int32([nodes, nodes // 2])
    with simulator.counting() as traffic:
        build_tree(roots, candidates, node_limit=limit, selected=selected, out=tree)
    assert tree.num_nodes.tolist() == limit.tolist()
    in_use = int(limit.sum())
    assert traffic.launches == 1
    assert traffic.global_load_bytes == 8 * candidates.tokens.numel() + 4 * (in_use + batch)
    assert traffic.global_store_bytes == 4 * sum(t.numel() for t in (*tree, selected))

    with simulator.counting() as traffic:
        indices, num_leaves = retrieve_indices(tree)
    assert traffic.global_load_bytes == 4 * batch * nodes
    assert traffic.global_store_bytes == 4 * (indices.numel() + num_leaves.numel())
