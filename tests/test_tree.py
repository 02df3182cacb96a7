"""expand_tree, build_tree, retrieve_indices: against the naive trees, published vectors, and hostile
input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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

DATA = Path(__file__).parent / "data"
INF, NAN = float("inf"), float("nan")
# Few different values, so that ties are everywhere, and the values that break sloppy code.
LOG_PROBS = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, -1.0, -3.5, 0.125, -INF, NAN, -1e30])
GARBAGE = st.sampled_from([-(2**31), -7, -2, -1, 0, 1, 2, 5, 100, 2**31 - 1])


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def guarded_tree(guards: Guards, batch: int, nodes: int) -> DraftTree:
    words = (nodes + 31) // 32
    new = guards.new
    return DraftTree(
        new(batch, nodes),
        new(batch, nodes),
        new(batch, nodes),
        new(batch, nodes, words),
        new(batch, nodes, dtype=torch.float32),
        new(batch),
        new(batch, nodes),
        new(batch, nodes),
    )


def mask_integers(mask: torch.Tensor) -> list[int]:
    """[N, W] words to one integer per row."""
    return [sum((w & 0xFFFFFFFF) << 32 * i for i, w in enumerate(row)) for row in mask.tolist()]


def assert_tree_equals(tree: DraftTree, b: int, expected: dict, selected: torch.Tensor | None = None) -> None:
    assert tree.num_nodes[b].item() == expected["num_nodes"]
    for name in ("tokens", "parents", "depths", "first_child", "next_sibling"):
        assert getattr(tree, name)[b].tolist() == expected[name], name
    assert mask_integers(tree.mask[b]) == expected["mask"]
    assert tree.scores[b].tolist() == [np.float32(s) for s in expected["scores"]]
    if selected is not None:
        assert selected[b].tolist() == expected["selected"]


@st.composite
def growths(draw):
    """Per level and request: tokens and log-probabilities [R][K]; ragged absence."""
    batch, top_k, levels = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    numbers = st.integers(0, 50)
    per_level = []
    for level in range(levels):
        rows = 1 if level == 0 else top_k

        def table(values, rows=rows):
            return draw(
                st.lists(
                    st.lists(st.lists(values, min_size=top_k, max_size=top_k), min_size=rows, max_size=rows),
                    min_size=batch,
                    max_size=batch,
                )
            )

        per_level.append((table(numbers), table(LOG_PROBS)))
    absent = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    return batch, top_k, levels, per_level, absent


@pytest.mark.op("expand_tree")
@given(growths())
def test_expand_tree_matches_the_naive_growth(case):
    batch, top_k, levels, per_level, absent = case
    guards = Guards()
    c, words = top_k + (levels - 1) * top_k**2, (levels * top_k + 31) // 32
    f32 = torch.float32
    candidates = Candidates(guards.new(batch, c), guards.new(batch, c, dtype=f32), guards.new(batch, c))
    beam = Beam(
        guards.new(batch, top_k),
        guards.new(batch, top_k, dtype=f32),
        guards.new(batch, top_k),
        guards.new(batch, top_k),
        guards.new(batch, top_k, words),
    )
    untouched = [[t[b].clone() for t in (*candidates, *beam)] for b in range(batch)]
    num_accepted = int32([-1 if a else 3 for a in absent]).reshape(batch)
    references = [naive.Growth(top_k) for _ in range(batch)]
    for level, (tokens, log_probs) in enumerate(per_level, 1):
        rows = 1 if level == 1 else top_k
        out = expand_tree(
            int32(tokens).reshape(batch, rows, top_k),
            torch.tensor(log_probs, dtype=f32).reshape(batch, rows, top_k),
            candidates,
            beam,
            level=level,
            levels=levels,
            num_accepted=num_accepted,
        )
        assert out is beam
        for b, reference in enumerate(references):
            if absent[b]:
                continue
            previous = reference.beams[-1] if reference.beams else None
            reference.expand(tokens[b], log_probs[b])
            n = len(reference.tokens)
            assert candidates.tokens[b, :n].tolist() == reference.tokens
            assert candidates.scores[b, :n].tolist() == [float(s) for s in reference.scores]
            assert candidates.parents[b, :n].tolist() == reference.parents
            best = reference.beams[-1]
            assert beam.candidates[b].tolist() == best
            assert beam.scores[b].tolist() == [float(reference.scores[i]) for i in best]
            assert beam.tokens[b].tolist() == [reference.tokens[i] for i in best]
            parents = [reference.parents[i] for i in best]
            assert beam.rows[b].tolist() == [0 if previous is None else previous.index(p) for p in parents]
            rows_of_level = reference.beams
            place = {
                i: (j, r) for j, level_beam in enumerate(rows_of_level) for r, i in enumerate(level_beam)
            }
            expected = []
            for i in best:
                bits = [place[a] for a in reference.ancestors(i)]
                expected.append(sum(1 << j * top_k + r for j, r in bits))
            assert mask_integers(beam.mask[b]) == expected
    guards.check()
    for b in range(batch):
        if absent[b]:
            now = (*candidates, *beam)
            assert all(
                torch.equal(t[b].view(torch.int32), u.view(torch.int32)) for t, u in zip(now, untouched[b])
            )


@st.composite
def candidate_sets(draw):
    batch, c = draw(st.integers(0, 3)), draw(st.integers(0, 24))
    n = draw(st.sampled_from([1, 2, 3, 5, 8, 31, 32, 33, 40]))
    scores = st.lists(LOG_PROBS, min_size=c, max_size=c)
    parents = st.tuples(*(st.one_of(st.integers(-1, max(i - 1, -1)), GARBAGE) for i in range(c)))
    rows = [
        (
            draw(st.lists(st.integers(0, 9), min_size=c, max_size=c)),
            draw(scores),
            list(draw(parents)),
            draw(st.one_of(st.integers(0, n), GARBAGE)),
        )
        for _ in range(batch)
    ]
    return batch, c, n, rows, draw(st.sampled_from(["path", "candidate"])), draw(st.booleans())


@pytest.mark.op("build_tree")
@given(candidate_sets())
def test_build_tree_matches_the_naive_tree(case):
    """Any scores and any parents: ties, NaN, -inf, positive, parents out of range or behind the child."""
    batch, c, n, rows, order, limited = case
    guards = Guards()
    candidates = Candidates(
        int32([r[0] for r in rows]).reshape(batch, c),
        torch.tensor([r[1] for r in rows], dtype=torch.float32).reshape(batch, c),
        int32([r[2] for r in rows]).reshape(batch, c),
    )
    limit = int32([r[3] for r in rows]).reshape(batch) if limited else None
    tree, selected = guarded_tree(guards, batch, n), guards.new(batch, n)
    roots = int32([50 + b for b in range(batch)]).reshape(batch)
    build_tree(roots, candidates, node_limit=limit, order=order, selected=selected, out=tree)
    guards.check()
    for b, (tokens, scores, parents, wanted) in enumerate(rows):
        expected = naive.build(
            50 + b, tokens, scores, parents, max_nodes=n, limit=wanted if limited else None, order=order
        )
        assert_tree_equals(tree, b, expected, selected)


def random_growth(generator, batch, top_k, levels, ties=0):
    """Grown candidates of `batch` requests. ties > 0: log-probabilities from that many values."""
    candidates, beam = empty_candidates(batch, top_k, levels)
    for level in range(1, levels + 1):
        shape = (batch, 1 if level == 1 else top_k, top_k)
        if ties:
            log_probs = -torch.randint(0, ties, shape, generator=generator).float() / 4
        else:
            log_probs = -torch.rand(shape, generator=generator) * 5
        log_probs = log_probs.sort(-1, descending=True).values
        tokens = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
        expand_tree(tokens, log_probs, candidates, beam, level=level, levels=levels)
    return candidates


# EAGLE's default (K=10, 8 levels, 60 nodes), the widest, the deepest branching tree, a chain, more nodes
# than candidates.
SHAPES = [
    (10, 8, 60),
    (32, 8, 256),
    (16, 31, 64),
    (2, 31, 200),
    (1, 100, 101),
    (1, 1, 1),
    (4, 1, 8),
    (8, 5, 64),
    (2, 1, 64),
]


@pytest.mark.op("expand_tree", "build_tree")
@pytest.mark.parametrize(("top_k", "levels", "nodes"), SHAPES)
@pytest.mark.parametrize("ties", [0, 2])
def test_grown_trees_of_real_sizes(top_k, levels, nodes, ties):
    generator = torch.Generator().manual_seed(top_k * levels + ties)
    candidates = random_growth(generator, 2, top_k, levels, ties)
    roots = int32([7, 8])
    for order in ("path", "candidate"):
        tree = build_tree(roots, candidates, max_nodes=nodes, order=order)
        for b in range(2):
            rows = [t[b].tolist() for t in candidates]
            expected = naive.build(7 + b, *rows, max_nodes=nodes, order=order)
            assert expected["num_nodes"] == min(nodes, 1 + len(rows[0]))
            assert_tree_equals(tree, b, expected)


@pytest.mark.op("expand_tree", "build_tree")
def test_path_order_puts_the_best_chain_first():
    generator = torch.Generator().manual_seed(3)
    candidates = random_growth(generator, 1, 4, 4)
    by_path = build_tree(int32([1]), candidates, max_nodes=20, order="path")
    node, depth = 0, 0
    while by_path.first_child[0, node] >= 0:
        children = [i for i in range(20) if by_path.parents[0, i] == node]
        best = max(children, key=lambda i: by_path.scores[0, i].item())
        depth += 1
        assert best == depth  # the chain stands at slots 1, 2, 3 ...
        node = best
    assert depth >= 2
    by_candidate = build_tree(int32([1]), candidates, max_nodes=20, order="candidate")
    assert sorted(by_path.tokens[0].tolist()) == sorted(by_candidate.tokens[0].tolist())


@pytest.mark.op("build_tree", "retrieve_indices")
@pytest.mark.parametrize("name", ["e12_small", "e3_d2t", "e3_small"])
def test_trees_of_the_eagle_reference(name):
    """Shape, masks, positions, retrieve_indices of EAGLE's trees; its nodes among decoys of lower score."""
    step = torch.load(DATA / f"{name}.pt", weights_only=True)["steps"][0]
    visible = step["tree_mask"]
    n = len(visible)
    masks = [sum(1 << j for j in range(n) if row[j]) for row in visible]
    parents = [-1] + [max(j for j in range(i) if visible[i][j]) for i in range(1, n)]
    tree = tree_from_parents([step["draft_tokens"]], [parents])
    assert mask_integers(tree.mask[0]) == masks
    assert tree.depths[0].tolist() == step["tree_position_ids"]
    found = retrieve_indices(tree)
    assert found.num_leaves[0].item() == len(step["retrieve_indices"])
    rows = [[i for i in row if i >= 0] for row in found.indices[0].tolist()]
    # The reference lists its rows by depth and leaf here; ours by leaf.
    assert sorted(r for r in rows if r) == sorted(
        [i for i in row if i >= 0] for row in step["retrieve_indices"]
    )
    assert [r[-1] for r in rows if r] == sorted(r[-1] for r in rows if r)

    # The same nodes as candidates 3 apart, in flat order, between decoys that are one step worse than
    # everything chosen.
    c = 3 * (n - 1)
    tokens, scores, ups = [999] * c, [-1000.0] * c, [-1] * c
    for i in range(1, n):
        tokens[3 * (i - 1)] = step["draft_tokens"][i]
        scores[3 * (i - 1)] = -float(step["tree_position_ids"][i])
        ups[3 * (i - 1)] = -1 if parents[i] == 0 else 3 * (parents[i] - 1)
    candidates = Candidates(int32([tokens]), torch.tensor([scores]), int32([ups]))
    built = build_tree(int32([step["next"]]), candidates, max_nodes=n, order="candidate")
    assert built.tokens[0].tolist() == step["draft_tokens"]
    for field in ("parents", "depths", "mask", "first_child", "next_sibling", "num_nodes"):
        assert torch.equal(getattr(built, field), getattr(tree, field)), field


