"""verify: against the plain walk, EAGLE's rule on paths, SGLang's vector, and hostile links."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_cuda.tree import empty_draft_tree, retrieve_indices, tree_from_parents
from eagle_cuda.verify import Accepted, verify
from guarded import Guards
from reference import verify as naive

DATA = Path(__file__).parent / "data"
LINKS = st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2**31 - 1])


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_row(out: Accepted, b: int, expected) -> None:
    path, num_accepted, token, finished, seq_len = expected
    width = out.path.shape[1]
    assert out.path[b].tolist() == (path + [-1] * width)[:width]
    assert [t[b].item() for t in out[1:]] == [num_accepted, token, finished, seq_len]


@st.composite
def walks(draw):
    """Trees of arbitrary links over few tokens, so that walks are long and siblings repeat."""
    batch, n = draw(st.integers(0, 3)), draw(st.integers(0, 7))
    token = st.integers(-1, 2)

    def row(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    rows = []
    for _ in range(batch):
        well_formed = draw(st.booleans())
        if well_formed and n:
            count = draw(st.integers(1, n))
            parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, count)]
            tree = tree_from_parents([row(token)], [parents], [count])
            rows.append([t[0].tolist() for t in (tree.tokens, tree.first_child, tree.next_sibling)] + [count])
        else:
            rows.append(
                [row(token), row(LINKS), row(LINKS), draw(st.sampled_from([-5, 0, 1, n, n + 1, 2**31 - 1]))]
            )
        rows[-1] += [row(token), draw(st.lists(token, min_size=2, max_size=2)), draw(st.integers(-1, 5))]
    return batch, n, rows, draw(st.booleans()), draw(st.booleans()), draw(st.integers(1, 9))


def check_walks(n, rows, *, with_stop=True, with_budget=True, max_path=None) -> Accepted:
    """Runs a batch of rows (tokens, first_child, next_sibling, num_nodes, targets, stop tokens, budget) and
    compares every output, and the words around them, with the plain walk."""
    batch = len(rows)
    max_path = max_path or max(n, 1)
    guards = Guards()
    columns = [int32([r[i] for r in rows]).reshape(batch, *([n] if i != 3 else [])) for i in range(5)]
    tree = empty_draft_tree(1, 1)._replace(  # of any width; the other fields are not read
        tokens=columns[0], first_child=columns[1], next_sibling=columns[2], num_nodes=columns[3]
    )
    out = Accepted(guards.new(batch, max_path), *(guards.new(batch) for _ in range(4)))
    width = len(rows[0][5]) if rows else 2
    verify(
        tree,
        columns[4],
        int32([100 + b for b in range(batch)]).reshape(batch),
        stop_tokens=int32([r[5] for r in rows]).reshape(batch, width) if with_stop else None,
        budget=int32([r[6] for r in rows]).reshape(batch) if with_budget else None,
        out=out,
    )
    guards.check()
    for b, (tokens, first, sibling, count, targets, stop, budget) in enumerate(rows):
        expected = naive.verify(
            tokens,
            first,
            sibling,
            count,
            targets,
            100 + b,
            stop=stop if with_stop else (),
            budget=budget if with_budget else None,
            max_path=max_path,
        )
        assert_row(out, b, expected)
    return out


@pytest.mark.op("verify")
@given(walks())
def test_verify_matches_the_plain_walk(case):
    _, n, rows, with_stop, with_budget, max_path = case
    check_walks(n, rows, with_stop=with_stop, with_budget=with_budget, max_path=max_path)


def links(parents) -> tuple[list[int], list[int]]:
    """first_child and next_sibling of a tree whose children stand in rank order."""
    first, sibling, last = [-1] * len(parents), [-1] * len(parents), {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in last:
            sibling[last[parent]] = node
        else:
            first[parent] = node
        last[parent] = node
    return first, sibling


def random_row(random, n, *, reach=4, stop=(-1, -1), budget=2**31 - 1):
    """A tree whose walk is long: parents stand close by, few tokens, most targets those of a child."""
    parents = [-1] + [random.randrange(max(0, i - reach), i) for i in range(1, n)]
    tokens = [random.randrange(3) for _ in range(n)]
    targets = [random.randrange(4) for _ in range(n)]
    for child in random.sample(range(1, n), n - 1):
        if random.random() < 0.9:
            targets[parents[child]] = tokens[child]
    return [tokens, *links(parents), n, targets, list(stop), budget]


@pytest.mark.op("verify")
@pytest.mark.parametrize("n", [1, 31, 32, 33, 255, 256, 257, 700])
def test_trees_of_every_size(n):
    random = Random(n)
    rows = [random_row(random, n, reach=reach) for reach in (1, 2, 6, n) for _ in range(2)]
    for row, count in zip(rows, [n, n - 1, -(2**31), n + 1, 2**31 - 1, n // 2, 1, 0]):
        row[3] = count  # whatever stands there: at most the tree's width
    out = check_walks(n, rows)
    assert n < 31 or out.num_accepted.max().item() >= 6


@pytest.mark.op("verify")
@pytest.mark.parametrize("n", [63, 64, 300])
def test_long_paths(n):
    """A chain that is accepted whole: paths of 0, 1, 2 and many full words of 32 entries."""
    chain = [list(range(n)), *links(list(range(-1, n - 1))), n, list(range(1, n + 1)), [-1], n]
    for max_path in (1, 31, 32, 33, 64, n, n + 1):
        rows = [[*chain[:6], budget] for budget in (max_path, 1, 31, 32, 33, n, 2**31 - 1)]
        out = check_walks(n, rows, max_path=max_path)
        assert out.num_accepted.max().item() == min(n, max_path) - 1


@pytest.mark.op("verify")
def test_large_batches():
    random = Random(7)
    rows = []
    for _ in range(517):
        row = random_row(
            random, 12, stop=(random.choice([-1, 2]), -1), budget=random.choice([0, 2, 5, 2**31 - 1])
        )
        row[3] = random.choice([0, 1, 5, 12, 12, 12, -1])
        rows.append(row)
    out = check_walks(12, rows)
    assert set(out.finished.tolist()) == {0, 1, 2}
    for batch in (1, 4, 5, 130):
        check_walks(12, rows[:batch])


@pytest.mark.op("verify")
@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 64, 100])
def test_stop_lists_of_every_length(count):
    n = 6
    chain = [list(range(n)), *links(list(range(-1, n - 1))), n, list(range(1, n + 1))]
    rows = []
    for place in sorted({0, count // 2, count - 1} & set(range(count))):
        for token in (3, n, 77):
            stop = [-1 if i % 2 else 1000 + i for i in range(count)]
            stop[place] = token
            rows.append([*chain, stop, 100])
    rows.append([*chain, [-1] * count, 100])
    targets_minus_one = [*chain[:4], [-1] * n, [-1] * count, 100]
    rows.append(targets_minus_one)  # token -1 is no stop token
    out = check_walks(n, rows)
    assert out.finished.tolist()[-2:] == [0, 0]
    assert count == 0 or out.finished.tolist()[:2] == [1, 1]


@pytest.mark.op("verify")
@pytest.mark.parametrize("n", [1, 5, 256, 257])
def test_budgets(n):
    """Budgets around what would be accepted, and at the ends of the range."""
    chain = [list(range(n)), *links(list(range(-1, n - 1))), n, list(range(1, n + 1))]
    budgets = [-(2**31), -1, 0, 1, 2, n - 1, n, n + 1, 2**31 - 1]
    out = check_walks(n, [[*chain, [-1], budget] for budget in budgets])
    assert out.num_accepted.tolist() == [max(min(budget, n), 0) - 1 for budget in budgets]
    assert out.finished.tolist() == [2 if budget <= n else 0 for budget in budgets]


@pytest.mark.op("verify")
@pytest.mark.parametrize("n", [3, 40, 256, 300])
def test_hostile_links_end(n):
    """Sibling lists and paths that lead in circles, links out of range, through any number of nodes."""
    everything_once = [(i + 1) % n for i in range(n)]
    huge = [2**31 - 1] * n
    tokens = [5] * n
    rows = [
        [tokens, everything_once, everything_once, n, [6] * n, [-1], 9],  # no sibling matches, in a circle
        [tokens, [0] * n, [0] * n, n, [5] * n, [-1], 9],  # the root is its own child
        [tokens, everything_once, [-1] * n, n, [5] * n, [-1], 2**31 - 1],  # a path in a circle
        [tokens, huge, huge, 2**31 - 1, [5] * n, [-1], 9],
        [tokens, [n] * n, [n] * n, 2**31 - 1, [5] * n, [-1], 9],
        [tokens, [-(2**31)] * n, huge, n, [5] * n, [-1], 9],
        [[5] * (n - 1) + [6], [1] * n, everything_once, n, [6] * n, [-1], 9],  # the last sibling matches
        [[5] * (n - 1) + [6], [1] * n, everything_once, n - 1, [6] * n, [-1], 9],  # and is beyond the nodes
    ]
    out = check_walks(n, rows, max_path=100)
    assert out.num_accepted.tolist() == [0, 8, 99, 0, 0, 0, 8, 0]


@pytest.mark.op("verify")
def test_a_tree_without_room_for_nodes():
    out = check_walks(0, [[[], [], [], count, [], [-1], 5] for count in (0, 1, -1, 2**31 - 1)], max_path=40)
    assert out.num_accepted.tolist() == [-1] * 4


@pytest.mark.op("verify")
def test_agrees_with_eagle_on_paths():
    """The walk and EAGLE's longest-matching-row rule accept the same tokens; every length from none to full
    occurs."""
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(200):
        n = int(torch.randint(1, 20, (1,), generator=generator))
        parents = [-1] + [
            int(torch.randint(max(0, i - 3), i, (1,), generator=generator)) for i in range(1, n)
        ]
        tokens, used = [0], set()
        for i in range(1, n):  # children of a node carry different tokens
            t = next(
                t for t in torch.randperm(50, generator=generator).tolist() if (parents[i], t) not in used
            )
            used.add((parents[i], t))
            tokens.append(t)
        children = [[i for i in range(n) if parents[i] == node] for node in range(n)]
        pick = torch.rand(n, generator=generator).tolist()
        targets = [
            tokens[c[int(pick[i] * len(c))]] if c and pick[i] < 0.9 else 77 for i, c in enumerate(children)
        ]
        tree = tree_from_parents([tokens], [parents])
        rows = [[i for i in row if i >= 0] for row in retrieve_indices(tree).indices[0].tolist()]
        path, bonus = naive.accept_by_paths(tokens, [r for r in rows if r], targets)
        out = verify(tree, int32([targets]), int32([0]))
        assert [i for i in out.path[0].tolist() if i >= 0] == path
        assert (out.num_accepted.item(), out.next_tokens.item(), out.finished.item()) == (
            len(path) - 1,
            bonus,
            0,
        )
        lengths.add(len(path) - 1)
    assert lengths >= set(range(6))


@pytest.mark.op("verify")
def test_sglang_greedy_vector():
    case = json.loads((DATA / "sglang_tree.json").read_text())["verify"]
    given_, expected = case["inputs"], case["expected"]
    n = 6
    tree = empty_draft_tree(2, n)._replace(
        tokens=int32(given_["candidates"]),
        first_child=int32(given_["next_token"]),
        next_sibling=int32(given_["next_sibling"]),
        num_nodes=int32([n, n]),
    )
    out = verify(tree, int32(given_["target_predict"]), int32([5, 9]), max_path=given_["num_spec_step"])
    assert out.num_accepted.tolist() == expected["accept_token_num"]
    globally = [[i + b * n if i >= 0 else -1 for i in row] for b, row in enumerate(out.path.tolist())]
    assert globally == expected["accept_index"]
    last = [row[count] for row, count in zip(globally, out.num_accepted.tolist())]
    assert out.next_tokens.tolist() == [expected["predicts"][i] for i in last]
    assert out.new_seq_lens.tolist() == [5 + 3 + 1, 9 + 2 + 1]


@pytest.mark.op("verify")
@pytest.mark.parametrize(
    ("stop", "budget", "path", "token", "finished"),
    [
        ([], 9, [0, 1, 2, 3], 14, 0),  # full acceptance: the leaf's own token is the bonus
        ([12], 9, [0, 1], 12, 1),  # inside the accepted run: nothing behind it is emitted
        ([11], 9, [0], 11, 1),  # at the root
        ([14], 9, [0, 1, 2, 3], 14, 1),  # the bonus token
        ([], 1, [0], 11, 2),
        ([], 3, [0, 1, 2], 13, 2),
        ([13], 3, [0, 1, 2], 13, 1),  # stop and length at the same place: stop wins
        ([10], 4, [0, 1, 2, 3], 14, 2),  # the root's own token was emitted before
    ],
)
def test_stop_tokens_and_budget(stop, budget, path, token, finished):
    tree = tree_from_parents([[10, 11, 12, 13]], [[-1, 0, 1, 2]])
    out = verify(
        tree,
        int32([[11, 12, 13, 14]]),
        int32([20]),
        stop_tokens=int32([[-1, *stop]]),
        budget=int32([budget]),
    )
    assert_row(out, 0, (path, len(path) - 1, token, finished, 20 + len(path)))


@pytest.mark.op("verify")
def test_absent_and_exhausted_requests_emit_nothing():
    tree = tree_from_parents([[1], [1], [1], [1]], [[-1]] * 4, [0, 1, 1, 0])
    out = verify(tree, int32([[5]] * 4), int32([7, 8, 9, 10]), budget=int32([4, 0, -3, 0]))
    assert out.num_accepted.tolist() == [-1] * 4
    assert out.finished.tolist() == [0, 2, 2, 0]
    assert out.next_tokens.tolist() == [0] * 4
    assert out.new_seq_lens.tolist() == [7, 8, 9, 10]
    assert out.path.tolist() == [[-1]] * 4


@pytest.mark.op("verify")
def test_cyclic_links_end():
    """next_sibling[i] = i, and a child that is its own ancestor: bounded, within the row."""
    tree = tree_from_parents([[1, 2, 3], [1, 2, 3]], [[-1, 0, 0], [-1, 0, 1]])
    tree.next_sibling[0, 1] = 1
    tree.first_child[1, 2] = 1
    out = verify(tree, int32([[9, 9, 9], [2, 3, 2]]), int32([0, 0]), max_path=5)
    assert out.path.tolist() == [[0, -1, -1, -1, -1], [0, 1, 2, 1, 2]]


@pytest.mark.op("verify")
def test_equal_siblings_the_first_counts():
    tree = tree_from_parents([[1, 2, 2, 3]], [[-1, 0, 0, 1]])
    out = verify(tree, int32([[2, 3, 4, 5]]), int32([0]))
    assert out.path[0].tolist() == [0, 1, 3, -1]


@pytest.mark.op("verify")
def test_seq_lens_may_be_updated_in_place_and_numpy_works():
    tree = tree_from_parents([[1, 2]], [[-1, 0]])
    seq_lens = int32([5])
    out = Accepted(*(torch.empty(shape, dtype=torch.int32) for shape in [(1, 2), 1, 1, 1]), seq_lens)
    verify(tree, int32([[2, 3]]), seq_lens, out=out)
    assert seq_lens.tolist() == [7]
    arrays = type(tree)(*(t.numpy() for t in tree))
    found = verify(arrays, np.array([[2, 3]], np.int32), np.array([5], np.int32))
    assert isinstance(found.path, np.ndarray)
    assert found.new_seq_lens.tolist() == [7]


@pytest.mark.op("verify")
def test_a_garbage_length_does_not_overflow():
    tree = tree_from_parents([[1, 2]] * 3, [[-1, 0]] * 3)
    lengths = [2**31 - 1, 2**31 - 2, -(2**31)]
    out = verify(tree, int32([[2, 3]] * 3), int32(lengths))
    assert out.new_seq_lens.tolist() == [2**31 - 1, 2**31 - 1, -(2**31) + 2]


def test_refuses_wrong_arguments():
    tree = tree_from_parents([[1, 2], [1, 2]], [[-1, 0], [-1, 0]])
    targets, seq_lens = int32([[2, 3], [2, 3]]), int32([5, 6])
    verify(tree, targets, seq_lens)
    for message, (t, targets_, lens, options) in {
        "tokens: expected dtype int32, got int64": (
            tree._replace(tokens=tree.tokens.long()),
            targets,
            seq_lens,
            {},
        ),
        r"target_tokens: expected shape \[2, 2\], got \[2, 3\]": (
            tree,
            torch.zeros(2, 3).int(),
            seq_lens,
            {},
        ),
        "target_tokens: expected a contiguous": (tree, torch.zeros(2, 4).int()[:, ::2], seq_lens, {}),
        r"first_child: expected shape \[2, 2\]": (
            tree._replace(first_child=int32([[1]])),
            targets,
            seq_lens,
            {},
        ),
        r"num_nodes: expected shape \[2\]": (tree._replace(num_nodes=int32([1])), targets, seq_lens, {}),
        r"seq_lens: expected shape \[2\], got \[1\]": (tree, targets, int32([5]), {}),
        "seq_lens: expected a tensor, got None": (tree, targets, None, {}),
        r"stop_tokens: expected shape \[2, -1\], got \[2\]": (
            tree,
            targets,
            seq_lens,
            {"stop_tokens": seq_lens},
        ),
        "budget: expected dtype int32": (tree, targets, seq_lens, {"budget": torch.ones(2)}),
        "max_path: expected at least 1, got 0": (tree, targets, seq_lens, {"max_path": 0}),
    }.items():
        with pytest.raises(ValueError, match=message):
            verify(t, targets_, lens, **options)
    out = verify(tree, targets, seq_lens)
    for name, wrong in {
        "path": int32([[1, 2]]),
        "finished": torch.zeros(2),
        "next_tokens": int32([1]),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: expected"):
            verify(tree, targets, seq_lens, out=out._replace(**{name: wrong}))
    with pytest.raises(ValueError, match="path: expected a contiguous"):
        verify(tree, targets, seq_lens, out=out._replace(path=int32([[1, 2]]).expand(2, 2)))
    frozen = np.zeros(2, np.int32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"num_accepted: expected a writable|read.?only"):
        verify(tree, targets, seq_lens, out=out._replace(num_accepted=frozen))


def row_invariance_cases():
    """(name, rows, run(rows) -> outputs with one leading entry per row)."""
    generator = torch.Generator().manual_seed(5)
    batch, n = 150, 12  # enough requests for two threads to share
    parents = [
        [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n)]
        for _ in range(batch)
    ]
    tokens = torch.randint(0, 3, (batch, n), generator=generator)
    tree = tree_from_parents(tokens, parents)
    targets = torch.randint(0, 3, (batch, n), generator=generator, dtype=torch.int32)
    seq_lens = torch.arange(batch, dtype=torch.int32)
    budget = torch.randint(1, 5, (batch,), generator=generator, dtype=torch.int32)

    def run(rows):
        part = type(tree)(*(t[rows] for t in tree))
        return list(verify(part, targets[rows], seq_lens[rows], budget=budget[rows]))

    yield "verify", batch, run


@pytest.mark.op("verify")
def test_row_invariance(one_and_two_threads):
    for name, count, run in row_invariance_cases():
        together, with_two_threads = one_and_two_threads(lambda run=run, count=count: run(list(range(count))))
        assert len(set(together[1].tolist())) > 3
        for a, b in zip(together, with_two_threads):
            assert torch.equal(a, b), name
        for i in range(0, count, 7):
            for whole, alone in zip(together, run([i])):
                assert torch.equal(whole[i : i + 1], alone), (name, i)
