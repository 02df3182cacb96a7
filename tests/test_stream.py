"""Requests that join, leave and are cancelled while others run; streams closed early; faults in mid-run."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from eagle_decode import Engine, SamplingParams
from oracle_drafter import ChainOfTruth, OracleDrafter, scripted_engine
from random_requests import outcome, random_batch, without_one
from scripted_target import ScriptedTarget
from tiny_models import ByteTokenizer, tiny_head, tiny_target

VOCAB = 24
TREE = {"levels": 3, "draft_top_k": 6, "max_nodes": 24, "max_length": 300}


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB, num_heads=3, eos_token_id=[3, 5])


@pytest.fixture(scope="module")
def heads(target):
    return [tiny_head("eagle3", target, draft_vocab=VOCAB - 4), tiny_head("eagle1", target)]


def prompts_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(VOCAB, size=1 + 3 * i).tolist() for i in range(count)]


def params_of(i: int, **options) -> SamplingParams:
    options = {"max_new_tokens": 100, "ignore_eos": True, "logprobs": True} | options
    return SamplingParams(temperature=[0.0, 1.0][i % 2], seed=i, **options)


SCRIPTS = {7: list(range(100, 160)), 8: list(range(60, 130)), 9: list(range(130, 190))}


class Watched:
    """An observer: which requests ran in each pass, and each one's trees, which know its draft cache."""

    def __init__(self) -> None:
        self.running: list[list[int]] = []
        self.trees: dict[int, list] = {}

    def __call__(self, batch, rows, tree, logits) -> None:
        self.running.append([request.index for request in batch.requests])
        for row, request in enumerate(batch.requests[rows]):
            nodes = int(tree.num_nodes[row])
            seen = (tree.tokens[row, :nodes].tolist(), tree.scores[row, :nodes].tolist())
            if request.tokens:  # what the prompt's own pass sees is no proposal
                self.trees.setdefault(request.index, []).append(seen)


# ---- cancellation


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize(("max_batch", "count"), [(1, 3), (2, 5), (4, 4)])
def test_a_cancelled_request_leaves_the_others_alone(target, heads, max_batch, count, speculate):
    """Its row is free for the next, or for the last; tokens, log-probabilities and drafts of the others are
    those of alone."""
    prompts, sampling = prompts_of(count), [params_of(i) for i in range(count)]
    engine = Engine(target, heads[0], max_batch=max_batch, **TREE)
    alone = []
    for prompt, params in zip(prompts, sampling, strict=True):
        engine.observer = Watched()
        alone += engine.generate(prompt, params, speculate=speculate)
        alone[-1].trees = engine.observer.trees[0]
    engine.observer = watched = Watched()
    seen: list = []
    with engine.stream(prompts, sampling, speculate=speculate) as stream:
        for chunk in stream:
            seen.append(chunk)
            if chunk.request == 0 and sum(one.request == 0 for one in seen) == 4:
                assert stream.cancel(0)
                before = len(watched.running)
    assert all(0 not in running for running in watched.running[before:])
    assert max(map(len, watched.running)) == max_batch
    first, *others = stream.results
    assert (first.finish_reason, first.stop_reason) == ("cancelled", None)
    assert first.tokens == alone[0].tokens[: len(first.tokens)]
    assert first.logprobs == alone[0].logprobs[: len(first.tokens)]
    assert 4 <= len(first.tokens) < 100
    mine = [chunk for chunk in seen if chunk.request == 0]
    assert len(mine) == 5
    assert mine[-1]._replace(request=0) == (0, [], None, [], [], "cancelled", None, None)
    for i, (result, one) in enumerate(zip(others, alone[1:], strict=True), start=1):
        assert outcome(result) == outcome(one)
        trees = watched.trees[i]
        same = min(len(trees), len(one.trees)) - 3  # the last ones are cut to what the budgets of all can use
        assert trees[:same] == one.trees[:same]
        assert one.metrics.accepted_tokens > 10 or not speculate