@pytest.mark.op("build_tree")
def test_sglang_build_tree_vector():
    """EAGLE-2 trees of SGLang's test (its scores are products of probabilities): growth, beams and the
    linked tree."""
    case = json.loads((DATA / "sglang_tree.json").read_text())["build_tree"]
    given_, expected = case["inputs"], case["expected"]
    k, levels, n = given_["topk"], given_["depth"], given_["num_draft_tokens"]
    candidates, beam = empty_candidates(2, k, levels)
    previous = torch.zeros(2, 1, dtype=torch.float64)
    for level in range(1, levels + 1):
        scores = torch.tensor(given_["score_list"][level - 1], dtype=torch.float64).log()  # [2, R, K]
        log_probs = (scores - previous[:, :, None]).float()
        tokens = int32(given_["token_list"][level - 1]).reshape(2, -1, k)
        expand_tree(tokens, log_probs, candidates, beam, level=level, levels=levels)
        grown = given_["parents_list"][level - 1]
        assert beam.candidates.tolist() == ([row[1:] for row in grown] if level == 1 else grown)
        first = 0 if level == 1 else k + (level - 2) * k * k
        previous = scores.reshape(2, -1).gather(1, beam.candidates.long() - first)
    tree = build_tree(int32(given_["verified_id"]), candidates, max_nodes=n, order="candidate")
    assert tree.tokens.flatten().tolist() == expected["draft_tokens"]
    assert tree.first_child.tolist() == expected["next_token"]
    assert tree.next_sibling.tolist() == expected["next_sibling"]
    positions = tree.depths + int32(given_["seq_lens"])[:, None]
    assert positions.flatten().tolist() == expected["positions"]


