"""Edges of lengths and of sampling, through trees: speculative decoding does what plain decoding does, errors
included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_cuda.tree import TreeShape
from eagle_decode import Engine, SamplingParams
from oracle_drafter import ChainOfTruth, OracleDrafter
from random_requests import outcome
from scripted_target import ScriptedTarget
from tiny_models import ByteTokenizer, tiny_head, tiny_target

VOCAB = 40


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB, num_heads=3)


def with_oracle(target, prompts, sampling, *, max_length):
    """Results of plain decoding, one request at a time, and of trees that hide its continuation, beyond the
    end of the context too; and the engine of those."""

    def alone(length: int) -> list:
        engine = Engine(target, max_batch=1, max_length=length)
        pairs = zip(prompts, sampling, strict=True)
        return [engine.generate(prompt, params, speculate=False)[0] for prompt, params in pairs]

    beyond = {i: result.tokens for i, result in enumerate(alone(max_length + 10))}
    drafter = OracleDrafter(beyond, levels=5, max_nodes=20, vocab_size=VOCAB, seed=1)
    engine = Engine(target, draft=drafter, max_batch=3, max_length=max_length)
    return alone(max_length), engine.generate(prompts, sampling), engine


# ---- lengths


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_context_ends_in_the_middle_of_a_tree(target, temperature):
    """K2: trees reach beyond the last position; output ends there, as in plain decoding, to the token."""
    length = 48
    prompts = [[i % VOCAB for i in range(size)] for size in (1, 2, 30, 43, 44, 45, 46, 47)]
    sampling = [
        SamplingParams(temperature=temperature, seed=i, max_new_tokens=None, logprobs=True, top_logprobs=3)
        for i in range(len(prompts))
    ]
    plain, speculative, engine = with_oracle(target, prompts, sampling, max_length=length)
    assert [outcome(result) for result in speculative] == [outcome(result) for result in plain]
    for prompt, result in zip(prompts, plain, strict=True):
        assert (len(result.tokens), result.finish_reason) == (length - len(prompt), "length")

    cut = []  # paths that the target would have gone on along

    def observe(batch, rows, tree, logits):
        for row, request in enumerate(batch.requests[rows]):
            last = batch.path[rows][row, : int(batch.num_accepted[rows][row]) + 1][-1]
            child = int(tree.first_child[row, last])
            while child >= 0 and tree.tokens[row, child] != batch.sampled.tokens[rows][row, last]:
                child = int(tree.next_sibling[row, child])
            cut.append(child >= 0)
            assert batch.num_accepted[rows][row] < request.remaining

    engine.observer = observe
    again = engine.generate(prompts, sampling)
    assert [outcome(result) for result in again] == [outcome(result) for result in plain]
    assert sum(cut) >= 4
    tree = {"levels": 5, "draft_top_k": 4, "max_nodes": 30}
    real = Engine(target, tiny_head("eagle3", target), max_batch=3, max_length=length, **tree)
    assert [outcome(r) for r in real.generate(prompts, sampling)] == [outcome(r) for r in plain]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_static_tree_is_whole_until_the_budget_cuts_it(target, kind):
    """Levels that no request can emit any more are not grown; of the rest every node is proposed, and of a
    request with less left no more nodes than it could emit."""
    shape = TreeShape([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 0, 0)])
    engine = Engine(target, tiny_head(kind, target), tree_shape=shape, max_batch=2)
    assert (engine.drafter.levels, engine.drafter.max_nodes) == (4, 9)
    prompts, sampling = [[3, 1, 4, 1, 5], [9, 2]], [SamplingParams(max_new_tokens=n) for n in (12, 9)]
    seen = []

    def observe(batch, rows, tree, logits):
        if batch.requests[rows.start].tokens:  # not a prompt
            left = [request.remaining for request in batch.requests[rows]]
            seen.append((left, tree.num_nodes.tolist(), tree.depths.max(1).values.tolist()))

    engine.observer = observe
    tokens = [result.tokens for result in engine.generate(prompts, sampling)]
    assert tokens == [result.tokens for result in engine.generate(prompts, sampling, speculate=False)]
    cuts = set()
    for left, nodes, depths in seen:
        for most, count, depth in zip(left, nodes, depths, strict=True):
            if count == 1:
                continue  # decoded plainly
            levels = min(4, most - 1)
            assert count == 1 + shape.nodes_within(levels)
            if most == max(left):
                assert depth == levels
                cuts.add(levels)
    assert cuts == {1, 2, 3, 4}


def test_a_stop_where_the_context_ends(target):
    """The last token that fits is a stop token: a stop, not a length; and one later: a length."""
    prompt = [1, 2, 3]
    whole = Engine(target).generate(prompt, SamplingParams(temperature=1.0, max_new_tokens=40))[0].tokens
    at = next(i for i in range(12, 40) if whole[i] not in whole[:i])
    for length, reason in [(len(prompt) + at + 1, "stop"), (len(prompt) + at, "length")]:
        params = SamplingParams(temperature=1.0, max_new_tokens=None, stop_token_ids=whole[at])
        plain, speculative, _ = with_oracle(target, [prompt], [params], max_length=length)
        assert outcome(plain[0]) == outcome(speculative[0])
        assert plain[0].finish_reason == reason
        assert plain[0].tokens == whole[: length - len(prompt)]


class Constant(ScriptedTarget):
    """Whatever was said, the same logits."""

    def __init__(self, row, **options):
        super().__init__({1: [0] * 99}, vocab_size=len(row), **options)
        self.row = torch.tensor(row)

    def forward(self, tokens, **options):
        output = super().forward(tokens, **options)
        output.logits[:] = self.row
        return output

    def prefill(self, tokens, **options):
        self._scripts = {1: self.expected}
        return super().prefill(tokens, **options)


@pytest.mark.parametrize("least", range(8))
def test_stop_tokens_in_a_tree_before_the_shortest_length(least):
    """The target would say a stop token at every node: of the tree, those at early depths may not."""
    target = Constant([0.0, 0.0, 9.0, 0.0, 8.0], eos=[2, 3])
    target.expected = [4] * least + [2]
    drafter = ChainOfTruth([*target.expected, 2, 2], levels=5)
    engine = Engine(target, draft=drafter, max_length=100)
    for speculate in (False, True):
        result = engine.generate([1], SamplingParams(min_new_tokens=least), speculate=speculate)[0]
        assert (result.tokens, result.finish_reason, result.stop_reason) == (target.expected, "stop", 2)
    ignoring = SamplingParams(min_new_tokens=least, ignore_eos=True, max_new_tokens=9)
    target.expected = [2] * 9
    assert engine.generate([1], ignoring)[0].tokens == [2] * 9


# ---- sampling

LIMITS = {
    "top_k 1": ({"top_k": 1}, "greedy"),
    "top_p near 0": ({"top_p": 1e-9}, "greedy"),
    "top_p that rounds to 0": ({"top_p": 1e-50}, "greedy"),
    "min_p 1": ({"min_p": 1}, "greedy"),
    "min_p near 1": ({"min_p": 0.9999999999}, "greedy"),
    "temperature below 1e-5": ({"temperature": 9.9e-6}, "greedy"),
    "temperature near 0": ({"temperature": 1e-4}, "greedy"),
    "top_p 1": ({"top_p": 1.0}, "sampled"),
    "min_p 0": ({"min_p": 0.0}, "sampled"),
    "min_p that rounds to 0": ({"min_p": 1e-300}, "sampled"),
    "top_k of all": ({"top_k": VOCAB}, "sampled"),
    "top_k beyond": ({"top_k": 2**31 - 1}, "sampled"),
    "top_k off": ({"top_k": -1}, "sampled"),
}


def test_limits_of_the_ranges(target):
    """Each in a tree, among the others: the ends of the ranges are what their middle tends to."""
    prompt = [3, 1, 4]
    sampling = [
        SamplingParams(**{"temperature": 0.8, "seed": 5, "max_new_tokens": 30, "logprobs": True} | options)
        for options, _ in LIMITS.values()
    ]
    plain, speculative, engine = with_oracle(target, [prompt] * len(sampling), sampling, max_length=100)
    wanted = {
        "greedy": Engine(target).generate(prompt, SamplingParams(max_new_tokens=30, logprobs=True))[0],
        "sampled": Engine(target).generate(
            prompt, SamplingParams(temperature=0.8, seed=5, max_new_tokens=30, logprobs=True)
        )[0],
    }
    assert wanted["greedy"].tokens != wanted["sampled"].tokens
    for (name, (_, kind)), one, other in zip(LIMITS.items(), plain, speculative, strict=True):
        assert outcome(one) == outcome(wanted[kind]), name
        assert outcome(other) == outcome(one), name
    assert engine.metrics.accepted_tokens > 100


def ends_after(count: int):
    def mask(tokens: list[int], words: np.ndarray) -> None:
        if len(tokens) >= count:
            words[:] = 0

    return mask


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"logits_mask": ends_after(9)},
        {"logits_mask": ends_after(9), "banned_tokens": range(0, VOCAB, 2), "logit_bias": {5: 3.0}},
        {"logits_mask": ends_after(9), "allowed_tokens": range(9), "logit_bias": {5: float("-inf")}},
    ],
    ids=["mask", "mask and bans", "mask and bias"],
)
def test_where_nothing_is_allowed_is_the_same_place(target, options, temperature):
    """However deep in a tree it was found."""
    prompt = [1, 2]
    params = SamplingParams(temperature=temperature, seed=2, max_new_tokens=20, **options)
    engine = Engine(target)
    (plain,) = engine.generate(prompt, params)
    assert (len(plain.tokens), plain.finish_reason) == (9, "error")
    assert plain.error.startswith("request 0: no token is left at position 11: ")
    for levels in (1, 3, 6):
        drafter = OracleDrafter(
            {0: [*plain.tokens, *[0] * 20]}, levels=levels, max_nodes=2 * levels + 2, vocab_size=VOCAB
        )
        for speculate in (False, True):
            (result,) = Engine(target, draft=drafter).generate(prompt, params, speculate=speculate)
            assert outcome(result) == outcome(plain)


@pytest.mark.parametrize("cause", ["mask", "NaN"])
def test_what_lies_behind_a_stop_string_is_no_error(cause):
    """A tree looks further than plain decoding: what it finds there must not matter."""
    script = list(b"abcdefghijkl")
    for count in range(4, 9):  # numbers and allowed tokens end so many tokens after the prompt
        target = ScriptedTarget({7: script})
        params = SamplingParams(stop="cd", logits_mask=ends_after(count) if cause == "mask" else None)
        target.spoil_after = 1 + count if cause == "NaN" else 10**9
        drafter = ChainOfTruth(script, levels=7)
        engine = Engine(target, draft=drafter, tokenizer=ByteTokenizer())
        plain = engine.generate([7], params, speculate=False)[0]
        speculative = engine.generate([7], params)[0]
        assert outcome(speculative) == outcome(plain)
        assert (plain.text, plain.finish_reason, plain.stop_reason) == ("ab", "stop", "cd")
        metrics = speculative.metrics
        assert metrics.tokens == 1 + metrics.accepted_tokens + metrics.cycles - metrics.cut_tokens == 4
    target.spoil_after = 4  # the stop string itself comes of logits that hold no number
    params = SamplingParams(stop="c\x00")
    for speculate in (False, True):
        (result,) = engine.generate([7], params, speculate=speculate)
        assert (result.text, result.finish_reason) == ("abc", "error")
        assert result.error.startswith("request 0: the target's logits at position 4 hold no number; ")


def test_samples_of_a_prompt_in_trees(target):
    """n samples are n requests whose seeds follow one another, over the end of 64 bits too."""
    shared = {"temperature": 1.0, "max_new_tokens": 25, "logprobs": True}
    params = SamplingParams(seed=2**64 - 2, n=4, **shared)
    single = [SamplingParams(seed=seed, **shared) for seed in (-2, -1, 0, 1)]
    plain, speculative, engine = with_oracle(target, [[4]] * 4, single, max_length=60)
    assert [outcome(r) for r in speculative] == [outcome(r) for r in plain]
    assert [outcome(r) for r in engine.generate([4], params)] == [outcome(r) for r in plain]
    assert len({tuple(result.tokens) for result in plain}) == 4