def test_a_request_that_waits_is_cancelled_before_its_prompt_runs():
    engine = scripted_engine(SCRIPTS, max_batch=1)
    stream = engine.stream([[7], [8], [9]], SamplingParams(max_new_tokens=4))
    assert stream.cancel(2)  # nothing runs yet
    chunks = [next(stream), next(stream)]
    assert [(chunk.request, chunk.finish_reason) for chunk in chunks] == [(2, "cancelled"), (0, None)]
    assert stream.cancel(1)
    assert stream.cancel(1)  # once more: still on its way
    rest = list(stream)
    assert (rest[0].request, rest[0].tokens, rest[0].text, rest[0].finish_reason) == (1, [], "", "cancelled")
    assert [result.tokens for result in stream.results] == [SCRIPTS[7][:4], [], []]
    assert [result.metrics.first_tokens for result in stream.results] == [1, 0, 0]

    engine = scripted_engine(SCRIPTS, max_batch=2)
    stream = engine.stream([[7], [8]], SamplingParams(max_new_tokens=4))
    assert next(stream).request == 0
    passes = engine.target.passes
    assert stream.cancel(1)  # there is a row for it, and its turn is next
    chunk = next(stream)
    assert (chunk.request, chunk.finish_reason, engine.target.passes) == (1, "cancelled", passes)
    list(stream)

    stream = engine.stream([[7], [8]], SamplingParams(max_new_tokens=4))
    assert [next(stream).request, next(stream).request] == [0, 1]
    assert stream.cancel(0)  # between its prompt and its first cycle
    assert next(stream)[:2] == (0, [])
    list(stream)
    assert [result.tokens for result in stream.results] == [SCRIPTS[7][:1], SCRIPTS[8][:4]]

    passes = engine.target.passes
    stream = engine.stream([[7], [8]])
    assert stream.cancel(0)
    assert stream.cancel(1)
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"] * 2
    assert engine.target.passes == passes


def test_a_request_whose_turn_comes_before_the_notice_of_its_end():
    """`cancel` in another thread may be between its two halves."""
    engine = scripted_engine(SCRIPTS, max_batch=1)
    stream = engine.stream([[7], [8]], SamplingParams(max_new_tokens=1))
    stream._queue.requests[1].cancelled = True
    assert [(chunk.request, chunk.finish_reason) for chunk in stream] == [(0, "length"), (1, "cancelled")]


def test_what_has_ended_is_not_cancelled():
    engine = scripted_engine(SCRIPTS, max_batch=2)
    stream = engine.stream([[7], [8]], [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=9)])
    assert next(stream).finish_reason == "length"
    assert not stream.cancel(0)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=f"^request: expected an index below 2, got {wrong}$"):
            stream.cancel(wrong)
    list(stream)
    assert not stream.cancel(1)
    assert [result.finish_reason for result in stream.results] == ["length"] * 2


def test_a_neighbour_is_cancelled_between_the_chunks_of_a_cycle():
    """What its cycle has made still comes; if that was the end, it is no cancellation."""
    engine = scripted_engine(SCRIPTS, max_batch=3)
    sampling = [SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30)]
    stream = engine.stream([[7], [8]], sampling)
    assert [next(stream).request for _ in range(3)] == [0, 1, 0]
    assert stream.cancel(1)
    chunk, early = next(stream), stream.results[0]
    assert (chunk.request, chunk.finish_reason) == (1, None)
    assert chunk.tokens
    chunk = next(stream)
    assert (chunk.request, chunk.tokens, chunk.finish_reason) == (1, [], "cancelled")
    list(stream)
    assert stream.results[0].tokens == SCRIPTS[7][:30]
    assert early.tokens == SCRIPTS[7][: early.metrics.tokens]  # a result is of when it was asked for
    assert (early.metrics.cycles, early.finish_reason) == (1, None)

    class Whole(ChainOfTruth):
        def _next_depth(self, index):
            return 3

    engine = Engine(ScriptedTarget({7: SCRIPTS[7]}), draft=Whole(SCRIPTS[7], levels=3))
    stream = engine.stream([[7]], SamplingParams(max_new_tokens=5))
    assert len(next(stream).tokens) == 1
    chunk = next(stream)
    assert (len(chunk.tokens), chunk.finish_reason) == (4, "length")
    assert not stream.cancel(0)