@pytest.mark.op("retrieve_indices")
@given(
    st.lists(
        st.tuples(
            st.lists(GARBAGE, min_size=9, max_size=9),
            st.lists(st.integers(-1, 7), min_size=9, max_size=9),
            GARBAGE,
        ),
        max_size=3,
    ),
    st.integers(0, 6),
    st.integers(0, 5),
)
def test_retrieve_indices_of_any_parents(rows, max_leaves, max_path):
    """Valid and malformed parents: nodes that do not hang from the root are left out, nothing is overrun."""
    batch, guards = len(rows), Guards()
    parents = [
        [g if i % 4 == 3 else p for i, (g, p) in enumerate(zip(garbage, plain))] for garbage, plain, _ in rows
    ]
    tree = empty_draft_tree(max(batch, 1), 9)._replace(
        parents=int32(parents).reshape(batch, 9), num_nodes=int32([n for _, _, n in rows]).reshape(batch)
    )
    out = RetrieveIndices(guards.new(batch, max_leaves, max_path), guards.new(batch))
    retrieve_indices(tree, out=out)
    guards.check()
    for b in range(batch):
        expected = naive.retrieve_indices(parents[b], max(0, min(rows[b][2], 9)))[:max_leaves]
        padded = [(row + [-1] * max_path)[:max_path] for row in expected]
        padded += [[-1] * max_path] * (max_leaves - len(padded))
        assert out.indices[b].tolist() == padded
        assert out.num_leaves[b].item() == len(expected)


