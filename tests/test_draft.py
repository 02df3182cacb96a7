"""draft and extend_draft against the published code, a naive head, and themselves in other batches."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import assert_close_to_fp64
from draft_rig import HEADS, Rig, accepted, trees_of
from eagle_cuda.draft import draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.sampling import gumbel_noise, sample_tokens
from eagle_cuda.tree import retrieve_indices
from eagle_decode.heads import head_from_tensors
from reference import draft as reference
from reference.sampling import gumbel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def checked_where(wanted, *case):
    """A case whose kernels the emulator's checker looks at only where `wanted`: the values are compared all
    the same."""
    return pytest.param(*case, marks=[] if wanted else [pytest.mark.unchecked])


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- the published code


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize("name", ["e12_small", "e3_small", checked_where(False, "e3_d2t")])
def test_published_trees(name):
    """Heads and outcomes of the EAGLE authors' code: exactly its tokens, masks, positions and paths."""
    case = torch.load(f"{__file__.rsplit('/', 1)[0]}/data/{name}.pt", weights_only=True)
    step, size = case["steps"][0], case["config"]["vocab_size"]
    target = {"num_hidden_layers": 12, "vocab_size": size, "hidden_size": case["config"]["hidden_size"]}
    loaded = head_from_tensors(
        case["config"],
        case["state"],
        target_config=target,
        target_tensors={"lm_head.weight": case["target_head"]},
    )
    assert loaded.kind == ("eagle1" if case["kind"] == "eagle12" else "eagle3")
    rig = Rig(loaded.to_draft_head(torch.float32))
    features = torch.tensor(step["features"])
    tokens = int32(*step["new_tokens"][1:], step["next"])
    rig.prompt(0, features[:-1], tokens[:-1])
    options = {"max_nodes": case["total"], "top_k": case["topk"], "levels": case["depth"] + 1}
    tree = rig.draft_last(features[-1], tokens[-1], order="candidate", **options)
    (got,) = trees_of(tree)
    assert got["tokens"] == step["draft_tokens"]
    assert got["depths"] == step["tree_position_ids"]
    assert got["mask"] == step["tree_mask"]
    indices = retrieve_indices(tree, max_leaves=case["total"], max_path=case["depth"] + 2)
    rows = indices.indices[0, : int(indices.num_leaves[0])]
    width = len(step["retrieve_indices"][0])
    assert rows[:, :width].tolist() == step["retrieve_indices"]
    assert bool((rows[:, width:] == -1).all())
    # The other order numbers the same nodes differently.
    (path,) = trees_of(rig.draft_last(features[-1], tokens[-1], order="path", again=True, **options))
    assert sorted(zip(path["tokens"], path["scores"])) == sorted(zip(got["tokens"], got["scores"]))


# ---- a naive head


@pytest.mark.op("extend_draft")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        checked_where(i % 3 == j, case, dtype)
        for i, case in enumerate(HEADS)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_hidden_states_equal_a_naive_head(case, dtype):
    """What heads get wrong: positions, pairing, norms, fc, biases, head sizes."""
    rig = Rig.random(case, dtype)
    features, tokens = rig.pairs(33)
    got = rig.prompt(0, features, tokens)
    exact = rig.naive(torch.float64).extend(features.double(), tokens)
    assert_close_to_fp64(got, exact, rig.naive(dtype).extend(features, tokens))


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("case", [HEADS[0], HEADS[2]], ids=str)
def test_quantised_weights_equal_a_naive_head(case, weights):
    """The naive head multiplies with what the stored matrices are worth in the format."""
    rig = Rig.random((case[0], case[1] | {"weights": weights}), torch.float32)
    features, tokens = rig.pairs(9)
    naive = rig.naive(torch.float64)
    exact = naive.extend(features.double(), tokens)
    got = rig.prompt(0, features[:-1], tokens[:-1])
    simple = rig.naive(torch.float32).extend(features, tokens)
    assert_close_to_fp64(got, exact[:-1], simple[:-1])
    shape = {"top_k": 4, "levels": 3}
    (tree,) = trees_of(rig.draft_last(features[-1], tokens[-1], order="candidate", max_nodes=12, **shape))
    want = reference.draft_tree(naive, exact[-1], int(tokens[-1]), num_nodes=12, **shape)
    for part in ("tokens", "parents"):
        assert tree[part] == want[part], part


