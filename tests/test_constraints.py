"""Requests with penalties, biases, masks and shortest lengths: speculative decoding emits what plain decoding
emits, whatever the requests of a batch differ in, and each request what it emits alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import eagle_decode.sequence
from eagle_decode.constraints import Constraints, fill_masks, fixed_mask
from eagle_decode.engine import Engine
from eagle_decode.sampling import SamplingParams
from oracle_drafter import ChainOfTruth, OracleDrafter
from reference import sampling as naive
from scripted_target import ScriptedTarget
from tiny_models import tiny_head, tiny_target

VOCAB = 97
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9, 9, 12], list(range(20)), [40, 41]]


def no_two_in_a_row(tokens: list[int], mask: np.ndarray) -> None:
    """No token twice in a row, and after an even one only odd ones."""
    if tokens:
        mask[tokens[-1] // 32] &= ~np.int32(np.uint32(1 << tokens[-1] % 32).view(np.int32))
        if tokens[-1] % 2 == 0:
            mask &= np.int32(np.uint32(0xAAAAAAAA).view(np.int32))


FEATURES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.8},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 4.0, 17: 3.5, 20: -math.inf}},
    "min new tokens": {"stop_token_ids": tuple(range(0, VOCAB, 3)), "min_new_tokens": 25},
    "banned": {"banned_tokens": tuple(range(0, VOCAB, 2))},
    "allowed": {"allowed_tokens": tuple(range(10, 40)), "banned_tokens": (11, 12)},
    "mask": {"logits_mask": no_two_in_a_row},
    "top": {"top_logprobs": 7},
}
EVERYTHING = {
    name: value
    for feature in FEATURES.values()
    for name, value in feature.items()
    if name not in ("allowed_tokens",)
}
TEMPERATURES = [0.0, 0.8, 1.0]


def sampling_of(features: dict, temperature: float, count: int, tokens: int = 40) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature, seed=7 + i, max_new_tokens=tokens + i, logprobs=True, **features
        )
        for i in range(count)
    ]


def outcome(results) -> list:
    return [(r.tokens, r.logprobs, r.top_logprobs, r.finish_reason, r.stop_reason) for r in results]


def plain_and_speculative(target, sampling, prompts, *, levels=6, max_nodes=24, max_batch=3, seed=0):
    """Both outcomes, and the accepted lengths that occurred."""
    plain = Engine(target, max_batch=max_batch, max_length=200).generate(prompts, sampling, speculate=False)
    continuations = {i: result.tokens for i, result in enumerate(plain)}
    drafter = OracleDrafter(
        continuations, levels=levels, max_nodes=max_nodes, vocab_size=target.vocab_size, seed=seed
    )
    engine = Engine(target, draft=drafter, max_batch=max_batch, max_length=200)
    speculative = engine.generate(prompts, sampling)
    lengths = {i for i, count in enumerate(engine.metrics.accepted_lengths) if count}
    return plain, speculative, lengths


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB, num_heads=3)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature(name, target):
    """C12, C19: never ignored on either way, and the same on both."""
    for temperature in TEMPERATURES[::2]:
        sampling = sampling_of(FEATURES[name], temperature, 3)
        plain, speculative, lengths = plain_and_speculative(target, sampling, PROMPTS[:3])
        assert outcome(plain) == outcome(speculative)
        assert lengths >= {0, 2, 4, 6}
        without = Engine(target, max_batch=3, max_length=200).generate(
            PROMPTS[:3], sampling_of({}, temperature, 3)
        )
        if name != "top":
            assert [r.tokens for r in plain] != [r.tokens for r in without], "the feature changes nothing"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_requests_that_differ_in_everything(target, temperature):
    """C20, C30: more requests than rows, so that they join, leave and move; each equals its solo run."""
    sets = [*FEATURES.values(), {}, EVERYTHING, {"temperature": 0.3, "top_k": 5, "top_k_top_p": "joint"}]
    sampling = [
        SamplingParams(
            **{
                "temperature": temperature,
                "seed": 31 + i,
                "max_new_tokens": 18 + 5 * (i % 4),
                "logprobs": i % 2 == 0,
                **features,
                **({"min_new_tokens": 10} if "min_new_tokens" in features else {}),
            }
        )
        for i, features in enumerate(sets)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(sampling))]
    plain, speculative, lengths = plain_and_speculative(target, sampling, prompts, seed=3)
    assert outcome(plain) == outcome(speculative)
    assert lengths == set(range(7))
    for i, result in enumerate(plain):
        alone = Engine(target, max_batch=1, max_length=200).generate(prompts[i], sampling[i])
        assert outcome(alone) == outcome([result])


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_with_a_head(kind):
    """Drafts that know nothing of the constraints."""
    target = tiny_target(vocab_size=16, num_heads=3)
    head = tiny_head(kind, target, seed=5, **({"draft_vocab": 13} if kind == "eagle3" else {}))
    engine = Engine(target, head, levels=3, draft_top_k=8, max_nodes=48, max_batch=3, max_length=200)
    features = [
        {"frequency_penalty": 0.3},
        {"logits_mask": no_two_in_a_row, "top_logprobs": 3},
        {"repetition_penalty": 1.1, "banned_tokens": (4,)},
        {"logit_bias": {7: 1.0}},
    ]
    sampling = [
        SamplingParams(temperature=0.9, seed=i, max_new_tokens=30, logprobs=True, **feature)
        for i, feature in enumerate(features)
    ]
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    speculative = engine.generate(prompts, sampling)
    assert outcome(engine.generate(prompts, sampling, speculate=False)) == outcome(speculative)
    assert sum(result.metrics.accepted_tokens for result in speculative) > 5


def test_counts_are_those_of_the_accepted_path_alone(target):
    """C19: all accepted tokens count, once, and no others."""
    plain = Engine(target, max_length=200).generate(
        PROMPTS[1], SamplingParams(max_new_tokens=40, frequency_penalty=0.6)
    )
    seen = []

    def observe(batch, rows, tree, logits) -> None:
        request = batch.requests[0]
        seen.append((list(request.tokens), batch.constraints._whole["output_counts"][0].clone()))

    drafter = OracleDrafter({0: plain[0].tokens}, levels=5, max_nodes=16, vocab_size=VOCAB)
    engine = Engine(target, draft=drafter, max_length=200, observer=observe)
    engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=40, frequency_penalty=0.6))
    assert len({len(tokens) for tokens, _ in seen}) > 5
    for tokens, counts in seen:  # the observer looks before the cycle is committed
        assert torch.equal(counts, torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=VOCAB))


def test_c19_a_target_that_always_prefers_one_token():
    """frequency_penalty 2, logits 10 above the rest: five times 3, then the lowest of the others."""
    params = SamplingParams(max_new_tokens=9, frequency_penalty=2.0)
    row = np.full(16, -5.0, np.float32)
    row[3] = 5.0
    expected: list[int] = []
    for _ in range(9):
        expected.append(int(np.argmax(naive.adjust(row, output=expected, frequency=2.0))))
    assert expected[:6] == [3, 3, 3, 3, 3, 0]

    class Constant(ScriptedTarget):
        """Whatever was emitted, the logits are those of the script's first token."""

        def forward(self, tokens, **options):
            output = super().forward(tokens, **options)
            output.logits[:] = torch.from_numpy(row)
            return output

    target = Constant({1: expected}, vocab_size=16)
    engine = Engine(target, draft=ChainOfTruth(expected, levels=4), max_length=100)
    for speculate in (False, True):
        assert engine.generate([[1]], params, speculate=speculate)[0].tokens == expected
    assert engine.metrics.accepted_tokens >= 4