@pytest.mark.op("build_tree")
def test_missing_and_cyclic_parents_are_dropped():
    """parent[3] = 4 and parent[4] = 3; a parent that does not exist; what hangs below goes too; no neighbour
    is read."""
    candidates = Candidates(
        int32([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]),
        torch.full((2, 6), -0.5),
        int32([[-1, 0, 1, 4, 3, 3], [-1, 9, 1, -1, 3, -2]]),
    )
    tree = build_tree(int32([7, 8]), candidates, max_nodes=8, order="candidate")
    assert tree.num_nodes.tolist() == [4, 4]
    assert tree.tokens.tolist() == [[7, 1, 2, 3, 0, 0, 0, 0], [8, 1, 4, 5, 0, 0, 0, 0]]


def test_tree_from_parents_checks_and_roundtrips():
    parents = [[-1, 0, 0, 1, 1, 2, 5], [-1]]
    tree = tree_from_parents([[9, 1, 2, 3, 4, 5, 6], [8]], parents)
    assert tree.depths[0].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert mask_integers(tree.mask[0])[6] == 0b1100101
    assert tree.first_child[0].tolist() == [1, 3, 5, -1, -1, 6, -1]
    assert tree.next_sibling[0].tolist() == [-1, 2, -1, 4, -1, -1, -1]
    assert tree.num_nodes.tolist() == [7, 1]
    assert tree.parents[1].tolist() == [-1] + [-2] * 6
    again = tree_from_parents(tree.tokens, tree.parents, tree.num_nodes)
    assert all(torch.equal(a, b) for a, b in zip(tree, again))
    for bad in ([[-1, 1]], [[-1, -1]], [[0, 0]], [[-1, 5]]):
        with pytest.raises(ValueError, match="parents"):
            tree_from_parents([[1, 2]], bad)