TREES = [
    (8, 4, 3),
    (1, 4, 3),
    (5, 4, 1),
    (7, 1, 6),
    (24, 8, 5),
    (256, 5, 4),
    (64, 3, 3),
    (40, 10, 2),
    (33, 2, 8),
]


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        checked_where((i - j) % 6 == 0, case, shape)
        for i, case in enumerate(HEADS)
        for j, shape in enumerate(TREES)
    ],
    ids=str,
)
def test_trees_equal_a_naive_search(case, shape):
    """Traps 2, 7, 11, 13 to 15, 22 and 25: roots, feedback, maps, ties, levels, counts, too many nodes."""
    nodes, top_k, levels = shape
    rig = Rig.random(case, torch.float32, seed=nodes)
    features, tokens = rig.pairs(9)
    rig.prompt(0, features[:-1], tokens[:-1])
    options = {"max_nodes": nodes, "top_k": top_k, "levels": levels}
    tree = rig.draft_last(features[-1], tokens[-1], order="candidate", **options)
    naive = rig.naive(torch.float64)
    g = naive.extend(features.double(), tokens)[-1]
    want = reference.draft_tree(naive, g, int(tokens[-1]), num_nodes=nodes, top_k=top_k, levels=levels)
    (got,) = trees_of(tree)
    for part in ("tokens", "parents", "depths", "mask"):
        assert got[part] == want[part], part
    np.testing.assert_allclose(got["scores"], want["scores"], atol=2e-4)


@st.composite
def batches(draw):
    requests = draw(st.integers(1, 3))
    top_k, levels = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return {
        "case": draw(st.sampled_from(HEADS)),
        "lengths": draw(st.lists(st.integers(1, 20), min_size=requests, max_size=requests)),
        "limits": draw(st.lists(st.integers(0, 60), min_size=requests, max_size=requests)),
        "paged": draw(st.sampled_from([0, 1, 4, 16, 64])),
        "seed": draw(st.integers(0, 1000)),
        "options": {"max_nodes": draw(st.integers(1, 50)), "top_k": top_k, "levels": levels},
    }


def check_batch(batch):
    options, requests = batch["options"], len(batch["lengths"])
    rig = Rig.random(
        batch["case"], torch.float32, seed=batch["seed"], batch=requests, paged=batch["paged"], spare=1
    )
    features, tokens = rig.fill(batch["lengths"])
    limits = int32(*batch["limits"])
    shape = {"top_k": options["top_k"], "levels": options["levels"]}
    tree = rig.draft_rows(features, tokens, node_limit=limits, order="candidate", **options)
    for b, got in enumerate(trees_of(tree)):
        nodes = min(batch["limits"][b], options["max_nodes"])
        if nodes == 0:
            assert got["tokens"] == []
            continue
        naive = rig.naive(torch.float64)
        known, follow = rig.history[b]
        g = naive.extend(known.double(), follow)[-1]
        want = reference.draft_tree(naive, g, int(follow[-1]), num_nodes=nodes, **shape)
        for part in ("tokens", "parents", "depths", "mask"):
            assert got[part] == want[part], part


@pytest.mark.full
@pytest.mark.op("draft", "extend_draft")
@settings(max_examples=12)
@given(batches())
def test_ragged_batches_equal_a_naive_search(batch):
    check_batch(batch)


@pytest.mark.full
@pytest.mark.unchecked
@pytest.mark.op("draft", "extend_draft")
@settings(max_examples=100)
@given(batches())
def test_many_ragged_batches_equal_a_naive_search(batch):
    check_batch(batch)


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize("order", ["candidate", "path"])
def test_equal_scores_go_to_the_smaller_index(order):
    """All draft tokens equally likely: only the rules for ties decide (trap 13)."""
    rig = Rig.random(("eagle3", {"draft_vocab": 40, "flat": True}), torch.float32)
    features, tokens = rig.fill([5])
    (got,) = trees_of(rig.draft_rows(features, tokens, max_nodes=8, top_k=3, levels=3, order=order))
    first = rig.naive(torch.float64).to_target(torch.arange(3)).tolist()
    if order == "candidate":
        assert got["tokens"][1:] == [*first, *first, first[0]]
        assert got["parents"] == [-1, 0, 0, 0, 1, 1, 1, 2]
    else:  # the chain of best children first: the first child of each
        assert got["parents"][:3] == [-1, 0, 1]
        assert got["tokens"][1:3] == [first[0], first[0]]


