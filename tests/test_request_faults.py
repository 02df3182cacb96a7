"""A request that cannot go on ends alone: at the same token with and without speculation, with its reason on
its result, while its neighbours notice nothing."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_decode import Engine, SamplingParams
from oracle_drafter import ChainOfTruth, OracleDrafter
from random_requests import outcome
from scripted_target import ScriptedTarget
from tiny_models import ByteTokenizer, tiny_head, tiny_target

VOCAB = 24
TREE = {"levels": 3, "draft_top_k": 4, "max_nodes": 16, "max_length": 200}


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB, num_heads=3)


@pytest.fixture(scope="module")
def head(target):
    return tiny_head("eagle3", target, draft_vocab=VOCAB - 4)


def empty_after(count: int):
    def mask(tokens: list[int], words: np.ndarray) -> None:
        if len(tokens) >= count:
            words[:] = 0

    return mask


def raises_after(count: int):
    def mask(tokens: list[int], words: np.ndarray) -> None:
        words[:] = 0  # of no account where it raises
        if len(tokens) >= count:
            raise KeyError("no [rule] for it")
        words[:] = -1

    return mask


def answers_after(count: int):
    return lambda tokens, words: words if len(tokens) >= count else None


FAULTS = {"empty": empty_after, "raises": raises_after, "answers": answers_after}
REASONS = {
    "empty": "no token is left at position {at}: none that logits_mask would allow has a logit above -inf; "
    "allow another there, such as a stop token",
    "raises": "logits_mask failed at position {at}: KeyError: 'no [rule] for it'; it is to answer for all "
    "tokens that it allowed",
    "answers": "logits_mask failed at position {at}: ValueError: expected the mask filled and None returned, "
    "got array([-1], dtype=int32); it is to answer for all tokens that it allowed",
}


def sound(metrics) -> bool:
    """The identity that Metrics states."""
    accepted = metrics.accepted_tokens + metrics.cycles - metrics.cut_tokens
    return metrics.tokens == metrics.first_tokens + accepted


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_others_go_on(target, head, kind, temperature):
    """Of nine requests on three rows, three cannot go on: one at once, the others later. Two more join."""
    faulty = {0: 5, 4: 0, 7: 13}  # request: tokens that it gets
    prompts = [[i, 2 * i, 5][: 1 + i % 3] for i in range(11)]
    sampling = [
        SamplingParams(
            temperature=temperature, seed=i, max_new_tokens=15 + i, logprobs=True, ignore_eos=True,
            logits_mask=FAULTS[kind](faulty[i]) if i in faulty else None,
        )
        for i in range(11)
    ]  # fmt: skip
    alone = [
        Engine(target, max_length=200).generate(prompt, params)[0]
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    for speculate in (False, True):
        engine, chunks = Engine(target, head, max_batch=3, **TREE), []
        with engine.stream(prompts[:9], sampling[:9], speculate=speculate) as stream:
            for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 60:
                    assert stream.add(prompts[9:], sampling[9:]) == [9, 10]
        results = stream.results
        for i, (result, one) in enumerate(zip(results, alone, strict=True)):
            assert outcome(result) == outcome(one), (i, speculate)
            assert sound(result.metrics)
            mine = [chunk for chunk in chunks if chunk.request == i]
            assert [token for chunk in mine for token in chunk.tokens] == result.tokens
            assert [value for chunk in mine for value in chunk.logprobs] == result.logprobs
            assert [chunk.error for chunk in mine] == [None] * (len(mine) - 1) + [result.error]
            assert mine[-1].finish_reason == result.finish_reason == ("error" if i in faulty else "length")
            if i in faulty:
                assert len(result.tokens) == faulty[i]
                where = len(prompts[i]) + faulty[i]
                assert result.error == f"request {i}: " + REASONS[kind].format(at=where)
        assert sound(engine.metrics)
        assert (engine.metrics.requests, engine.metrics.tokens) == (11, sum(len(r.tokens) for r in alone))
        assert engine.generate(prompts[1], sampling[1])[0].tokens == alone[1].tokens  # usable again


@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_not_reached_is_no_fault(target, kind):
    """A tree is asked about tokens that plain decoding never says."""
    prompt, free = [1, 2], SamplingParams(temperature=1.0, seed=2, max_new_tokens=20, logprobs=True)
    (plain,) = Engine(target).generate(prompt, free)
    asked = []

    def strict(tokens: list[int], words: np.ndarray) -> None:
        if tokens != plain.tokens[: len(tokens)]:
            asked.append(tokens)
            return FAULTS[kind](0)(tokens, words)

    params = SamplingParams(temperature=1.0, seed=2, max_new_tokens=20, logprobs=True, logits_mask=strict)
    drafter = OracleDrafter({0: plain.tokens}, levels=4, max_nodes=14, vocab_size=VOCAB, branching=3)
    engine = Engine(target, draft=drafter)
    assert outcome(engine.generate(prompt, params)[0]) == outcome(plain)
    assert len(asked) > 20
    assert engine.metrics.accepted_tokens > 10


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"logits_mask": empty_after(3), "banned_tokens": 2}, "logits_mask, banned_tokens"),
        ({"logits_mask": empty_after(3), "logit_bias": {1: -1.0}, "min_new_tokens": 3}, "logits_mask"),
        (
            {"logits_mask": empty_after(3), "min_new_tokens": 4, "stop_token_ids": 9},
            "logits_mask, min_new_tokens",
        ),
        (
            {"logits_mask": empty_after(3), "allowed_tokens": range(9), "logit_bias": {1: float("-inf")}},
            "logits_mask, allowed_tokens, logit_bias",
        ),
    ],
)  # fmt: skip
def test_the_reason_names_what_left_nothing(target, options, names):
    (result,) = Engine(target).generate([5], SamplingParams(**options))
    assert f"none that {names} would allow" in result.error
    assert len(result.tokens) == 3


class SpoiledTarget(ScriptedTarget):
    """Its logits for prompts that begin with 8 are NaN from position 6 on."""

    def forward(self, tokens, *, seq_lens, depths, cache, **options):
        output = super().forward(tokens, seq_lens=seq_lens, depths=depths, cache=cache, **options)
        for row in range(len(tokens)):
            if cache[0].k[row, 0, 0, 0] == 8:
                output.logits[row, (seq_lens[row] + depths[row] + 1) >= 6] = float("nan")
        return output


class ShortTokenizer(ByteTokenizer):
    """Does not have the ids from 270 on."""

    def decode(self, ids, **options):
        if max(ids, default=0) >= 270:
            raise IndexError("piece id is out of range")
        return super().decode(ids, **options)


def scripted(tokenizer=None):
    scripts = {7: range(97, 117), 8: range(65, 85), 9: [*b"xyz", 271, *b"abcdefgh"], 10: [270] * 12}
    scripts = {first: list(script) for first, script in scripts.items()}
    drafter = OracleDrafter(dict(enumerate(scripts.values())), levels=5, max_nodes=12, vocab_size=300, seed=1)
    return Engine(SpoiledTarget(scripts), draft=drafter, tokenizer=tokenizer, max_batch=2), scripts


@pytest.mark.parametrize("speculate", [False, True])
def test_logits_without_a_number_end_one_request(speculate):
    engine, scripts = scripted()
    results = engine.generate(
        [[first] for first in scripts], SamplingParams(max_new_tokens=10), speculate=speculate
    )
    assert [len(result.tokens) for result in results] == [10, 5, 10, 10]
    assert results[1].error == (
        "request 1: the target's logits at position 6 hold no number; check its weights, and in float16 that "
        "nothing overflows"
    )
    assert [result.finish_reason for result in results] == ["length", "error", "length", "length"]


@pytest.mark.parametrize("stop", [(), "q", "yz"])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_token_that_the_tokenizer_does_not_have_ends_one_request(speculate, stop):
    engine, scripts = scripted(ShortTokenizer())
    params = SamplingParams(max_new_tokens=10, stop=stop, logprobs=True)
    results = engine.generate([[first] for first in scripts], params, speculate=speculate)
    stopped = stop == "yz"
    assert [len(result.tokens) for result in results] == [10, 5, 3, 0]
    assert [result.text for result in results] == ["abcdefghij", "ABCDE", "x" if stopped else "xyz", ""]
    reasons = ["length", "error", "stop" if stopped else "error", "error"]
    assert [result.finish_reason for result in results] == reasons
    if not stopped:
        assert results[2].error == (
            "request 2: the tokenizer cannot read token 271, at position 4: IndexError: piece id is out of "
            "range; keep ids that it does not have out of the text with banned_tokens"
        )
    assert results[3].error.startswith("request 3: the tokenizer cannot read token 270, at position 1: ")
    assert all(sound(result.metrics) for result in results)
    assert [len(result.logprobs) for result in results] == [len(result.tokens) for result in results]


def test_a_stop_string_before_the_unreadable_token_comes_first():
    """In one cycle, in which both are proposed."""
    engine = Engine(
        ScriptedTarget({9: [*b"wxyz", 271, 65]}), draft=ChainOfTruth([*b"wxyz", 271, 65], levels=6),
        tokenizer=ShortTokenizer(),
    )  # fmt: skip
    for speculate in (False, True):
        (result,) = engine.generate([9], SamplingParams(stop="yz"), speculate=speculate)
        assert (result.text, result.finish_reason, result.stop_reason) == ("wx", "stop", "yz")


@pytest.mark.parametrize("speculate", [False, True])
def test_what_stands_where_nothing_was_chosen_is_no_stop_token(speculate):
    """The op writes the lowest allowed id there."""
    script = list(b"abcdefgh")
    engine = Engine(
        ScriptedTarget({7: script}), draft=ChainOfTruth(script, levels=7), tokenizer=ByteTokenizer()
    )
    for fault in (raises_after(4), empty_after(4)):
        params = SamplingParams(logits_mask=fault, stop_token_ids=range(5))
        (result,) = engine.generate([7], params, speculate=speculate)
        assert (result.text, result.finish_reason, result.stop_reason) == ("abcd", "error", None)
    engine.target.spoil_after = 5
    (result,) = engine.generate([7], SamplingParams(stop_token_ids=range(5)), speculate=speculate)
    assert (result.text, result.finish_reason, result.stop_reason) == ("abcd", "error", None)


def test_a_reason_is_not_that_of_the_row_before():
    scripts = {7: [65] * 20, 8: [66] * 20}
    engine = Engine(SpoiledTarget(scripts), max_batch=1)
    sampling = [SamplingParams(logits_mask=raises_after(2)), SamplingParams(banned_tokens=1)]
    first, second = engine.generate([[7], [8]], sampling)
    assert "logits_mask failed at position 3: KeyError" in first.error
    assert "no token is left at position 6: none that banned_tokens would allow" in second.error


@pytest.mark.parametrize("speculate", [False, True])
def test_cancelling_beside_a_fault(target, head, speculate):
    prompts, sampling = [[1], [2], [3], [4]], [SamplingParams(max_new_tokens=30, ignore_eos=True)] * 4
    sampling[1] = SamplingParams(max_new_tokens=30, ignore_eos=True, logits_mask=raises_after(6))
    alone = [Engine(target).generate(p, s)[0] for p, s in zip(prompts, sampling)]
    stream = Engine(target, head, max_batch=2, **TREE).stream(prompts, sampling, speculate=speculate)
    for chunk in stream:
        if chunk.error is not None:
            assert not stream.cancel(chunk.request)  # it has ended
            assert stream.cancel(2)
            assert not stream.results[1].metrics.tokens - 6
    results = stream.results
    assert [result.finish_reason for result in results] == ["length", "error", "cancelled", "length"]
    for i in (0, 1, 3):
        assert outcome(results[i]) == outcome(alone[i])


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Lengthy(Exception):
    def __str__(self):
        return "x" * 10_000_000


@pytest.mark.parametrize("fault", [Unspeakable, Lengthy])
def test_a_fault_without_words_or_with_too_many(target, fault):
    def mask(tokens, words):
        raise fault

    sampling = [SamplingParams(max_new_tokens=4, logits_mask=m) for m in (mask, None)]
    first, second = Engine(target).generate([[1], [2]], sampling)
    assert f"logits_mask failed at position 1: {fault.__name__}" in first.error
    assert len(first.error) < 1200
    assert second.finish_reason == "length"


def reshaped(words):
    words.shape = (1, -1)
    words[0] &= -2


def as_bytes(words):
    words.dtype = np.uint8
    words[0] &= 254


@pytest.mark.parametrize("form", [reshaped, as_bytes])
def test_a_mask_function_may_see_its_array_in_another_form(target, head, form):
    """The bits are the request's all the same: token 0 is not allowed."""
    plain, usual = (
        SamplingParams(temperature=1.5, seed=3, max_new_tokens=30, ignore_eos=True, **how)
        for how in ({"logits_mask": lambda tokens, words: form(words)}, {"banned_tokens": 0})
    )
    for speculate in (False, True):
        engine = Engine(target, head, max_batch=2, **TREE)
        results = engine.generate([[1], [1]], [plain, usual], speculate=speculate)
        assert results[0].error is None
        assert results[0].tokens == results[1].tokens


def test_a_mask_function_cannot_make_its_array_another(target):
    sampling = [
        SamplingParams(max_new_tokens=4, logits_mask=lambda tokens, words: words.resize(9, refcheck=False)),
        SamplingParams(max_new_tokens=4),
    ]
    first, second = Engine(target).generate([[1], [2]], sampling)
    assert "logits_mask failed at position 1: ValueError" in first.error
    assert second.finish_reason == "length"


def test_a_stream_closed_by_a_request_of_its_own_goes_on(target):
    def mask(tokens, words):
        if len(tokens) == 2:
            stream.close()

    sampling = [SamplingParams(max_new_tokens=6, ignore_eos=True, logits_mask=m) for m in (mask, None)]
    stream = Engine(target, max_batch=2).stream([[1], [2]], sampling)
    for chunk in stream:
        if chunk.error is not None:
            assert "logits_mask failed at position 3: ValueError" in chunk.error
            stream.add([[3]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [result.finish_reason for result in stream.results] == ["error", "length", "length"]
