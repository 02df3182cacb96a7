"""How much of the target's noise ranks a draft's candidates (docs/coupled_drafting.md): per request, from
none to all, and never to be seen in what comes out."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import eagle_decode.drafting
from eagle_decode import Engine, HeadDrafter, SamplingParams
from eagle_decode.drafting import default_coupling
from random_requests import outcome
from tiny_models import tiny_head, tiny_target

VOCAB = 24
TREE = {"levels": 3, "draft_top_k": 4, "max_nodes": 16, "max_length": 200}
COUPLINGS = (None, 0.0, 0.35, 0.8, 1.0, 1)


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB, num_heads=3)


@pytest.fixture(scope="module")
def head(target):
    return tiny_head("eagle3", target, draft_vocab=VOCAB - 4)


def mixed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all temperatures and truncations, which end at different times."""
    random = np.random.default_rng(2)
    limits = [{}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 6}, {"top_k": -1}]
    sampling = [
        SamplingParams(
            temperature=[1.0, 0.0, 0.3, 1.5, 0.7][i % 5], seed=i, max_new_tokens=12 + 7 * (i % 4),
            logprobs=True, **limits[(i + i // 5) % 5],
        )
        for i in range(count)
    ]  # fmt: skip
    return [random.integers(VOCAB, size=1 + 2 * i).tolist() for i in range(count)], sampling


class Spy:
    """Stands for the op `draft`: what it was given, and the trees that it gave."""

    def __init__(self, monkeypatch, **instead) -> None:
        self.temperatures: list[list[float]] = []
        self.trees: list[list[list]] = []

        def spied(*arguments, **options):
            self.temperatures.append(options["temperature"].tolist())
            tree = draft(*arguments, **(options | instead))
            self.trees.append([tensor.tolist() for tensor in tree])
            return tree

        draft = eagle_decode.drafting.draft
        monkeypatch.setattr(eagle_decode.drafting, "draft", spied)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_it_never_shows_in_what_comes_out(target, head, coupling):
    prompts, sampling = mixed(10)
    plain = Engine(target, max_length=200).generate(prompts, sampling)
    engine = Engine(target, head, max_batch=3, coupling=coupling, **TREE)
    assert [outcome(r) for r in engine.generate(prompts, sampling)] == [outcome(r) for r in plain]
    assert engine.metrics.accepted_tokens > 20


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_it_reaches_the_draft_of_each_request(target, head, coupling, monkeypatch):
    """Whatever its neighbours are, and whichever row it moves to."""
    prompts, sampling = mixed(10)
    spy, rows = Spy(monkeypatch), []

    def observe(batch, passed, tree, logits) -> None:
        if batch.requests[passed][0].tokens:
            rows.append([request.index for request in batch.requests])

    engine = Engine(target, head, max_batch=4, coupling=coupling, observer=observe, **TREE)
    engine.generate(prompts, sampling)

    def expected(index: int) -> float:
        params = sampling[index]
        share = default_coupling(params) if coupling is None else coupling
        return float(np.float32(share * params.temperature))

    rows = rows[: len(spy.temperatures)]  # a cycle in which nothing is drafted ends every request
    assert spy.temperatures == [[expected(index) for index in row] for row in rows]
    assert {index for row in rows for index in row} == set(range(10))
    assert any(len(before) > len(after) and before[-1] in after for before, after in zip(rows, rows[1:]))


def test_it_is_decided_once_per_request(target, head, monkeypatch):
    asked = []
    monkeypatch.setattr(eagle_decode.drafting, "default_coupling", lambda params: asked.append(params) or 0.5)
    prompts, sampling = mixed(3)
    Engine(target, head, max_batch=3, **TREE).generate(prompts, sampling)
    assert [params.seed for params in asked[:3]] == [0, 1, 2]
    assert len(asked) <= 3 + 2  # and where a row moved


def test_none_of_it_is_the_usual_draft(target, head, monkeypatch):
    """By draft probability alone: the op's own trees without a temperature, bit for bit."""
    prompts, sampling = mixed(10)

    def trees(coupling: float, **instead) -> list:
        with monkeypatch.context() as patch:
            spy = Spy(patch, **instead)
            Engine(target, head, max_batch=4, coupling=coupling, tau=1.3, **TREE).generate(prompts, sampling)
        return spy.trees

    usual = trees(1.0, temperature=None, seeds=None)
    assert trees(0.0) == usual
    assert trees(0.01) != usual


def test_defaults():
    for usual in ({}, {"top_k": 0}, {"top_k": -1}, {"top_p": 0.9}, {"banned_tokens": 3}):
        assert default_coupling(SamplingParams(temperature=1.0, **usual)) == 0.8
    for truncated in ({"top_k": 1}, {"min_p": 0.01}, {"top_k": 40, "top_p": 0.95}):
        assert default_coupling(SamplingParams(temperature=1.0, **truncated)) == 0.6


@pytest.mark.parametrize(
    "value", [math.nan, -0.001, 1.001, math.inf, -math.inf, True, False, "1", [1.0], torch.tensor(0.5)]
)
def test_no_share_of_the_noise_is_refused(target, head, value):
    message = "^coupling: expected a number from 0 to 1, or None, got "
    with pytest.raises(ValueError, match=message):
        Engine(target, coupling=value)
    with pytest.raises(ValueError, match=message):
        HeadDrafter(
            head, dtype=torch.float32, device=target.device, capacity=1, max_length=9, levels=1, top_k=1,
            max_nodes=2, coupling=value,
        )  # fmt: skip


def test_any_kind_of_number_is_a_share(target, head):
    for value in (np.float32(0.5), Fraction(1, 2)):
        engines = [Engine(target, head, coupling=c, **TREE) for c in (value, 0.5)]
        sampling = SamplingParams(temperature=1.0, seed=1, max_new_tokens=8)
        results = [engine.generate([[1]], sampling)[0] for engine in engines]
        assert results[0].metrics.accepted_tokens == results[1].metrics.accepted_tokens
    with pytest.raises(ValueError, match="^tau: expected a finite number > 0, got True"):
        Engine(target, head, tau=True)