@pytest.mark.op("build_tree")
def test_wide_masks_use_the_sign_bit():
    chain = tree_from_parents([list(range(64))], [[i - 1 for i in range(64)]])
    assert chain.mask[0, 31].tolist() == [-1, 0]
    assert chain.mask[0, 63].tolist() == [-1, -1]
    candidates = Candidates(int32([list(range(1, 64))]), torch.zeros(1, 63), int32([list(range(-1, 62))]))
    built = build_tree(int32([0]), candidates, max_nodes=64)
    assert all(torch.equal(a, b) for a, b in zip(built, chain))


@pytest.mark.op("build_tree", "retrieve_indices")
def test_numpy_in_numpy_out():
    candidates = Candidates(
        np.array([[1, 2]], np.int32), np.array([[-0.5, -1.0]], np.float32), np.array([[-1, 0]], np.int32)
    )
    tree = build_tree(np.array([9], np.int32), candidates, max_nodes=4)
    assert isinstance(tree.tokens, np.ndarray)
    assert tree.tokens.tolist() == [[9, 1, 2, 0]]
    assert retrieve_indices(tree).indices[0, 0].tolist() == [0, 1, 2, -1]
    assert isinstance(empty_draft_tree(1, 2, like=tree.tokens).mask, np.ndarray)


# ---- wrong arguments ---------------------------------------------------------------------------------------


