"""verify_rejection: against the plain walk in exact integers, to the bit; edges, hostile inputs, SGLang's
rules. The laws: tests/test_rejection_law.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_cuda.tree import empty_draft_tree, tree_from_parents
from eagle_cuda.verify import AcceptedByRejection, verify_rejection
from guarded import Guards
from reference import verify as naive

DATA = Path(__file__).parent / "data"
SCHEMES = ("point_mass", "coin_walk", "sampled_tree", "chain")
SAMPLED = ("sampled_tree", "chain")
LAST = 1 - 2.0**-24  # the largest coin
INF, NAN = math.inf, math.nan


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(values, batch: int, n: int, vocab: int, layout: str = "contiguous") -> torch.Tensor:
    """[B, N, V] of the values, apart from each other and not on 16-byte boundaries where asked."""
    data = torch.tensor(values, dtype=torch.float32).reshape(batch, n, vocab)
    if layout == "contiguous":
        return data
    space = torch.full((n, batch + 1, vocab + 5), NAN)  # batch inside, and elements that are nobody's
    view = space.transpose(0, 1)[:batch, :, 3 : 3 + vocab]
    view.copy_(data)
    return view


class Request:
    """One request as plain numbers, and what it must give."""

    def __init__(self, tokens, first, sibling, count, p, q, coins, final, *, seed, seq_len, stop, budget):
        self.tokens, self.first, self.sibling, self.count = tokens, first, sibling, count
        self.p, self.q, self.coins, self.final = p, q, coins, final
        self.seed, self.seq_len, self.stop, self.budget = seed, seq_len, stop, budget

    def expected(self, scheme, *, noise, max_path, single, acc, with_budget=True, with_stop=True):
        given_coins = {"seed": self.seed} if noise else {"coins": self.coins, "final_coin": self.final}
        source = naive.Coins(self.seq_len, **given_coins)
        q = self.q if scheme in SAMPLED else None
        return naive.verify_rejection(
            scheme, self.tokens, self.first, self.sibling, self.count, self.p, q, source,
            stop=self.stop if with_stop else (), budget=self.budget if with_budget else None,
            max_path=max_path, single=single, acc=acc,
        )  # fmt: skip


def check(
    requests: list[Request],
    n: int,
    vocab: int,
    scheme: str,
    *,
    noise=False,
    max_path=None,
    single=1.0,
    acc=1.0,
    layout="contiguous",
) -> AcceptedByRejection:
    """Runs the requests as one batch and compares every output, and the words around them, with the plain
    walk."""
    batch, max_path = len(requests), max_path or max(n, 1)
    guards = Guards()

    def column(name, *shape, dtype=torch.int32):
        return torch.tensor([getattr(r, name) for r in requests], dtype=dtype).reshape(batch, *shape)

    tree = empty_draft_tree(1, 1)._replace(
        tokens=column("tokens", n),
        first_child=column("first", n),
        next_sibling=column("sibling", n),
        num_nodes=column("count"),
    )
    wide, one = (batch, max_path), (batch,)
    out = AcceptedByRejection(*(guards.new(*shape) for shape in (wide, one, one, one, one, wide, one)))
    if noise:
        source = {"seeds": column("seed", dtype=torch.int64)}
    else:
        source = {"coins": column("coins", n, dtype=torch.float32)}
        source["final_coins"] = column("final", dtype=torch.float32)
    width = len(requests[0].stop) if requests else 2
    verify_rejection(
        tree,
        rows([r.p for r in requests], batch, n, vocab, layout),
        column("seq_len"),
        scheme=scheme,
        draft_probs=rows([r.q for r in requests], batch, n, vocab, layout) if scheme in SAMPLED else None,
        stop_tokens=column("stop", width),
        budget=column("budget"),
        threshold_single=single,
        threshold_acc=acc,
        out=out,
        **source,
    )
    guards.check()
    for b, request in enumerate(requests):
        path, *one, emitted, flags = request.expected(
            scheme, noise=noise, max_path=max_path, single=single, acc=acc
        )
        assert out.path[b].tolist() == path + [-1] * (max_path - len(path))
        assert out.emitted[b].tolist() == emitted + [-1] * (max_path - len(path))
        one[-1] = min(one[-1], 2**31 - 1)
        assert [t[b].item() for t in out[1:5]] == one
        assert out.flags[b].item() == flags
    return out


# ---- chance: any tree, any rows ------------------------------------------------------------------

# Zeros, ties, numbers far apart, denormals; and what is no probability.
PROBABILITIES = [0.0, 0.0, 0.25, 0.5, 1.0, 0.1, 0.3, 1e-3, 7.0, 2.0**-30, 1e-12, 1e-42, 3e38, -0.0]
ODD = [NAN, INF, -INF, -1.0]
COINS = [0.0, 0.0, 0.25, 0.5, 0.75, LAST, LAST, 2.0**-24, 0.3, 1e-9]
LINKS = [-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31 - 1]


def row_of(random: Random, vocab: int, odd: float) -> list[float]:
    if random.random() < 0.1:
        return [0.0] * vocab
    values = [
        random.choice(PROBABILITIES) if random.random() < 0.5 else random.random() for _ in range(vocab)
    ]
    if random.random() < odd:
        values[random.randrange(vocab)] = random.choice(ODD)
    return torch.tensor(values).tolist()  # as fp32 has them


def request_of(random: Random, n: int, vocab: int, *, odd=0.1, hostile=0.3) -> Request:
    tokens = [random.randrange(vocab) for _ in range(n)]
    if random.random() < hostile and n:
        first, sibling = ([random.choice(LINKS) for _ in range(n)] for _ in range(2))
        tokens[random.randrange(n)] = random.choice([-1, vocab, 2**31 - 1, -(2**31)])
        count = random.choice([-5, 0, 1, n, n + 1, 2**31 - 1])
    else:
        parents = [-1] + [random.randrange(max(0, i - 4), i) for i in range(1, n)]
        tree = tree_from_parents([tokens], [parents[:n]], [n])
        first, sibling, count = tree.first_child[0].tolist(), tree.next_sibling[0].tolist(), n
    p = [row_of(random, vocab, odd) for _ in range(n)]
    q = [row if random.random() < 0.2 else row_of(random, vocab, odd) for row in p]
    coins = [random.choice([*COINS, random.random(), NAN, -1.0, 2.0]) for _ in range(n + 1)]
    coins = torch.tensor(coins).tolist()
    budget = random.choice([-1, 0, 1, 2, 3, *[99] * 6, 2**31 - 1])
    return Request(
        tokens, first, sibling, count, p, q, coins[:n], coins[n], budget=budget,
        seed=random.randrange(-(2**63), 2**63), seq_len=random.choice([0, 7, 1000, 2**31 - 1, -(2**31)]),
        stop=[-1, random.randrange(-1, 2 * vocab)],
    )  # fmt: skip


@pytest.mark.op("verify_rejection")
@given(st.integers(0, 2**32), st.sampled_from(SCHEMES), st.booleans())
def test_any_request_equals_the_plain_walk(seed, scheme, noise):
    random = Random(seed)
    n, vocab = random.randint(1, 8), random.randint(1, 7)
    requests = [request_of(random, n, vocab) for _ in range(random.choice([0, 1, 16, 16]))]
    lossy = scheme == "coin_walk" and random.random() < 0.5
    thresholds = [random.choice([0.0, 1e-12, 0.1, 0.3, 0.999, 1.0]) if lossy else 1.0 for _ in range(2)]
    check(
        requests, n, vocab, scheme, noise=noise, max_path=random.choice([None, 1, 2, 9]),
        single=thresholds[0], acc=thresholds[1], layout=random.choice(["contiguous", "apart"]),
    )  # fmt: skip


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("vocab", [248, 249, 513, 2049])
@pytest.mark.parametrize("layout", ["contiguous", "apart"])
def test_vocabularies_around_the_sizes_of_blocks(vocab, layout):
    """Both kernels, ragged ends, rows on and off 16-byte boundaries."""
    random = Random(vocab)
    for scheme in SCHEMES:
        requests = []
        for _ in range(3):
            request = request_of(random, 5, vocab, hostile=0)
            request.budget = 99
            for i, token in enumerate(request.tokens[1:]):
                request.p[i // 2][token] = 64.0  # some are accepted
            requests.append(request)
        for noise in (False, True):
            check(requests, 5, vocab, scheme, noise=noise, layout=layout)


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_children(scheme):
    """As many nodes as there may be, all children of the root, the last one the only one with mass."""
    n, vocab = 40 if scheme == "sampled_tree" else 256, 300  # its rounds cost their square
    tokens = list(range(n))
    tree = tree_from_parents([tokens], [[-1] + [0] * (n - 1)])
    p = [[0.0] * (n - 1) + [1.0] + [0.0] * (vocab - n)] * n
    q = [[1.0] * vocab] * n
    links = tree.first_child[0].tolist(), tree.next_sibling[0].tolist()
    options = {"seed": 1, "seq_len": 0, "stop": [-1], "budget": 99}
    request = Request(tokens, *links, n, p, q, [LAST] * n, LAST, **options)
    out = check([request], n, vocab, scheme)
    assert out.emitted[0].tolist()[0] == n - 1
    assert out.num_accepted.tolist() == [0 if scheme == "chain" else 1]


# ---- edges ---------------------------------------------------------------------------------------


def one(scheme, p, children, *, coin, final, q=None, **options) -> AcceptedByRejection:
    """A root with the children, all coins alike."""
    n = len(children) + 1
    tree = tree_from_parents([[0, *children]], [[-1] + [0] * len(children)])
    draft = torch.tensor([[q or p] * n]) if scheme in SAMPLED else None
    return verify_rejection(
        tree, torch.tensor([[p] * n]), int32([5]), scheme=scheme, draft_probs=draft,
        coins=torch.full((1, n), coin), final_coins=torch.tensor([final]), max_path=1, **options,
    )  # fmt: skip


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_coin_of_zero_accepts_nothing_impossible(scheme):
    q = [0.25] * 4
    out = one(scheme, [0.0, 1.0, 0.0, 0.0], [2], coin=0.0, final=0.0, q=q)
    assert (out.next_tokens.item(), out.flags.item()) == (1, 0)
    for final in (0.0, 0.25, LAST):  # the ends of the last draw: never a token without mass
        out = one(scheme, [0.0, 0.25, 0.75, 0.0], [3], coin=0.0, final=final, q=[0.0, 0.0, 0.5, 0.5])
        boundary = 0.5 if scheme in SAMPLED else 0.25  # what is left of p: [0, .5, .5, 0]; [0, .25, .75, 0]
        assert out.next_tokens.item() == (1 if final < boundary else 2)


@pytest.mark.op("verify_rejection")
def test_boundaries_are_half_open():
    for scheme in ("point_mass", "coin_walk"):
        assert one(scheme, [0.25, 0.75, 0.0, 0.0], [3], coin=0.0, final=0.25).next_tokens.item() == 1
        for coin, token in ((0.25, 1), (0.25 - 2.0**-24, 0)):  # u < .25 passes
            assert one(scheme, [0.25, 0.75], [0], coin=coin, final=0.0).next_tokens.item() == token
    for coin, token in ((0.5, 1), (0.5 - 2.0**-24, 0)):  # p / q = .5
        out = one("chain", [0.25, 0.75], [0], coin=coin, final=0.0, q=[0.5, 0.5])
        assert out.next_tokens.item() == token


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 1, 0]])
def test_children_that_cover_the_support(order):
    """Whatever the coins: the last one that has mass passes, nothing is divided by nothing."""
    for coin in (0.0, 0.5, LAST):
        for p in ([0.5, 0.3, 0.2], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]):
            for scheme in ("point_mass", "coin_walk"):
                out = one(scheme, p, order, coin=coin, final=LAST)
                assert p[out.next_tokens.item()] > 0
                assert out.flags.item() == 0
            out = one("sampled_tree", p, order, coin=coin, final=LAST, q=[0.3, 0.3, 0.4])
            assert p[out.next_tokens.item()] > 0
    assert (
        one("sampled_tree", [0.5, 0.3, 0.2], [2, 0], coin=LAST, final=LAST).next_tokens.item() == 2
    )  # q = p


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_without_probabilities(scheme):
    q = [0.25] * 4
    for row, token, flags in [
        ([0.0] * 4, 0, 2),
        ([NAN] * 4, 0, 3),
        ([-1.0, -INF, NAN, INF], 0, 3),
        ([NAN, 0.0, 1e-45, -0.0], 2, 1),  # the smallest denormal is all there is
        ([-0.0, 0.0, 0.0, 3e38], 3, 0),
    ]:
        for coin in (0.0, LAST):
            out = one(scheme, row, [1], coin=coin, final=coin, q=q)
            assert (out.next_tokens.item(), out.flags.item()) == (token, flags)


@pytest.mark.op("verify_rejection")
def test_impossible_and_repeated_children_are_passed_over():
    p = [0.0, 0.5, 0.5]
    for scheme in ("point_mass", "coin_walk"):
        out = one(scheme, p, [-1, 7, 2**31 - 1, 1, 1, 1], coin=LAST, final=0.0)
        assert (out.next_tokens.item(), out.flags.item()) == (2, 4)
        out = one(scheme, p, [1, 1, 1], coin=0.75, final=0.0)  # a repeat is no second chance
        assert (out.next_tokens.item(), out.flags.item()) == (2, 0)
    out = one("sampled_tree", p, [1, 1], coin=0.75, final=0.0, q=[0.0, 1.0, 0.0])
    assert (out.next_tokens.item(), out.flags.item()) == (2, 4)
    out = one("sampled_tree", p, [1], coin=0.0, final=0.0, q=[0.5, 0.0, 0.5])  # q cannot have drawn it
    assert (out.next_tokens.item(), out.flags.item()) == (1, 4)
    out = one("chain", p, [1], coin=0.0, final=0.75, q=[0.0, 0.0, 0.0])
    assert (out.next_tokens.item(), out.flags.item()) == (2, 4)


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_limits_cut_what_is_emitted_and_choose_nothing(scheme):
    """With any budget or width the tokens are the first of those without; a stop token ends them."""
    chain = tree_from_parents([[0, 1, 2, 3, 0]], [[-1, 0, 1, 2, 3]])
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(1, 5, 4, generator=generator)
    p[0, torch.arange(4), chain.tokens[0, 1:].long()] += 9
    options = {"scheme": scheme, "draft_probs": p if scheme in SAMPLED else None, "seeds": torch.tensor([6])}
    whole = verify_rejection(chain, p, int32([7]), **options)
    emitted = [t for t in whole.emitted[0].tolist() if t >= 0]
    assert len(emitted) >= 4
    for limit in range(1, 7):
        kept = emitted[:limit]
        out = verify_rejection(chain, p, int32([7]), budget=int32([limit]), **options)
        assert [t for t in out.emitted[0].tolist() if t >= 0] == kept
        assert out.next_tokens.item() == kept[-1]
        assert out.num_accepted.item() == len(kept) - 1
        assert out.new_seq_lens.item() == 7 + len(kept)
        assert out.finished.item() == (2 if limit <= len(emitted) else 0)
        narrow = verify_rejection(chain, p, int32([7]), max_path=limit, **options)
        assert [t for t in narrow.emitted[0].tolist() if t >= 0] == kept
        assert narrow.finished.item() == 0
    stopped = verify_rejection(chain, p, int32([7]), stop_tokens=int32([[-1, emitted[1]]]), **options)
    length = emitted.index(emitted[1]) + 1
    assert stopped.emitted[0].tolist() == emitted[:length] + [-1] * (5 - length)
    assert (stopped.finished.item(), stopped.num_accepted.item()) == (1, length - 1)


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_absent_requests_read_no_row(scheme):
    tree = tree_from_parents([[1], [1], [1]], [[-1]] * 3, [0, 1, 0])
    p = torch.full((3, 1, 5), NAN)
    out = verify_rejection(
        tree, p, int32([7, 8, 9]), scheme=scheme, draft_probs=p if scheme in SAMPLED else None,
        seeds=torch.zeros(3).long(), budget=int32([4, 0, 0]),
    )  # fmt: skip
    assert out.num_accepted.tolist() == [-1] * 3
    assert out.finished.tolist() == [0, 2, 0]
    assert out.next_tokens.tolist() == [0] * 3
    assert out.new_seq_lens.tolist() == [7, 8, 9]
    assert out.flags.tolist() == [0] * 3
    assert out.path.tolist() == out.emitted.tolist() == [[-1]] * 3


# ---- SGLang's rules ------------------------------------------------------------------------------


def sglang_tree():
    case = json.loads((DATA / "sglang_tree.json").read_text())["verify"]
    links = case["inputs"]
    tree = empty_draft_tree(2, 6)._replace(
        tokens=int32(links["candidates"]),
        first_child=int32(links["next_token"]),
        next_sibling=int32(links["next_sibling"]),
        num_nodes=int32([6, 6]),
    )
    logits = torch.full((2, 6, 20), 1.0)
    logits[0, 0, 3] = logits[0, 3, 4] = logits[0, 4, 5] = logits[1, 0, 11] = logits[1, 4, 12] = 10
    logits[..., 18] += (logits.max(-1).values == 1) * 9
    return tree, logits, case["expected"]


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", ["coin_walk", "point_mass"])
def test_sglang_vector(scheme):
    """At a temperature near 0 there is one choice, whatever the coins."""
    tree, logits, expected = sglang_tree()
    p = (logits / 0.01).softmax(-1)
    for coin in (0.0, 0.5, LAST):
        coins = {"coins": torch.full((2, 6), coin), "final_coins": torch.full((2,), coin)}
        out = verify_rejection(tree, p, int32([5, 9]), scheme=scheme, max_path=4, **coins)
        assert out.num_accepted.tolist() == expected["accept_token_num"]
        globally = [[i + b * 6 if i >= 0 else -1 for i in row] for b, row in enumerate(out.path.tolist())]
        assert globally == expected["accept_index"]
        for path, emitted in zip(globally, out.emitted.tolist()):
            assert [expected["predicts"][i] for i in path if i >= 0] == [t for t in emitted if t >= 0]


@pytest.mark.op("verify_rejection")
def test_thresholds_below_one():
    """0 and 0 accept the first child that has any mass; a threshold works at its value, not below it."""
    tree, logits, _ = sglang_tree()
    coins = {"coins": torch.full((2, 6), LAST), "final_coins": torch.zeros(2)}
    out = verify_rejection(tree, logits.softmax(-1), int32([5, 9]), scheme="coin_walk", max_path=4,
                           threshold_single=0.0, threshold_acc=0.0, **coins)  # fmt: skip
    assert out.path.tolist() == [[0, 1, 2, -1], [0, 4, 5, -1]]
    assert one("coin_walk", [0.0, 1.0], [0], coin=0.0, final=0.0, threshold_single=0.0,
               threshold_acc=0.0).next_tokens.item() == 1  # fmt: skip
    p = [0.25, 0.5, 0.25]
    for single, token in ((0.5, 1), (0.5 + 2.0**-40, 2)):
        found = one("coin_walk", p, [1], coin=0.75, final=0.75, threshold_single=single)
        assert found.next_tokens.item() == token
    for acc, token in ((0.5, 1), (0.75, 2)):  # .25 / .5 > .49; .25 / .75 < .49
        found = one("coin_walk", [0.5, 0.25, 0.25], [1], coin=0.49, final=0.75, threshold_acc=acc)
        assert found.next_tokens.item() == token


# ---- the call ------------------------------------------------------------------------------------


@pytest.mark.op("verify_rejection")
def test_seq_lens_may_be_updated_in_place_and_numpy_works():
    tree = tree_from_parents([[1, 2]], [[-1, 0]])
    p, seq_lens = torch.tensor([[[0.0, 0.0, 1.0]] * 2]), int32([5])
    wide, single = (1, 2), (1,)
    shapes = (wide, single, single, single, wide, single)
    path, accepted, token, finished, emitted, flags = (torch.empty(s, dtype=torch.int32) for s in shapes)
    out = AcceptedByRejection(path, accepted, token, finished, seq_lens, emitted, flags)
    verify_rejection(tree, p, seq_lens, scheme="point_mass", seeds=torch.tensor([1]), out=out)
    assert seq_lens.tolist() == [7]
    arrays = type(tree)(*(t.numpy() for t in tree))
    found = verify_rejection(
        arrays, p.numpy(), np.array([5], np.int32), scheme="coin_walk", seeds=np.array([1], np.int64)
    )
    assert isinstance(found.emitted, np.ndarray)
    assert found.new_seq_lens.tolist() == [7]


def test_refuses_wrong_arguments():
    tree = tree_from_parents([[1, 2], [1, 2]], [[-1, 0], [-1, 0]])
    p, lens = torch.rand(2, 2, 5), int32([5, 6])
    good = {"scheme": "coin_walk", "seeds": torch.zeros(2).long()}
    coins = {"coins": torch.rand(2, 2), "final_coins": torch.rand(2)}
    verify_rejection(tree, p, lens, **good)
    for message, options in {
        'scheme: expected "point_mass", "coin_walk", "sampled_tree" or "chain", got "greedy"': {
            "scheme": "greedy"
        },
        "draft_probs: expected a tensor, got None": {"scheme": "chain"},
        "draft_probs: expected None where children were not sampled": {"draft_probs": p},
        r"draft_probs: expected shape \[2, 2, 5\], got \[2, 2, 4\]": {
            "scheme": "chain",
            "draft_probs": p[..., 1:],
        },
        "seeds: expected either seeds or coins and final_coins, got both": coins,
        "seeds: expected either seeds or coins and final_coins, got neither": {"seeds": None},
        "final_coins: expected to come with coins": {"seeds": None, "coins": coins["coins"]},
        "seeds: expected dtype int64": {"seeds": lens},
        r"coins: expected shape \[2, 2\], got \[2, 3\]": {**coins, "seeds": None, "coins": torch.rand(2, 3)},
        "threshold_single: expected 0 to 1, got -0.5": {"threshold_single": -0.5},
        "threshold_acc: expected 0 to 1, got nan": {"threshold_acc": NAN},
        'threshold_acc: expected 1 .off., which alone is exact, unless scheme is "coin_walk"; got 0.9': {
            "scheme": "point_mass",
            "threshold_acc": 0.9,
        },
        "max_path: expected at least 1, got 0": {"max_path": 0},
        r"budget: expected shape \[2\]": {"budget": int32([1])},
        r"stop_tokens: expected shape \[2, -1\]": {"stop_tokens": lens},
    }.items():
        with pytest.raises(ValueError, match=message):
            verify_rejection(tree, p, lens, **{**good, **options})
    for message, probs in {
        "target_probs: expected dtype float32, got float16": p.half(),
        r"target_probs: expected shape \[2, 2, -1\], got \[2, 3, 5\]": torch.rand(2, 3, 5),
        "target_probs: expected a vocabulary of at least 1": torch.rand(2, 2, 0),
        "target_probs: expected the last dimension to be contiguous": torch.rand(2, 2, 10)[..., ::2],
    }.items():
        with pytest.raises(ValueError, match=message):
            verify_rejection(tree, probs, lens, **good)
    large = tree_from_parents([list(range(256))], [[-1] + [0] * 255])
    large = large._replace(
        **{k: torch.zeros(1, 257).int() for k in ("tokens", "first_child", "next_sibling")}
    )
    with pytest.raises(ValueError, match="max_nodes: expected 0 to 256, got 257"):
        verify_rejection(
            large, torch.rand(1, 257, 3), int32([5]), scheme="coin_walk", seeds=torch.tensor([1])
        )


@pytest.mark.op("verify_rejection")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_row_invariance(scheme, one_and_two_threads):
    generator = torch.Generator().manual_seed(5)
    batch, n, vocab = 60, 9, 40
    parents = [
        [-1] + [int(torch.randint(max(0, i - 3), i, (1,), generator=generator)) for i in range(1, n)]
        for _ in range(batch)
    ]
    tree = tree_from_parents(torch.randint(0, 6, (batch, n), generator=generator), parents)
    p = torch.rand(batch, n, vocab, generator=generator)
    p[..., :6] *= 30
    lens, seeds = torch.arange(batch).int(), torch.arange(batch)

    def run(chosen):
        part = type(tree)(*(t[chosen] for t in tree))
        draft = p[chosen] if scheme in SAMPLED else None
        draft = None if draft is None else draft.roll(1, 2)
        return list(
            verify_rejection(
                part, p[chosen], lens[chosen], scheme=scheme, draft_probs=draft, seeds=seeds[chosen]
            )
        )

    together, with_two_threads = one_and_two_threads(lambda: run(list(range(batch))))
    assert len(set(together[1].tolist())) > 2
    for a, b in zip(together, with_two_threads):
        assert torch.equal(a, b)
    for i in range(0, batch, 7):
        for whole, alone in zip(together, run([i])):
            assert torch.equal(whole[i : i + 1], alone)