def test_top_logprobs_are_of_the_untouched_logits(target):
    params = SamplingParams(
        temperature=0.9, max_new_tokens=20, logprobs=True, top_logprobs=VOCAB // 4, banned_tokens=range(50)
    )
    engine = Engine(target, max_length=200)
    rows = []
    engine.observer = lambda batch, rows_, tree, logits: rows.append(logits[0, 0].clone())
    (result,) = engine.generate(PROMPTS[2], params)
    for token, value, best, row in zip(
        result.tokens, result.logprobs, result.top_logprobs, rows, strict=True
    ):
        tokens, log_probs = naive.top(row.numpy(), VOCAB // 4)
        assert [one for one, _ in best] == tokens
        assert [one for _, one in best] == pytest.approx(log_probs, rel=1e-5, abs=1e-6)
        assert dict(best).get(token, value) == value
        assert token >= 50
    chunks = list(engine.stream(PROMPTS[2], params))
    assert [best for chunk in chunks for best in chunk.top_logprobs] == result.top_logprobs


def test_a_mask_is_asked_along_paths_that_it_allows():
    """C29: grammar "ab|cd", then the end; siblings do not see each other, nothing is asked below a token that
    is not allowed or ends the request."""
    a, b, c, d, end = 1, 2, 3, 4, 5
    follow = {(): [a, c], (a,): [b], (c,): [d], (a, b): [end], (c, d): [end]}
    asked = []

    def grammar(tokens: list[int], mask: np.ndarray) -> None:
        asked.append(tuple(tokens))
        mask[:] = 0
        for token in follow[tuple(tokens)]:
            mask[0] |= 1 << token

    #            root  a  c  x  b(a) d(c) d(a) end(ab) beyond the end
    tokens = [0, a, c, 9, b, d, d, end, a]
    parents = [-1, 0, 0, 0, 1, 2, 1, 4, 7]
    masks = np.full((9, 1), -1, np.int32)
    masks[2] &= ~(1 << d)  # banned under c by something else
    assert fill_masks(grammar, masks, [], tokens, parents, frozenset([end])) == {}
    assert asked == [(), (a,), (c,), (a, b)]
    assert masks[:, 0].tolist() == [1 << a | 1 << c, 1 << b, 0, -1, 1 << end, -1, -1, -1, -1]

    target = tiny_target(vocab_size=32, num_heads=3)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_new_tokens=9, stop_token_ids=end, logits_mask=grammar)
        for i in range(6)
    ]
    plain, speculative, _ = plain_and_speculative(target, params, [[i] for i in range(6)], max_nodes=8)
    assert outcome(plain) == outcome(speculative)
    assert {tuple(result.tokens) for result in plain} == {(a, b, end), (c, d, end)}
    assert all(result.stop_reason == end for result in plain)