def test_expand_tree_refuses_wrong_arguments():
    candidates, beam = empty_candidates(2, 3, 2)
    tokens, log_probs = torch.zeros(2, 1, 3, dtype=torch.int32), torch.zeros(2, 1, 3)

    def expand(
        tokens=tokens,
        log_probs=log_probs,
        candidates=candidates,
        beam=beam,
        level=1,
        levels=2,
        num_accepted=None,
    ):
        expand_tree(
            tokens, log_probs, candidates, beam, level=level, levels=levels, num_accepted=num_accepted
        )

    expand()
    for message, wrong in {
        "tokens: expected dtype int32, got int64": {"tokens": tokens.long()},
        "tokens: expected 3 dimensions": {"tokens": tokens[0]},
        r"tokens: expected shape \[2, 3, 3\], got \[2, 1, 3\]": {"level": 2},
        "log_probs: expected dtype float32": {"log_probs": log_probs.half()},
        r"log_probs: expected shape \[2, 1, 3\], got \[2, 3, 1\]": {"log_probs": torch.zeros(2, 3, 1)},
        "level: expected 1 to 2, got 0": {"level": 0},
        "level: expected 1 to 2, got 3": {"level": 3},
        "levels: expected at least 1, got 0": {"levels": 0},
        "levels: expected at most 31 where top_k > 1, got 32": {"levels": 32},
        r"candidate_tokens: expected shape \[2, 21\]": {"levels": 3},
        r"num_accepted: expected shape \[2\], got \[3\]": {"num_accepted": int32([0, 0, 0])},
        "beam_mask: expected shape": {"beam": beam._replace(mask=torch.zeros(2, 3, 2, dtype=torch.int32))},
        "beam_scores: expected a contiguous": {"beam": beam._replace(scores=torch.zeros(2, 6)[:, ::2])},
        "candidate_scores: expected a contiguous": {
            "candidates": candidates._replace(scores=torch.zeros(2, 1).expand(2, 12))
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            expand(**wrong)
    with pytest.raises(ValueError, match="dimension of at most 32, got 33"):
        expand(tokens=torch.zeros(2, 1, 33, dtype=torch.int32), log_probs=torch.zeros(2, 1, 33))
    with pytest.raises(ValueError, match="at most 8192 candidates"):
        expand(tokens=torch.zeros(2, 1, 32, dtype=torch.int32), log_probs=torch.zeros(2, 1, 32), levels=9)


def test_build_tree_refuses_wrong_arguments():
    candidates = Candidates(int32([[1, 2]]), torch.zeros(1, 2), int32([[-1, 0]]))
    root, out = int32([9]), empty_draft_tree(1, 4)
    build_tree(root, candidates, out=out)
    for message, arguments in {
        "root_tokens: expected dtype int32": (root.long(), candidates, {"out": out}),
        r"candidate_scores: expected shape \[1, 2\]": (
            root,
            candidates._replace(scores=torch.zeros(1, 3)),
            {"out": out},
        ),
        "candidate_parents: expected dtype int32": (
            root,
            candidates._replace(parents=torch.zeros(1, 2)),
            {"out": out},
        ),
        "node_limit: expected shape": (root, candidates, {"out": out, "node_limit": int32([1, 2])}),
        "order: expected": (root, candidates, {"out": out, "order": "flat"}),
        "tree.mask: expected shape": (
            root,
            candidates,
            {"out": out._replace(mask=torch.zeros(1, 4, 2, dtype=torch.int32))},
        ),
        "tree.num_nodes: expected shape": (root, candidates, {"out": out._replace(num_nodes=int32([1, 2]))}),
        "max_nodes: expected 1 to 256, got 257": (root, candidates, {"max_nodes": 257}),
        "max_nodes: expected 1 to 256, got None": (root, candidates, {}),
        "selected: expected shape": (root, candidates, {"out": out, "selected": int32([[1]])}),
    }.items():
        with pytest.raises(ValueError, match=message):
            build_tree(arguments[0], arguments[1], **arguments[2])
    with pytest.raises(ValueError, match="num_nodes: expected shape"):
        retrieve_indices(out._replace(num_nodes=int32([1, 2])))
    big = torch.zeros(1, 8193)
    with pytest.raises(ValueError, match=r"candidate_tokens: expected a dimension of at most 8192"):
        build_tree(root, Candidates(big.int(), big, big.int()), out=out)


# ---- row invariance ----------------------------------------------------------------------------------------


def row_invariance_cases():
    """(name, rows, run(rows) -> outputs with one leading entry per row)."""
    generator = torch.Generator().manual_seed(11)
    batch, k, levels = 5, 6, 5
    steps = []
    for level in range(levels):
        shape = (batch, 1 if level == 0 else k, k)
        steps.append(
            (
                torch.randint(0, 99, shape, generator=generator, dtype=torch.int32),
                -torch.rand(shape, generator=generator),
            )
        )
    limit, roots = int32([30, 1, 0, 12, 31]), int32([1, 2, 3, 4, 5])

    def grow_and_build(rows):
        candidates, beam = empty_candidates(len(rows), k, levels)
        for level, (tokens, log_probs) in enumerate(steps, 1):
            expand_tree(tokens[rows], log_probs[rows], candidates, beam, level=level, levels=levels)
        tree = build_tree(roots[rows], candidates, max_nodes=31, node_limit=limit[rows])
        return [*candidates, *beam, *tree, *retrieve_indices(tree)]

    yield "expand_tree, build_tree, retrieve_indices", batch, grow_and_build


@pytest.mark.op("expand_tree", "build_tree", "retrieve_indices")
def test_row_invariance(one_and_two_threads):
    for name, count, run in row_invariance_cases():
        together, with_two_threads = one_and_two_threads(lambda run=run, count=count: run(list(range(count))))
        for a, b in zip(together, with_two_threads):
            assert torch.equal(a, b), name
        for i in range(count):
            for whole, alone in zip(together, run([i])):
                assert torch.equal(whole[i : i + 1], alone), (name, i)


@pytest.mark.op("expand_tree", "build_tree")
@pytest.mark.full
@pytest.mark.parametrize("ties", [1, 2, 3])
def test_selected_parents_are_always_selected(ties):
    """2000 random score tables with heavy ties per case."""
    generator = torch.Generator().manual_seed(ties)
    for _ in range(20):
        candidates = random_growth(generator, 100, 5, 4, ties)
        tree = build_tree(torch.zeros(100, dtype=torch.int32), candidates, max_nodes=24, order="candidate")
        for b in range(100):
            expected = naive.build(0, *(t[b].tolist() for t in candidates), max_nodes=24, order="candidate")
            assert_tree_equals(tree, b, expected)
    assert math.isfinite(tree.scores.sum().item())
