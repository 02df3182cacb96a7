"""Static trees: TreeShape itself, and expand_tree with one against a naive growth by rank paths."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_cuda.tree import (
    MC_SIM_7B_63,
    Beam,
    Candidates,
    TreeShape,
    build_tree,
    empty_candidates,
    expand_tree,
)
from guarded import Guards
from reference import tree as naive

INF, NAN = float("inf"), float("nan")
LOG_PROBS = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, -3.5, 0.125, -INF, NAN, -1e30])


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mask_integers(mask: torch.Tensor) -> list[int]:
    return [sum((w & 0xFFFFFFFF) << 32 * i for i, w in enumerate(row)) for row in mask.tolist()]


@st.composite
def path_sets(draw, ranks=3, most=14, levels=4):
    """Rank paths closed under parents, in any order."""
    paths: list[tuple[int, ...]] = [(draw(st.integers(0, ranks)),)]
    for _ in range(draw(st.integers(0, most - 1))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < levels)]))
        path = (*above, draw(st.integers(0, ranks)))
        if path not in paths:
            paths.append(path)
    return draw(st.permutations(paths))


# ---- the shape


@given(path_sets())
def test_a_shape_is_its_paths(paths):
    shape = TreeShape(paths)
    assert shape.paths == tuple(sorted(paths, key=lambda path: (len(path), path)))
    assert shape.num_nodes == len(paths)
    assert shape.levels == max(map(len, paths))
    inner = {path[:-1] for path in paths} - {()}
    widest = max((sum(len(path) == level for path in inner) for level in range(1, 5)), default=0)
    assert shape.top_k == max(widest, 1 + max(max(path) for path in paths))
    assert [shape.nodes_within(n) for n in range(6)] == [sum(len(p) <= n for p in paths) for n in range(6)]
    again = TreeShape([list(path) for path in reversed(paths)])
    assert again == shape == copy.copy(shape) == pickle.loads(pickle.dumps(shape))
    assert hash(again) == hash(shape)
    wider = TreeShape(paths, top_k=9)
    assert wider != shape
    assert wider.top_k == 9
    assert eval(repr(wider)) == wider


def test_published_and_simple_shapes():
    shape = MC_SIM_7B_63
    assert (shape.num_nodes, shape.levels, shape.top_k) == (25, 5, 4)
    assert [shape.nodes_within(level) for level in range(1, 6)] == [4, 12, 20, 23, 25]
    assert TreeShape.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert (TreeShape.chain(255).top_k, TreeShape.chain(255).levels) == (1, 255)
    assert shape != "mc_sim_7b_63"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "^paths: expected at least 1 node, got none"),
        ([[0], []], r"^paths: expected at least one rank in each \(the root is not listed\), got \[\]"),
        ([[0], [0, 32]], "^paths: ranks: expected 0 to 31, got 32"),
        ([[-1]], "^paths: ranks: expected 0 to 31, got -1"),
        ([[False]], "^paths: ranks: expected 0 to 31, got False"),
        ([b"\0"], r"^paths: expected sequences of ranks, got b'\\x00'"),
        ([[0.5]], "^paths: ranks: expected 0 to 31, got 0.5"),
        ([[0], [1], [0]], r"^paths: expected each once, got \[0\] twice"),
        ([[0], [1, 2]], r"^paths: expected every node's parent, got \[1, 2\] without \[1\]"),
        ([[0, 0]], r"^paths: expected every node's parent, got \[0, 0\] without \[0\]"),
        ([[0] * n for n in range(1, 257)], "^paths: expected at most 255 nodes, got 256"),
        (
            [*([0] * n for n in range(1, 33)), [1]],
            "^paths: expected at most 31 levels where top_k > 1, got 32",
        ),
        ([*([0] * n for n in range(1, 10)), [31]], "^paths: expected at most 8192 candidates .*, got 8224"),
        (
            [*([i] for i in range(6)), *([i, j] for i in range(6) for j in range(6))]
            + [[i, j, 0] for i in range(6) for j in range(6)],
            "^paths: expected at most 32 nodes with children on a level, got more on level 2",
        ),
        ([0, 1], "^paths: expected sequences of ranks, got 0"),
        (["0"], "^paths: expected sequences of ranks, got '0'"),
        ("00", "^paths: expected a sequence of paths of ranks, got '00'"),
        (7, "^paths: expected a sequence of paths of ranks, got 7"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        TreeShape(paths)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="^top_k: expected 4 to 32 for these paths, got 3"):
        TreeShape([[3]], top_k=3)
    with pytest.raises(ValueError, match="^top_k: expected 1 to 32, got 33"):
        TreeShape([[3]], top_k=33)
    with pytest.raises(ValueError, match="^paths: expected at most 31 levels"):
        TreeShape(TreeShape.chain(40).paths, top_k=2)
    with pytest.raises(ValueError, match="^length: expected 1 to 255, got 0"):
        TreeShape.chain(0)
    candidates, beam = empty_candidates(1, 4, 6)
    ones = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="^levels: expected at most the shape's 5, got 6"):
        expand_tree(*ones, candidates, beam, level=1, levels=6, shape=MC_SIM_7B_63)
    with pytest.raises(ValueError, match="^top_k: expected the shape's 1, got 4"):
        expand_tree(*ones, candidates, beam, level=1, levels=6, shape=TreeShape.chain(6))
    with pytest.raises(ValueError, match="^shape: expected a TreeShape or None, got list"):
        expand_tree(*ones, candidates, beam, level=1, shape=[[0]])
    with pytest.raises(ValueError, match="^levels: expected a number where no shape is given, got None"):
        expand_tree(*ones, candidates, beam, level=1)


# ---- expand_tree


def compare_growth(paths, top_k, levels, per_level, absent):
    """One growth of all requests, every array between sentinels, against the naive one."""
    shape, batch = TreeShape(paths, top_k=top_k), len(absent)
    guards, f32 = Guards(), torch.float32
    c, words = top_k + (levels - 1) * top_k**2, (levels * top_k + 31) // 32
    new = guards.new
    candidates = Candidates(new(batch, c), new(batch, c, dtype=f32), new(batch, c))
    beam = Beam(
        new(batch, top_k), new(batch, top_k, dtype=f32), new(batch, top_k), new(batch, top_k),
        new(batch, top_k, words),
    )  # fmt: skip
    references = [naive.Growth(top_k, paths=paths) for _ in range(batch)]
    numbers = int32([-1 if a else 0 for a in absent]).reshape(batch)
    for level, (tokens, log_probs) in enumerate(per_level, 1):
        rows = 1 if level == 1 else top_k
        expand_tree(
            int32(tokens).reshape(batch, rows, top_k), torch.tensor(log_probs).reshape(batch, rows, top_k),
            candidates, beam, level=level, levels=levels, num_accepted=numbers, shape=shape,
        )  # fmt: skip
        for b, reference in enumerate(references):
            if absent[b]:
                assert bool((beam.rows[b] == 0x5A5A5A5A).all())
                continue
            reference.expand(tokens[b], log_probs[b])
            n = len(reference.tokens)
            assert candidates.tokens[b, :n].tolist() == reference.tokens
            assert candidates.scores[b, :n].tolist() == [float(s) for s in reference.scores]
            assert candidates.parents[b, :n].tolist() == reference.parents
            best = reference.beams[-1]
            assert beam.candidates[b].tolist() == best
            assert beam.scores[b].tolist() == [float(reference.scores[i]) if i >= 0 else -INF for i in best]
            assert beam.tokens[b].tolist() == [reference.tokens[i] if i >= 0 else 0 for i in best]
            above = reference.beams[-2] if level > 1 else None
            parents = [reference.parents[i] if i >= 0 else -1 for i in best]
            assert beam.rows[b].tolist() == [above.index(p) if above and p >= 0 else 0 for p in parents]
            place = {i: j * top_k + r for j, of_level in enumerate(reference.beams)
                     for r, i in enumerate(of_level)}  # fmt: skip
            for r, i in enumerate(best):
                own = 1 << (level - 1) * top_k + r
                bits = sum(1 << place[a] for a in reference.ancestors(i)) if i >= 0 else own
                assert mask_integers(beam.mask[b])[r] == bits, (b, r)
    guards.check()
    return candidates, references


@st.composite
def growths(draw):
    batch, paths = draw(st.integers(0, 3)), draw(path_sets())
    shape = TreeShape(paths)
    top_k, levels = shape.top_k + draw(st.integers(0, 1)), draw(st.integers(1, shape.levels))
    per_level = []
    for level in range(levels):
        rows = 1 if level == 0 else top_k

        def table(values, rows=rows):
            row = st.lists(values, min_size=top_k, max_size=top_k)
            request = st.lists(row, min_size=rows, max_size=rows)
            return draw(st.lists(request, min_size=batch, max_size=batch))

        per_level.append((table(st.integers(0, 50)), table(LOG_PROBS)))
    return paths, top_k, levels, per_level, draw(st.lists(st.booleans(), min_size=batch, max_size=batch))


@pytest.mark.op("expand_tree")
@given(growths())
def test_expand_tree_of_a_shape_matches_the_naive_growth(case):
    compare_growth(*case)


WIDE = [(i,) for i in range(32)] + [(i, j) for i in range(32) for j in (0, 1, 2, 3, 17, 31)] + [(3, 31, 9)]
DEEP = [(0,) * n for n in range(1, 32)] + [(0,) * n + (2,) for n in range(31)]
SIZES = {
    "mc_sim_7b_63": (MC_SIM_7B_63.paths, 4, 5),
    "a row of 255": (TreeShape.chain(255).paths, 1, 255),
    "32 rows": (WIDE, 32, 3),
    "31 levels": (DEEP, 3, 31),
    "more rows than ranks": ([(0,), (1,), *((i, j) for i in (0, 1) for j in (0, 1)),
                             *((i, j, 1) for i in (0, 1) for j in (0, 1))], 4, 3),
}  # fmt: skip


@pytest.mark.op("expand_tree", "build_tree")
@pytest.mark.parametrize("name", SIZES)
def test_shapes_of_real_sizes(name):
    """Grown, and built: every node of the shape, no other, siblings in the order of ranks."""
    paths, top_k, levels = SIZES[name]
    generator = torch.Generator().manual_seed(levels)
    per_level = []
    for level in range(levels):
        size = (2, 1 if level == 0 else top_k, top_k)
        tokens = torch.randint(0, 1000, size, generator=generator)
        per_level.append((tokens.tolist(), (-torch.rand(size, generator=generator)).tolist()))
    candidates, references = compare_growth(list(paths), top_k, levels, per_level, [False, False])
    nodes = len(paths) + 1
    tree = build_tree(int32([7, 8]), candidates, max_nodes=256, order="candidate")
    assert tree.num_nodes.tolist() == [nodes, nodes]
    order = sorted(paths, key=lambda path: (len(path), path))
    slot = {(): 0} | {path: i for i, path in enumerate(order, 1)}
    assert tree.parents[0, :nodes].tolist() == [-1] + [slot[path[:-1]] for path in order]
    assert tree.depths[1, :nodes].tolist() == [0] + [len(path) for path in order]
    assert len(references) == 2


def test_a_shape_does_not_change():
    shape = TreeShape([np.array([0]), torch.tensor([1])])
    assert shape.paths == ((0,), (1,))
    with pytest.raises(AttributeError, match="^paths: a TreeShape is immutable"):
        shape.paths = ()
    with pytest.raises(AttributeError, match="^paths: a TreeShape is immutable"):
        del shape.paths
    with pytest.raises(AttributeError, match="^a TreeShape is immutable"):
        shape.__init__([(0,)])
    assert (shape.num_nodes, len(shape.paths)) == (2, 2)