@pytest.mark.unchecked  # a law of values
@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    ("top_k", "levels", "coupled"),
    [(3, 3, True), (8, 3, False), pytest.param(3, 7, True, marks=pytest.mark.full)],
)
def test_a_small_tree_is_the_best_part_of_a_full_one(top_k, levels, coupled):
    """Rows whose children cannot enter the tree are not run: that must never show."""
    rig = Rig.random(HEADS[1], torch.float32, batch=6, peaked=True)
    noise = {"temperature": torch.full((6,), 0.8), "seeds": torch.arange(6)} if coupled else {}
    features, tokens = rig.fill([5, 9, 3, 12, 7, 1])
    everything = top_k + (levels - 1) * top_k**2
    options = {"top_k": top_k, "levels": levels, "order": "candidate", **noise}
    full = trees_of(rig.draft_rows(features, tokens, max_nodes=min(everything + 1, 256), **options))
    for limit in (2, 3, 5, 9, 20):
        small = trees_of(rig.draft_rows(features, tokens, max_nodes=limit, again=True, **options))
        for whole, part in zip(full, small):
            kept = sorted(reference.best(torch.tensor(whole["scores"][1:]), limit - 1))
            assert part["tokens"] == [whole["tokens"][0]] + [whole["tokens"][1:][i] for i in kept]
            assert part["scores"] == [0.0] + [whole["scores"][1:][i] for i in kept]


# ---- coupled drafting


@pytest.mark.op("draft", "extend_draft")
def test_coupled_candidates_equal_a_naive_search():
    rig = Rig.random(HEADS[1], torch.float32, batch=3)
    features, tokens = rig.fill([6, 6, 11])
    temperature, seeds, tau = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, -7, 2**40]), 1.25
    options = {"max_nodes": 20, "top_k": 4, "levels": 3, "order": "candidate"}
    tree = rig.draft_rows(features, tokens, temperature=temperature, seeds=seeds, tau=tau, **options)
    for b, got in enumerate(trees_of(tree)):
        naive = rig.naive(torch.float64)
        g = naive.extend(rig.history[b][0].double(), rig.history[b][1])[-1]

        def noise(position, ids, seed=int(seeds[b])):
            return torch.from_numpy(gumbel(seed, position, 96))[ids]

        want = reference.draft_tree(
            naive, g, got["tokens"][0], num_nodes=20, top_k=4, levels=3,
            temperature=float(temperature[b]), tau=tau, noise=noise,
        )  # fmt: skip
        for part in ("tokens", "parents", "mask"):
            assert got[part] == want[part], (b, part)
        np.testing.assert_allclose(got["scores"], want["scores"], atol=1e-3)
    # Where the request is greedy, coupling and tau change nothing.
    (plain, *_) = trees_of(rig.draft_rows(features, tokens, again=True, **options))
    assert plain == trees_of(tree)[0]