def test_text_held_back_comes_out_with_a_cancellation():
    script = list(b"a <en" + "é".encode()[:1])
    engine = Engine(ScriptedTarget({7: script + [65]}), tokenizer=ByteTokenizer())
    stream = engine.stream([7], SamplingParams(stop="<end>"))
    texts = [next(stream).text for _ in script]
    assert "".join(texts) == "a "
    stream.cancel(0)
    assert next(stream).text == "<en\ufffd"
    assert stream.results[0].text == "a <en\ufffd"


def test_another_thread_may_cancel(target):
    """While a cycle runs: the request ends with the next."""
    engine = Engine(target, max_batch=2, max_length=300)

    def observe(batch, rows, tree, logits):
        if len(batch.requests) == 2 and len(batch.requests[0].tokens) == 9:
            thread = threading.Thread(target=stream.cancel, args=(0,))
            thread.start()
            thread.join()

    engine.observer = observe
    stream = engine.stream(prompts_of(2), [params_of(0), params_of(1)])
    list(stream)
    assert [result.finish_reason for result in stream.results] == ["cancelled", "length"]
    assert len(stream.results[0].tokens) == 10


# ---- joining


def test_requests_join_with_what_nobody_asked_for_before(target, heads):
    """Room for stop tokens, biases, penalties, masks and the n best is made while others run, whose counts of
    what they said stay."""
    sets = [
        {},
        {"frequency_penalty": 1.3, "temperature": 0.9},
        {"stop_token_ids": range(8, 20), "min_new_tokens": 30},
        {"logit_bias": {3: 1.0}, "logprobs": False},
        {"logit_bias": {4: 1.0, 6: -3.0, 8: 2.0}, "top_k": 9, "top_p": 0.8, "top_k_top_p": "joint"},
        {"logits_mask": without_one(3, VOCAB), "top_logprobs": 4},
        {"repetition_penalty": 1.2, "banned_tokens": [5], "top_logprobs": 2},
        {"max_new_tokens": 0},
    ]
    sampling = [params_of(i, **options) for i, options in enumerate(sets) if "temperature" not in options]
    sampling.insert(1, SamplingParams(**sets[1], seed=1, max_new_tokens=100, ignore_eos=True))
    prompts = prompts_of(len(sets))
    alone = [
        Engine(target, max_length=300).generate(prompt, params)[0]
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    for options in ({}, {"head": heads[0], **TREE}):
        engine = Engine(target, max_batch=4, **({"max_length": 300} | options))
        cycles, joined = 0, 1
        with engine.stream(prompts[:1], sampling[0]) as stream:
            for chunk in stream:
                cycles += chunk.request == 0
                if joined < len(sets) and cycles > 3 * joined:
                    assert stream.add(prompts[joined], sampling[joined]) == [joined]
                    joined += 1
        assert joined == len(sets)
        assert [outcome(result) for result in stream.results] == [outcome(result) for result in alone]
        assert [result.prompt for result in stream.results] == list(range(joined))


def test_joining_is_checked_and_ends_with_the_stream():
    engine = scripted_engine(SCRIPTS, max_batch=2)
    stream = engine.stream([[7]], SamplingParams(max_new_tokens=8), speculate=False)
    assert stream.add([[8], [9]], SamplingParams(max_new_tokens=3, n=2)) == [1, 2, 3, 4]
    next(stream)
    for wrong, message in [([[]], "at least one token"), ([[1] * 600], "at most max_length = 512")]:
        with pytest.raises(ValueError, match=rf"^prompts\[0\]: expected {message}"):
            stream.add(wrong)
    assert sum(chunk.finish_reason is not None for chunk in stream) == 5
    assert [len(result.tokens) for result in stream.results] == [8, 3, 3, 3, 3]
    places = [(result.prompt, result.sample) for result in stream.results]
    assert places == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    with pytest.raises(RuntimeError, match="the stream has ended; open another one"):
        stream.add([7])
    empty = engine.stream([])
    assert empty.add([9], SamplingParams(max_new_tokens=2)) == [0]
    assert len(list(empty)) > 0
    assert empty.results[0].tokens == SCRIPTS[9][:2]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_comes_and_goes(seed, target, heads):
    """Requests that differ in everything, added and cancelled at random: each equals its solo, plain run."""
    compare_random_batch(seed, target, heads)


@pytest.mark.full
def test_whatever_comes_and_goes_for_longer(target, heads):
    done = [compare_random_batch(seed, target, heads) for seed in range(100, 300)]
    for what in ("cancelled", "stop", "length", "accepted"):
        assert sum(tally.get(what, 0) for tally in done) > 40, what


def compare_random_batch(seed, target, heads) -> dict[str, int]:
    random, length, groups = random_batch(seed, VOCAB)
    solo = []
    engine = Engine(target, tokenizer=ByteTokenizer(), max_batch=1, max_length=length)
    for prompt, params in [one for group in groups for one in group]:
        solo += engine.generate(prompt, params, speculate=False)
    levels, nodes = random.choice([1, 3, 5]), random.choice([2, 8, 40])
    options: dict = {"head": random.choice([*heads, None]), "levels": levels, "max_nodes": nodes}
    if options["head"] is None:
        tokens = {i: result.tokens for i, result in enumerate(solo)}
        oracle = OracleDrafter(
            tokens, levels=levels, max_nodes=max(nodes, levels + 1), vocab_size=VOCAB, seed=seed
        )
        options = {"draft": oracle}
    engine = Engine(
        target, tokenizer=ByteTokenizer(), max_batch=random.randint(1, 4), max_length=length, **options
    )
    chunks: dict[int, list] = {}
    cancelled = set()
    with engine.stream(*zip(*groups.pop(0), strict=True)) as stream:
        for chunk in stream:
            chunks.setdefault(chunk.request, []).append(chunk)
            if groups and random.random() < 0.3:
                stream.add(*zip(*groups.pop(0), strict=True))
            if random.random() < 0.03:
                at = random.randrange(len(stream.results))
                cancelled |= {at} if stream.cancel(at) else set()
    tally = {"accepted": engine.metrics.accepted_tokens}
    for i, result in enumerate(stream.results):
        mine = chunks[i]
        tally[result.finish_reason] = tally.get(result.finish_reason, 0) + 1
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [result.finish_reason]
        assert [token for chunk in mine for token in chunk.tokens] == result.tokens
        assert "".join(chunk.text for chunk in mine) == result.text
        if i in cancelled:
            assert result.finish_reason == "cancelled"
            assert result.tokens == solo[i].tokens[: len(result.tokens)]
        else:
            assert outcome(result) == outcome(solo[i]), (seed, i)
        counts = result.metrics
        assert sum(counts.accepted_lengths) == counts.cycles
        assert counts.tokens == len(result.tokens)
        assert (
            counts.tokens == counts.first_tokens + counts.accepted_tokens + counts.cycles - counts.cut_tokens
        )
    assert engine.metrics.tokens == sum(len(result.tokens) for result in stream.results)
    assert engine.metrics.requests == len(stream.results)
    return tally


# ---- streams closed early, and faults


class Fault(Exception):
    pass


class Interrupt(BaseException):
    """Not a request's own fault, even in its mask."""


def left_by_a_fault(engine):
    with engine.stream([[7], [8]]) as stream:
        next(stream)
        raise Fault


def test_a_stream_closed_early_frees_the_engine():
    engine = scripted_engine(SCRIPTS, max_batch=2)
    expected = engine.generate([[7], [8], [9]], SamplingParams(max_new_tokens=12))
    gc.disable()  # what follows must not wait for a collection
    try:
        for _ in engine.stream([[7], [8]]):
            break
        with pytest.raises(Fault):
            left_by_a_fault(engine)
        before = engine.metrics.tokens
        with engine.stream([[7], [8], [9]]) as stream:
            chunks = [next(stream) for _ in range(5)]
    finally:
        gc.enable()
    made = sum(len(result.tokens) for result in stream.results)
    assert engine.metrics.tokens - before == made >= sum(len(chunk.tokens) for chunk in chunks)
    assert [result.finish_reason for result in stream.results] == [None] * 3
    assert next(stream, None) is None
    assert not stream.cancel(0)
    with pytest.raises(RuntimeError, match="the stream has ended"):
        stream.add([7])
    again = engine.generate([[7], [8], [9]], SamplingParams(max_new_tokens=12))
    assert [outcome(result) for result in again] == [outcome(result) for result in expected]
    stream = engine.stream([[7]])
    stream.close()  # before it began
    assert list(stream) == []


FAULTS = [(where, call) for where in ("forward", "prefill", "propose", "admit", "observer", "mask")
          for call in (0, 1, 3)]  # fmt: skip


@pytest.mark.parametrize(("where", "call"), [*FAULTS, ("move", 0)])
def test_a_fault_in_mid_run_leaves_the_engine_as_it_was(where, call, target, heads, monkeypatch):
    """Wherever it comes from, and however often that went well before."""
    prompts = prompts_of(4)
    sampling = [
        params_of(i, frequency_penalty=0.5, max_new_tokens=[6, 40, 12, 10][i], logits_mask=lambda *_: None)
        for i in range(4)
    ]
    engine = Engine(target, heads[0], max_batch=3, **TREE)
    expected = engine.generate(prompts, sampling)
    left = call

    def faulty(real):
        def run(*arguments, **options):
            nonlocal left
            if left == 0:
                raise Interrupt if where == "mask" else Fault
            left -= 1
            return real(*arguments, **options)

        return run

    with monkeypatch.context() as patched:
        broken = sampling
        if where == "observer":
            patched.setattr(engine, "observer", faulty(lambda *_: None))
        elif where == "mask":
            broken = [params_of(0, max_new_tokens=30, logits_mask=faulty(lambda *_: None))] * 4
        else:
            owner = target if where in ("forward", "prefill") else engine.drafter
            patched.setattr(owner, where, faulty(getattr(owner, where)))
        with pytest.raises((Fault, Interrupt)):
            engine.generate(prompts, broken)
    again = engine.generate(prompts, sampling)
    assert [outcome(result) for result in again] == [outcome(result) for result in expected]
    for one, other in zip(again, expected, strict=True):
        assert one.metrics.accepted_lengths == other.metrics.accepted_lengths


def test_rows_are_never_lost(target):
    """A thousand requests of every kind of end leave as many rows as there were."""
    engine = Engine(target, max_batch=3, max_length=40)
    most = []
    engine.observer = lambda batch, *_: most.append(len(batch.requests))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=3)
    cache = [kv.k.data_ptr() for kv in engine._cache]
    ended = {}
    for turn in range(20):
        with engine.stream([[turn % VOCAB]] * 50, sampling) as stream:
            for chunk in stream:
                if chunk.request % 5 == 0:
                    stream.cancel(chunk.request)
                if turn % 4 == 3 and chunk.request == 40:
                    break
        for result in stream.results:
            ended[result.finish_reason] = ended.get(result.finish_reason, 0) + 1
    assert set(ended) == {"stop", "length", "cancelled", None}
    assert max(most) == 3
    assert [kv.k.data_ptr() for kv in engine._cache] == cache
