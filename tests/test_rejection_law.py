"""verify_rejection: every scheme emits the exact law, and rules that are nearly right do not."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from eagle_cuda.tree import tree_from_parents
from eagle_cuda.verify import verify_rejection
from reference import verify as naive
from rejection_cases import Chance, agreement

LEAF = ()
BUSH = ((), (LEAF, LEAF), (LEAF,))  # three children; two below the second, one below the third
CASES = [
    Chance("point_mass", BUSH, 4),
    Chance("coin_walk", BUSH, 4),
    Chance("sampled_tree", ((LEAF, LEAF), (LEAF,)), 4),
    Chance("chain", (((LEAF,),),), 3),
]
MORE = [
    Chance(scheme, shape, vocab, seed)
    for scheme, shape, vocab in [
        *((scheme, shape, vocab) for scheme in ("point_mass", "coin_walk") for shape, vocab in [
            ((LEAF,) * 3, 3),  # the children cover the support
            ((((LEAF,), LEAF),), 3),
            ((LEAF, (LEAF, LEAF, LEAF, LEAF), LEAF, LEAF), 5),
            ((LEAF,) * 5, 6),
        ]),
        ("sampled_tree", (LEAF,) * 3, 3),
        ("sampled_tree", (LEAF,) * 4, 6),
        ("sampled_tree", (LEAF, ((LEAF, LEAF), LEAF), LEAF), 4),
        ("chain", (LEAF,), 6),
        ("chain", ((((LEAF,),),),), 4),
    ]
    for seed in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_the_laws_are_the_target_s(case):
    """The enumeration itself: whatever has been emitted, the next token has the target's distribution."""
    law = case.law()
    assert sum(law.values()) == 1
    mass: dict[tuple[int, ...], Fraction] = {}
    for emitted, probability in law.items():
        for length in range(1, len(emitted) + 1):
            mass[emitted[:length]] = mass.get(emitted[:length], 0) + probability
    for prefix in {emitted[:-1] for emitted in mass}:
        rows = [mass.get((*prefix, token), Fraction(0)) for token in range(case.vocab)]
        assert [row / sum(rows) for row in rows] == case.target(prefix)


def check(case: Chance, draws: int) -> None:
    law = case.law()
    coins, noise = case.draw(draws, noise=False), case.draw(draws, noise=True)
    both = {key: coins.get(key, 0) + noise.get(key, 0) for key in {*coins, *noise}}
    for counts in (coins, noise, both):
        assert agreement(counts, law) > 1e-3
    assert {len(emitted) for emitted in both} == {len(emitted) for emitted in law}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emitted_sequences_have_the_exact_law(case):
    """A million requests, half with coins and half with noise."""
    check(case, 500_000)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_trees_have_the_exact_law(case):
    check(case, 500_000)


# ---- rules that are nearly right -----------------------------------------------------------------


class Given:
    """One node with given children, p and q."""

    def __init__(self, scheme: str, p: str, children: tuple[int, ...] = (), q: str = ""):
        self.scheme, self.children = scheme, children
        self.p, self.q = ([Fraction(x) for x in row.split()] for row in (p, q))

    def law(self, **options) -> dict[tuple[int, ...], float]:
        """Of the first token."""
        q = (lambda _: self.q) if self.q else None
        shape = ((),) * (len(self.children) or 2)
        chosen = (lambda _: list(self.children)) if self.children else None
        whole = naive.law(self.scheme, shape, lambda _: self.p, q, chosen=chosen, **options)
        found = [sum(x for key, x in whole.items() if key[0] == token) for token in range(len(self.p))]
        return [float(x) for x in found]


def test_wrong_rules_have_other_laws():
    """The numbers that are known of them: no renormalisation, no zeroing, p and q left as they are."""
    two = Given("point_mass", "5/10 3/10 2/10", (0, 1))
    assert two.law() == [0.5, 0.3, 0.2]
    assert two.law(wrong="not renormalised") == pytest.approx([0.5, 0.15, 0.35])
    assert two.law(wrong="not zeroed") == pytest.approx([0.675, 0.255, 0.07])
    both = Given("sampled_tree", "1/2 1/2", (0, 1), "9/10 1/10")
    assert both.law(wrong="unmodified p and q") == pytest.approx([5 / 9, 4 / 9])


WRONG = [
    (CASES[0], "not renormalised"),
    (CASES[0], "not zeroed"),
    (CASES[2], "unmodified p and q"),
]


@pytest.mark.parametrize(("case", "wrong"), WRONG, ids=lambda value: str(value)[:20])
def test_the_test_would_see_a_wrong_rule(case, wrong):
    """Draws of the right rule against the law of a wrong one: what the test of the law would say of it."""
    counts = case.draw(100_000, noise=True)
    assert agreement(counts, case.law()) > 1e-3
    assert agreement(counts, case.law(wrong=wrong)) < 1e-12


def test_a_coin_used_twice_is_seen():
    """p = (.5, .3, .2), one child: with its coin for the last draw too, .5 / .1 / .4 come out."""
    tree = tree_from_parents([[9, 0]] * 1000, [[-1, 0]] * 1000)
    p = torch.tensor([0.5, 0.3, 0.2]).expand(1000, 2, -1)
    coins = ((torch.arange(1000) + 0.5) / 1000)[:, None].repeat(1, 2)
    zeros = torch.zeros(1000, dtype=torch.int32)
    out = verify_rejection(
        tree, p, zeros, scheme="point_mass", coins=coins, final_coins=coins[:, 0].contiguous()
    )
    assert out.emitted[:, 0].bincount().tolist() == [500, 100, 400]
    case = Chance("point_mass", (LEAF,), 3)
    counts = case.draw(200_000, noise=False, reuse=True)
    assert agreement(counts, case.law()) < 1e-12
    assert agreement(case.draw(200_000, noise=False), case.law()) > 1e-3


@pytest.mark.parametrize("case", [CASES[2], CASES[3]], ids=str)
def test_drafts_drawn_by_the_target_s_noise(case):
    """The largest of log q + g are draws from q without replacement. Our noise for the tests is another than
    theirs: exact. With theirs for the tests too: biased."""
    law = case.law()
    assert agreement(case.draw(300_000, noise=True, coupled=True), law) > 1e-3
    assert agreement(case.draw(100_000, noise=False, coupled=True), law) < 1e-12


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_noise_is_new_at_every_position_and_seed(case):
    """One seed at many positions, and few values of either: no draw is another's."""
    draws = 20_000
    tree = tree_from_parents(torch.zeros(draws, 1, dtype=torch.int32), [[-1]] * draws)
    p = torch.tensor([0.25, 0.25, 0.5]).expand(draws, 1, -1)
    for seeds, positions in [
        (torch.zeros(draws).long(), torch.arange(draws)),
        (torch.arange(draws) % 100 - 50, torch.arange(draws) // 100),
    ]:
        draft = p if case.sampled else None
        out = verify_rejection(tree, p, positions.int(), scheme=case.scheme, seeds=seeds, draft_probs=draft)
        counts = {(t,): int((out.next_tokens == t).sum()) for t in range(3)}
        law = {(t,): Fraction(x, 4) for t, x in enumerate((1, 1, 2))}
        assert agreement(counts, law) > 1e-3
        again = out.next_tokens[:-1] == out.next_tokens[1:]
        assert abs(again.float().mean().item() - 0.375) < 0.02