@pytest.mark.unchecked  # a law of values
@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    ("dtype", "temperature", "top_k", "levels"),
    [
        (torch.float32, 0.0, 4, 4), (torch.float32, 1.0, 1, 8), (torch.float32, 0.6, 4, 4),
        (torch.float32, 1.0, 4, 4), (torch.float32, 1.5, 3, 5),
        (torch.bfloat16, 0.0, 4, 4), (torch.bfloat16, 1.0, 1, 8), (torch.bfloat16, 1.0, 4, 4),
    ],
)  # fmt: skip
def test_where_draft_and_target_agree_the_targets_choice_comes_first(dtype, temperature, top_k, levels):
    """With q = p and a vocabulary map that is not the identity, every level is accepted: seeds, positions and
    ids of the noise are those of the target. (A fault here would never show in a lossless test.) In bf16 the
    target is the fp64 head, so that one of nearly equal tokens may come first instead."""
    inexact = dtype != torch.float32
    differ = total = 0
    for seed in range(4):
        rig = Rig.random(HEADS[1], dtype, seed=seed)
        assert "d2t" in rig.tensors
        features, tokens = rig.fill([7 + seed])
        seeds = torch.tensor([1000 + seed])
        tree = rig.draft_rows(
            features, tokens, max_nodes=24, top_k=top_k, levels=levels,
            temperature=torch.tensor([temperature]), seeds=seeds,
        )  # fmt: skip
        (got,) = trees_of(tree)
        nodes, naive = len(got["tokens"]), rig.naive(torch.float64)
        output = {0: naive.extend(rig.history[0][0].double(), rig.history[0][1])[-1]}
        logits = torch.full((1, nodes, 96), float("-inf"))
        ids = naive.to_target(torch.arange(40))
        for node in range(nodes):
            if node:  # the head along this node's own path, run sequentially
                line = [i for i in range(nodes) if got["mask"][node][i] and i]
                fork = naive.fork()
                for i in line:
                    parent = output[got["parents"][i]]
                    at = fork.keys[0].shape[0]
                    visible = torch.ones(1, at + 1, dtype=torch.bool)
                    out = fork.forward(int32(got["tokens"][i]), parent[None], torch.tensor([at]), visible)
                output[node] = out[0]
            logits[0, node, ids] = naive.logits(output[node][None])[0].float()
        root_position = 7 + seed
        chosen = sample_tokens(
            logits, temperature=torch.tensor([temperature]), seeds=seeds,
            positions=int32(*(root_position + depth + 1 for depth in got["depths"]))[None],
        )  # fmt: skip
        places = int32(*(root_position + depth + 1 for depth in got["depths"]))
        score = logits[0] + temperature * gumbel_noise(seeds.expand(nodes).contiguous(), places, 96)
        inner = sorted(set(got["parents"]) - {-1})
        assert len(inner) >= levels - 1 if top_k == 1 else len(inner) > 1
        for node in inner:
            first, best = got["tokens"][int(tree.first_child[0, node])], int(chosen.tokens[0, node])
            total += 1
            differ += first != best
            assert first == best or (inexact and score[node, best] - score[node, first] < 0.1), (seed, node)
    assert differ <= 0.1 * total


# ---- cycles


def from_scratch(rig, **options):
    """The trees of the same requests in a batch whose caches have never held anything but their pairs."""
    fresh = Rig(rig.head, batch=rig.batch)
    features, tokens = ([pairs[i] for pairs in rig.history] for i in (0, 1))
    counts = [len(t) - 1 for t in tokens]
    fresh.extend(
        torch.cat([f[:-1] for f in features]), torch.cat([t[:-1] for t in tokens]), [0, *accumulate(counts)]
    )
    fresh.lengths += int32(*counts)
    last = torch.stack([f[-1] for f in features]), torch.stack([t[-1] for t in tokens])
    return trees_of(fresh.draft_rows(*last, **options))


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(HEADS[2], torch.float32, marks=pytest.mark.full),  # many launches
        checked_where(False, HEADS[0], torch.bfloat16),  # one
        checked_where(False, HEADS[2], torch.float16),
        pytest.param(  # many, two layers
            *(HEADS[5], torch.bfloat16), marks=[pytest.mark.full, pytest.mark.unchecked]
        ),
    ],
    ids=str,
)
def test_cycles_with_ragged_acceptance_equal_drafting_from_scratch(case, dtype):
    """The accepted pairs replace what the tree left in the cache, whatever was accepted."""
    random = np.random.default_rng(3)
    rig = Rig.random(case, dtype, batch=4, capacity=80, paged=4)
    features, tokens = rig.fill([4, 1, 9, 6])
    options = {"max_nodes": 12, "top_k": 3, "levels": 4}
    tree = rig.draft_rows(features, tokens, **options)
    lengths = set()
    for cycle in range(6):
        absent = cycle % 4  # one request sits out
        path, counts = torch.full((4, 5), -1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        for b in range(4):
            nodes = int(tree.num_nodes[b])
            walk = [0]
            while len(walk) < 5:
                children = [i for i in range(nodes) if int(tree.parents[b, i]) == walk[-1]]
                if not children or random.random() < 0.3:
                    break
                walk.append(int(random.choice(children)))
            path[b, : len(walk)] = int32(*walk)
            counts[b] = -1 if b == absent and cycle else len(walk) - 1
            lengths.add(int(counts[b]))
        features = rig.features(4, 12)
        targets = torch.from_numpy(random.integers(0, 96, (4, 12))).int()
        old = tree
        tree = rig.draft(features, targets, SimpleNamespace(path=path, num_accepted=counts), **options)
        for b, (got, want) in enumerate(zip(trees_of(tree), from_scratch(rig, **options))):
            if counts[b] < 0:
                assert got["tokens"] == []
            else:
                assert got == want, (cycle, b)
        for field, before in zip(tree, old):  # a request that sat out keeps its tree for the next walk
            if cycle:
                field[absent] = before[absent]
    assert lengths >= {-1, 0, 1, 2}
    assert max(lengths) >= 3


@pytest.mark.op("extend_draft")
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("case", "cuts"),
    [
        (HEADS[0], [0, 1, 2, 40, 297, 300]),
        (HEADS[3], [0, 1, 2, 40, 297, 300]),
        *(
            pytest.param(case, [0, 1, 2, 40, 296, 297, 555, 600], marks=pytest.mark.full)
            for case in HEADS[:4]
        ),
    ],
    ids=str,
)
def test_a_prompt_may_come_in_any_pieces(case, cuts):
    """Tiles end at 256 rows: of the whole prompt, and of a piece."""
    whole = Rig.random(case, torch.bfloat16, capacity=700)
    pieces = Rig.random(case, torch.bfloat16, capacity=700, paged=64)
    features, tokens = whole.pairs(cuts[-1])
    want = whole.prompt(0, features, tokens)
    got = [pieces.prompt(0, features[a:b], tokens[a:b]) for a, b in zip(cuts, cuts[1:])]
    assert torch.equal(torch.cat(got), want)