def test_nothing_allowed_is_an_error(target):
    def nothing(tokens: list[int], mask: np.ndarray) -> None:
        if len(tokens) == 3:
            mask[:] = 0

    engine = Engine(target, max_length=200)

    def returns(tokens: list[int], mask: np.ndarray) -> np.ndarray:
        return mask

    for mask, reason in {
        nothing: "no token is left at position 10: ",
        returns: "logits_mask failed at ",
    }.items():
        (result,) = engine.generate(PROMPTS[1], SamplingParams(logits_mask=mask))
        assert result.finish_reason == "error"
        assert result.error.startswith(f"request 0: {reason}")


def test_fixed_masks():
    params = SamplingParams(allowed_tokens=[0, 31, 32, 63], banned_tokens=[32])
    assert fixed_mask(params, 2).view(np.uint32).tolist() == [0x80000001, 0x80000000]
    assert fixed_mask(SamplingParams(banned_tokens=[33]), 2).tolist() == [-1, -3]


def test_nothing_is_made_where_nothing_is_asked_for(target, monkeypatch):
    """The usual path: no tensors, no state, no second transfer."""
    made = []
    monkeypatch.setattr(
        eagle_decode.sequence, "Constraints", type("Spy", (Constraints,), {"__init__": made.append})
    )
    given = {}

    def observe(batch, rows, tree, logits) -> None:
        given.update(constraints=batch.constraints, top=batch._top, more=batch.constrained(rows, tree, rows))

    engine = Engine(target, max_length=200, observer=observe)
    engine.generate(PROMPTS[:2], SamplingParams(temperature=1.0, top_k=9, logprobs=True, stop_token_ids=[1]))
    assert given == {"constraints": None, "top": None, "more": {}}
    assert not made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number > 0, got 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty: expected a finite number, got nan"),
        ({"presence_penalty": math.inf}, "presence_penalty: expected a finite number, got inf"),
        ({"frequency_penalty": "1"}, "frequency_penalty: expected a finite number, got '1'"),
        ({"logit_bias": {1: math.nan}}, "logit_bias: expected a finite number, got nan"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: expected token ids >= 0, got -1"),
        ({"logit_bias": [1, 2]}, "logit_bias: expected a mapping from token ids to numbers, got [1, 2]"),
        ({"min_new_tokens": -1}, "min_new_tokens: expected 0 to max_new_tokens = 128, got -1"),
        (
            {"min_new_tokens": 5, "max_new_tokens": 4},
            "min_new_tokens: expected 0 to max_new_tokens = 4, got 5",
        ),
        ({"allowed_tokens": []}, "allowed_tokens: expected one that is not among banned_tokens, got ()"),
        (
            {"allowed_tokens": [1, 2], "banned_tokens": [1, 2, 3]},
            "allowed_tokens: expected one that is not among banned_tokens, got (1, 2)",
        ),
        ({"banned_tokens": ["a"]}, "banned_tokens: expected an integer, got 'a'"),
        ({"logits_mask": 3}, "logits_mask: expected a function or None, got 3"),
        ({"top_logprobs": 33}, "top_logprobs: expected an integer from 0 to 32, got 33"),
        ({"temperature": -1}, "temperature: expected a finite number >= 0, got -1.0"),
        ({"temperature": 10**400}, f"temperature: expected a finite number, got {10**400}"),
        ({"temperature": math.nan}, "temperature: expected a finite number, got nan"),
        ({"logprobs": 5}, "logprobs: expected True or False, got 5"),
        ({"ignore_eos": "no"}, "ignore_eos: expected True or False, got 'no'"),
        ({"temperature": 1e39}, "temperature: expected a number that float32 holds, got 1e+39"),
        ({"logit_bias": {1: -1e39}}, "logit_bias: expected a number that float32 holds, got -1e+39"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty: expected a number > 0, got 1e-46"),
    ],
)
def test_values_out_of_range_raise_at_once(options, message):
    """C11, and C12: nothing is taken and then not done."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    assert str(caught.value) == message


def test_ids_are_checked_against_the_vocabulary(target):
    engine = Engine(target, max_length=200)
    for name, value, wrong in (
        ("logit_bias", {3: 1.0, 97: 1.0}, 97),
        ("allowed_tokens", [1, 200], 200),
        ("banned_tokens", [97], 97),
    ):
        with pytest.raises(
            ValueError, match=f"^{name}: expected token ids below the vocabulary's 97, got {wrong}$"
        ):
            engine.generate([1], SamplingParams(**{name: value}))
    with pytest.raises(ValueError, match="^banned_tokens: expected fewer than the vocabulary's 97, got all$"):
        engine.generate([1], SamplingParams(banned_tokens=range(97)))
    nothing = [
        {"allowed_tokens": [3, 4], "banned_tokens": [3], "logit_bias": {4: np.float32("-inf")}},
        {"allowed_tokens": [3], "stop_token_ids": 3, "min_new_tokens": 1},
        {"banned_tokens": range(96), "stop_token_ids": 96, "min_new_tokens": 1},
    ]
    for options in nothing:
        with pytest.raises(ValueError, match="min_new_tokens: expected a token left, got none$"):
            engine.generate([1], SamplingParams(**options))
    small = Engine(tiny_target(vocab_size=16, num_heads=3), max_length=50)
    with pytest.raises(ValueError, match="^top_logprobs: expected at most the vocabulary's 16, got 20$"):
        small.generate([1], SamplingParams(top_logprobs=20))


def test_samples_of_a_prompt_keep_their_constraints(target):
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_new_tokens=20, frequency_penalty=1.0)
    together = Engine(target, max_batch=2, max_length=200).generate(PROMPTS[1], params)
    for i, result in enumerate(together):
        alone = dataclasses.replace(params, n=1, seed=5 + i)
        assert Engine(target, max_length=200).generate(PROMPTS[1], alone)[0].tokens == result.tokens