# ---- who else is in the batch


def row_invariance_cases():
    """(name, run(rows) -> outputs of these requests): a request's outputs must not depend on the others."""
    quantised = [("eagle3", {"draft_vocab": 40, "weights": weights}) for weights in ("int4", "int8_dynamic")]
    for case in HEADS + quantised:
        for dtype in (torch.float32, torch.bfloat16):

            def run(rows, case=case, dtype=dtype):
                rig = Rig.random(case, dtype, batch=len(rows))
                features, tokens = rig.fill([3 + 5 * row for row in rows], seeds=rows)
                heat = torch.tensor([0.0, 0.7, 1.0, 0.0, 1.4])[list(rows)]
                limit = int32(16, 3, 9, 16, 1)[list(rows)]
                tree = rig.draft_rows(
                    features, tokens, max_nodes=16, top_k=4, levels=4, temperature=heat,
                    seeds=torch.tensor(rows), node_limit=limit,
                )  # fmt: skip
                hidden = rig.extend(features, tokens, list(range(len(rows) + 1)))
                return [[field[b] for field in tree] + [hidden[b]] for b in range(len(rows))]

            yield f"draft {case} {dtype}", run


@pytest.mark.parametrize(
    ("name", "run"), list(row_invariance_cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_request_does_not_depend_on_the_others(name, run, one_and_two_threads):
    one, two = one_and_two_threads(lambda: run((0, 1, 2, 3, 4)))
    again, reordered = run((0, 1, 2, 3, 4)), run((4, 2, 0))
    alone = [run((row,))[0] for row in range(5)]
    for row in range(5):
        for got in (two[row], again[row], alone[row]):
            assert all(torch.equal(a, b) for a, b in zip(one[row], got)), row
    for place, row in enumerate((4, 2, 0)):
        assert all(torch.equal(a, b) for a, b in zip(one[row], reordered[place])), row


# ---- memory


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize("paged", [0, 1, 4, 16])
def test_nothing_is_written_outside_the_own_pages(paged):
    """Room ends in the middle of a level; other pages and the rows of other requests keep their bytes."""
    rig = Rig.random(HEADS[0], torch.float32, batch=2, capacity=16, paged=paged, spare=3)
    features, tokens = rig.fill([12, 4])
    before = [(k.clone(), v.clone()) for k, v, *_ in rig.caches]
    only_first = accepted(int32(0, -1))
    rig.draft(features[:, None], tokens[:, None], only_first, max_nodes=8, top_k=4, levels=4)
    for (k, v, *_), (old_k, old_v) in zip(rig.caches, before):
        for new, old in ((k, old_k), (v, old_v)):
            changed = (new != old).flatten(2).any(2)
            own = rig.rows_of(0)
            assert bool(changed[own[:, 0], own[:, 1]][12:].any())
            changed[own[:, 0], own[:, 1]] = False
            assert not bool(changed.any())


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize("length", [0, 15, 16, 17, 1000, -5, 2**31 - 1, -(2**31)])
def test_any_length_in_a_tensor_is_survived(length):
    rig = Rig.random(HEADS[0], torch.float32, batch=2, capacity=16, paged=4, spare=2)
    features, tokens = rig.fill([5, 5])
    want = trees_of(rig.draft_rows(features, tokens, max_nodes=8, top_k=3, levels=3))
    rig.before[0] = length
    got = trees_of(rig.draft_rows(features, tokens, again=True, max_nodes=8, top_k=3, levels=3))
    assert got[1] == want[1]
    rig.lengths[:] = int32(length, 4)
    rig.extend(features, tokens, [0, 1, 2])


@pytest.mark.op("draft", "extend_draft")
def test_garbage_inside_tensors_stays_inside():
    """Ids, paths, counts out of range, NaN features, NaN in dead rows: valid ids, the neighbour unharmed."""
    rig = Rig.random(HEADS[0], torch.float32, batch=2, capacity=32, paged=4, spare=2)
    features, tokens = rig.fill([5, 7])
    options = {"max_nodes": 8, "top_k": 3, "levels": 3}
    want = trees_of(rig.draft_rows(features, tokens, **options))[1]
    for k, v, *_ in rig.caches:
        own = torch.cat([rig.rows_of(0)[:4], rig.rows_of(1)[:6]])
        dead = torch.ones(k.shape[:2], dtype=torch.bool)
        dead[own[:, 0], own[:, 1]] = False
        k[dead], v[dead] = float("nan"), float("nan")
    assert trees_of(rig.draft_rows(features, tokens, again=True, **options))[1] == want
    for counts, path, token in [(50, 0, 3), (2, 10**9, -1), (1, -7, 2**31 - 1), (2**31 - 1, 3, -(2**31))]:
        where = SimpleNamespace(
            path=torch.tensor([[path] * 3, [0] * 3], dtype=torch.int32), num_accepted=int32(counts, 0)
        )
        both = torch.stack([torch.full((1,), token, dtype=torch.int32), tokens[1:]])
        tree = rig.draft(features[:, None], both, where, again=True, **options)
        assert trees_of(tree)[1] == want
        assert all(0 <= t < 96 for t in trees_of(tree)[0]["tokens"][1:])
    features[0] = float("nan")
    first, second = trees_of(rig.draft_rows(features, tokens, again=True, **options))
    assert second == want
    assert all(0 <= t < 96 for t in first["tokens"])


@pytest.mark.op("draft", "extend_draft")
def test_empty_batch_and_absent_requests():
    rig = Rig.random(HEADS[0], torch.float32, batch=2)
    none = torch.zeros(0, dtype=torch.int32)
    caches = [KVCache.empty(0, 8, rig.head.num_kv_heads, rig.head.head_dim)]
    nobody = SimpleNamespace(path=torch.zeros(0, 3, dtype=torch.int32), num_accepted=none)
    empty = torch.zeros(0, 1, rig.head.feature_size)
    tree = draft(rig.head, empty, none[:, None], nobody, none, caches, max_nodes=4, top_k=2, levels=2)
    assert tree.tokens.shape == (0, 4)
    extend_draft(rig.head, empty[:, 0], none, [0], none, caches)
    features, tokens = rig.fill([3, 3])
    everyone = trees_of(
        rig.draft(features[:, None], tokens[:, None], accepted(int32(-1, -1)), max_nodes=4, top_k=2, levels=2)
    )
    assert [tree["tokens"] for tree in everyone] == [[], []]


@pytest.mark.op("draft", "extend_draft")
def test_node_limits():
    rig = Rig.random(HEADS[1], torch.float32, batch=5)
    features, tokens = rig.fill([3, 4, 5, 6, 7])
    options = {"max_nodes": 9, "top_k": 3, "levels": 3}
    whole = trees_of(rig.draft_rows(features, tokens, **options))
    limited = rig.draft_rows(features, tokens, node_limit=int32(0, 1, 2, 9, 1000), again=True, **options)
    assert limited.num_nodes.tolist() == [0, 1, 2, 9, 9]
    assert trees_of(limited)[3:] == whole[3:]
    # A request without nodes still took its accepted rows into the cache.
    later = rig.draft_rows(*rig.next_rows(), **options)
    for b in range(5):
        alone = Rig(rig.head)
        known, follow = rig.history[b]
        alone.prompt(0, known[:-1], follow[:-1])
        assert trees_of(alone.draft_last(known[-1], follow[-1], **options)) == [trees_of(later)[b]]
