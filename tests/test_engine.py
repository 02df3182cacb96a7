"""The loop around the ops: budgets, ends, stop strings, streams, batches that change, parameters, metrics."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle_decode.engine import Engine
from eagle_decode.metrics import PHASES, Metrics
from eagle_decode.sampling import SamplingParams
from eagle_decode.sequence import Batch, Request
from oracle_drafter import ChainOfTruth, OracleDrafter, scripted_engine
from random_heads import random_head
from scripted_target import ScriptedTarget
from tiny_models import ByteTokenizer, tiny_head, tiny_target

VOCAB = 97


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB, max_positions=1024)


@pytest.fixture(scope="module")
def plain(target):
    """tokens(prompt, params) of plain decoding, one request at a time."""
    engine = Engine(target, max_batch=1, max_length=1024)

    def tokens(prompt, params=None):
        return engine.generate(prompt, params, speculate=False)[0].tokens

    return tokens


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(VOCAB, size=3 + 7 * i).tolist() for i in range(count)]


# ---- budgets and ends


@pytest.mark.parametrize("budget", range(13))
def test_budget_is_exact(budget):
    script = list(range(100, 150))
    target = ScriptedTarget({7: script})
    drafter = ChainOfTruth(script, levels=5)
    engine = Engine(target, draft=drafter)
    result = engine.generate([7, 8], SamplingParams(max_new_tokens=budget))[0]
    assert result.tokens == script[:budget]
    assert result.finish_reason == "length"
    assert sum(result.metrics.accepted_lengths) == -(-max(budget - 1, 0) // 6)
    assert (
        engine.generate([7, 8], SamplingParams(max_new_tokens=budget), speculate=False)[0].tokens
        == script[:budget]
    )


def test_no_budget_leaves_the_prompt_untouched():
    target = ScriptedTarget({7: [1, 2, 3]})
    result = Engine(target, tokenizer=ByteTokenizer()).generate(
        [7], SamplingParams(max_new_tokens=0, logprobs=True)
    )[0]
    assert (result.tokens, result.text, result.logprobs, result.finish_reason) == ([], "", [], "length")
    assert target.passes == 0
    assert result.metrics.cycles == result.metrics.tokens == 0


def test_the_end_of_the_context(target, plain):
    prompt = prompts_of(1)[0]
    whole = plain(prompt, SamplingParams(max_new_tokens=None))
    assert len(whole) == 1024 - len(prompt)
    for length in (len(prompt) + 1, len(prompt) + 2, 24, 64):
        engine = Engine(
            target,
            draft=OracleDrafter({0: whole}, levels=5, max_nodes=64, vocab_size=VOCAB),
            max_length=length,
        )
        for speculate in (False, True):
            result = engine.generate(prompt, SamplingParams(max_new_tokens=None), speculate=speculate)[0]
            assert result.tokens == whole[: length - len(prompt)]
            assert result.finish_reason == "length"
    engine = Engine(target, max_length=len(prompt))
    assert engine.generate(prompt, SamplingParams(max_new_tokens=None))[0].tokens == []
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at most max_length = 2 tokens, got 3"):
        Engine(target, max_length=2).generate(prompt)


def test_a_head_drafts_up_to_the_end_of_the_context(target, plain):
    prompt = prompts_of(1)[0]
    engine = Engine(
        target, tiny_head("eagle3", target), levels=4, draft_top_k=6, max_nodes=40, max_length=40, max_batch=1
    )
    result = engine.generate(prompt, SamplingParams(max_new_tokens=None))[0]
    assert result.tokens == plain(prompt, SamplingParams(max_new_tokens=40 - len(prompt)))
    assert result.metrics.draft_tokens > 0
    assert engine.drafter.head.max_positions >= 40 + 4  # not the head's own 32: its angles must not run out


@pytest.mark.parametrize(
    "eos",
    [104, [104], (203, 104), torch.tensor([203, 104]), [104, 203, 104]],
    ids=["int", "list", "tuple", "tensor", "twice"],
)
def test_any_end_id_ends_inside_the_accepted_run(eos):
    script = [101, 102, 103, 104, 105, 106, 107, 104]
    for speculate in (False, True):
        target = ScriptedTarget({7: script}, eos=eos)
        drafter = ChainOfTruth(script, levels=6)
        result = Engine(target, tokenizer=ByteTokenizer(), draft=drafter).generate([7], speculate=speculate)[
            0
        ]
        assert result.tokens == [101, 102, 103, 104]
        assert (result.finish_reason, result.stop_reason) == ("stop", 104)
        assert result.text == "efg"  # the end id is a token of the result, but no text


def test_end_ids_of_none_and_ignored_ones_never_end():
    script = [101, 102, 103, 104, 105, 106]
    for eos, params in [
        (None, SamplingParams(max_new_tokens=6)),
        (104, SamplingParams(max_new_tokens=6, ignore_eos=True)),
        (104, SamplingParams(max_new_tokens=6, ignore_eos=True, stop_token_ids=(250,))),
    ]:
        for speculate in (False, True):
            drafter = ChainOfTruth(script, levels=3)
            engine = Engine(ScriptedTarget({7: script}, eos=eos), draft=drafter)
            result = engine.generate([7], params, speculate=speculate)[0]
            assert (result.tokens, result.finish_reason) == (script, "length")


def test_own_stop_ids_beside_the_models():
    script = [101, 102, 103, 104, 105, 106]
    engine = Engine(ScriptedTarget({7: script}, eos=105))
    many = [SamplingParams(stop_token_ids=ids) for ids in [(), (103,), (250, 102, 103, 251), None]]
    results = [engine.generate([7], params)[0].tokens for params in many]
    assert results == [script[:5], script[:3], script[:2], script[:5]]
    together = engine.generate([[7]] * 4, many)  # rows with fewer stop ids than their neighbours
    assert [result.tokens for result in together] == results


def test_a_drafted_end_id_alone_never_ends():
    class EndsEverywhere(OracleDrafter):
        def propose(self, batch):
            tree = super().propose(batch)
            tree.tokens[:, 1:][tree.tokens[:, 1:] != 0] = 104
            return tree

    script = [101, 102, 103, 105, 106]
    drafter = EndsEverywhere({0: script}, levels=3, max_nodes=4, vocab_size=256, branching=1)
    result = Engine(ScriptedTarget({7: script}, eos=104), draft=drafter).generate(
        [7], SamplingParams(max_new_tokens=5)
    )[0]
    assert result.tokens == script


# ---- batches that change


def test_more_prompts_than_rows(target, plain):
    """Requests of many lengths come and go; each gets what it gets alone, and drafts as it does alone."""
    prompts = prompts_of(9)
    random = np.random.default_rng(5)
    sampling = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.8])),
            seed=i,
            max_new_tokens=int(random.integers(0, 40)),
            n=1,
        )
        for i in range(len(prompts))
    ]
    alone = [plain(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    head = tiny_head("eagle3", target, draft_vocab=60)
    for options in ({}, {"head": head, "levels": 3, "draft_top_k": 6, "max_nodes": 24}):
        for max_batch in (1, 2, 4):
            results = Engine(target, max_batch=max_batch, max_length=256, **options).generate(
                prompts, sampling
            )
            assert [result.tokens for result in results] == alone


def test_a_request_drafts_the_same_alone_and_among_others(target, plain):
    """Neighbours that join, finish and make room leave a request's draft cache alone: the accepted lengths
    stay equal."""
    head = tiny_head("eagle3", target)
    options = {"levels": 3, "draft_top_k": 8, "max_nodes": 48, "max_length": 512}
    prompts = prompts_of(7, seed=2)
    sampling = []
    single = Engine(target, head, max_batch=1, **options)
    # ends by a stop id, far from any budget: budgets change the tree's shape
    for i, prompt in enumerate(prompts):
        at = 8 + 5 * i
        tokens = plain(prompt, SamplingParams(temperature=1.0, seed=i, max_new_tokens=at + 1))
        sampling.append(
            SamplingParams(temperature=1.0, seed=i, max_new_tokens=400, stop_token_ids=(tokens[at],))
        )
    alone = [single.generate(prompt, params)[0] for prompt, params in zip(prompts, sampling, strict=True)]
    assert sum(result.metrics.accepted_tokens for result in alone) > 10
    for max_batch in (2, 3):
        together = Engine(target, head, max_batch=max_batch, **options).generate(prompts, sampling)
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            assert one.metrics.accepted_lengths == other.metrics.accepted_lengths


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_trees_do_not_depend_on_how_the_prefix_came(target, kind):
    """A prefix read as a prompt and the same prefix decoded cycle by cycle lead to the same trees, bit for
    bit."""
    trees: dict[int, dict[int, list]] = {}

    def watch(run):
        def observer(batch, rows, tree, logits):
            position = int(batch.seq_lens[0])
            trees.setdefault(run, {})[position] = [tree.tokens[0].tolist(), tree.scores[0].tolist()]

        return observer

    engine = Engine(
        target, tiny_head(kind, target), levels=3, draft_top_k=8, max_nodes=32, max_length=900, max_batch=1
    )
    prompt = np.random.default_rng(4).integers(VOCAB, size=300).tolist()  # longer than a chain of the prefill
    engine.observer = watch(0)
    whole = engine.generate(prompt, SamplingParams(max_new_tokens=300))[0].tokens
    for extra in (1, 17, 230):
        engine.observer = watch(extra)
        engine.generate(prompt + whole[:extra], SamplingParams(max_new_tokens=60))
        begin = len(prompt) + extra
        common = [p for p in trees[extra] if p in trees[0] and begin < p < begin + 50]
        assert len(common) > 10
        assert [trees[extra][p] for p in common] == [trees[0][p] for p in common]


def test_seeds_and_samples(target, plain):
    prompt = prompts_of(1, seed=8)[0]
    params = SamplingParams(temperature=1.0, seed=40, max_new_tokens=20, n=3)
    engine = Engine(target, tiny_head("eagle3", target), max_batch=2)
    results = engine.generate([prompt, prompt], params)
    assert [(result.prompt, result.sample) for result in results] == [
        (p, s) for p in range(2) for s in range(3)
    ]
    alone = [plain(prompt, SamplingParams(temperature=1.0, seed=40 + i, max_new_tokens=20)) for i in range(3)]
    assert [result.tokens for result in results] == alone * 2
    assert len({tuple(tokens) for tokens in alone}) == 3
    below = plain(prompt, SamplingParams(temperature=1.0, seed=-1, max_new_tokens=20))
    assert below == plain(prompt, SamplingParams(temperature=1.0, seed=2**64 - 1, max_new_tokens=20))
    assert below != alone[0]


def test_tiny_temperatures_are_greedy(target, plain):
    prompt = prompts_of(1, seed=9)[0]
    greedy = plain(prompt, SamplingParams(max_new_tokens=24))
    for temperature in (1e-6, 9.9e-6, 0):
        assert plain(prompt, SamplingParams(temperature=temperature, max_new_tokens=24, seed=5)) == greedy
    assert plain(prompt, SamplingParams(temperature=1.0, max_new_tokens=24, seed=5)) != greedy


def test_joint_and_sequential_top_p_in_one_batch(target, plain):
    prompts = prompts_of(4, seed=11)
    modes = ["joint", "sequential", "sequential", "joint"]
    sampling = [
        SamplingParams(temperature=1.5, top_k=6, top_p=0.6, seed=i, top_k_top_p=mode, max_new_tokens=30)
        for i, mode in enumerate(modes)
    ]
    together = Engine(target, max_batch=4).generate(prompts, sampling)
    alone = [plain(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    assert [result.tokens for result in together] == alone


def test_every_field_of_a_row_moves_together():
    def request(index: int) -> Request:
        return Request(
            index, index, 0, [1], SamplingParams(temperature=index / 10, top_k=index, top_p=0.9, seed=index),
            50, frozenset([index]), None, Metrics(),
        )  # fmt: skip

    batch = Batch(
        4,
        max_nodes=6,
        max_path=3,
        vocab_size=20,
        feature_size=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    asked = SamplingParams(
        top_logprobs=2, frequency_penalty=1, logit_bias={3: 1}, min_new_tokens=1, banned_tokens=[2]
    )
    batch.make_room([dataclasses.replace(request(0), params=asked, stop_tokens=frozenset([3, 4]))])
    for row in range(4):
        batch.put(row, request(row + 1))
    batch.begin_cycle(6)
    constraints = batch.constraints.tensors()
    assert len(constraints) == 10
    for tensor in constraints.values():
        for row in range(4):
            tensor[row] = 10 * (row + 1)
    for name in Batch.ROWS:
        tensor = getattr(batch, name)
        for row in range(4):
            tensor[row] = 10 * (row + 1)
    for row in range(4):
        for tensor in (*batch.sampled, batch.features):
            tensor[row] = row + 1
    assert batch.remove(1) == 3
    assert batch.remove(2) is None
    assert [request.index for request in batch.requests] == [1, 4]
    for name in Batch.ROWS:
        tensor = getattr(batch, name)
        assert tensor.shape[0] == 2
        assert tensor[1].flatten().unique().tolist() == [40], name
    for name, tensor in constraints.items():
        assert tensor[1].flatten().unique().tolist() == [40], name
    for tensor in batch.accepted:
        assert tensor.shape[0] == 2
    for tensor in (*batch.sampled, batch.features):
        assert tensor.shape[:2] == (2, 6)
        assert tensor[1].unique().tolist() == [4]
    with_rows = {
        name for name, value in vars(batch).items() if isinstance(value, torch.Tensor) and value.shape[0] == 2
    }
    assert with_rows - {"features", "_top"} == set(Batch.ROWS)


# ---- arguments


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature: expected a finite number >= 0, got -0.1"),
        ("temperature", float("nan"), "temperature: expected a finite number"),
        ("temperature", float("inf"), "temperature: expected a finite number"),
        ("temperature", "1", "temperature: expected a finite number"),
        ("top_k", -2, "top_k: expected"),
        ("top_k", 1.5, "top_k: expected an integer"),
        ("top_p", 0, r"top_p: expected a number in \(0, 1\]"),
        ("top_p", 1.01, "top_p: expected"),
        ("min_p", -0.1, "min_p: expected"),
        ("min_p", 1.01, "min_p: expected"),
        ("seed", 2**64, "seed: expected an integer of 64 bits"),
        ("seed", None, "seed: expected an integer"),
        ("max_new_tokens", -1, "max_new_tokens: expected an integer >= 0 or None, got -1"),
        ("max_new_tokens", True, "max_new_tokens: expected an integer"),
        ("stop_token_ids", (-1,), "stop_token_ids: expected token ids >= 0"),
        ("stop_token_ids", ("a",), "stop_token_ids: expected an integer"),
        ("stop", ("",), "stop: expected non-empty strings"),
        ("stop", (5,), "stop: expected non-empty strings"),
        ("n", 0, "n: expected an integer >= 1"),
        ("top_k_top_p", "both", "top_k_top_p: expected sequential or joint, got 'both'"),
    ],
)
def test_sampling_parameters_are_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_parameters_that_nobody_implements_are_refused():
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=0.9)


def test_prompts_are_checked():
    engine = Engine(ScriptedTarget({7: [1]}, vocab_size=300))
    for prompts, message in [
        ([[]], r"prompts\[0\]: expected at least one token"),
        ([[7], []], r"prompts\[1\]: expected at least one token"),
        ([[300]], "below the vocabulary's 300, got 300"),
        ([[-1]], "expected token ids >= 0"),
        ([[0.5]], "expected an integer"),
        ("text", "needs a tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.stream(prompts)  # at once, before anything is drawn from the stream
    with pytest.raises(ValueError, match="sampling: expected one for all or 1"):
        engine.generate([[7]], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.generate([[7]], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at least one token"):
        Engine(ScriptedTarget({7: [1]}), tokenizer=ByteTokenizer()).generate("")
    assert engine.generate([]) == []


def test_prompts_of_every_kind():
    engine = Engine(ScriptedTarget({72: list(b"ello")}), tokenizer=ByteTokenizer())
    params = SamplingParams(max_new_tokens=4)
    for prompts in ("H", ["H"], [72], [[72]], (72,), torch.tensor([72]), np.array([[72]]), [np.array([72])]):
        assert [result.text for result in engine.generate(prompts, params)] == ["ello"]


def test_numbers_in_tensors_are_tokens_of_one_prompt():
    engine = Engine(ScriptedTarget({5: list(b"ello")}))
    for prompts in (list(torch.tensor([5, 6, 7])), [np.array(5), np.array(6), np.array(7)]):
        (result,) = engine.generate(prompts, SamplingParams(max_new_tokens=1))
        assert result.metrics.prompt_tokens == 3


class Rootless(OracleDrafter):
    """Spoils the tree of one row."""

    def __init__(self, token: int | None):
        super().__init__({0: [1] * 20}, levels=2, max_nodes=4, vocab_size=9)
        self._token = token

    def propose(self, batch):
        tree = super().propose(batch)
        if self._token is None:
            tree.num_nodes[0] = 0
        else:
            tree.tokens[0, 0] = self._token
        return tree


@pytest.mark.parametrize(("token", "got"), [(None, "no node"), (3, "3")])
def test_a_drafter_starts_from_the_root(token, got):
    engine = Engine(ScriptedTarget({7: [1] * 20}), draft=Rootless(token))
    with pytest.raises(ValueError, match=f"^draft: expected the root 1 in row 0 of the tree, got {got}$"):
        engine.generate([7], SamplingParams(max_new_tokens=9))


def test_shapes_are_checked(target):
    head = tiny_head("eagle3", target, draft_vocab=8)
    for options, message in [
        ({"levels": 0}, "levels: expected"),
        ({"levels": 32}, "levels: expected 1 to 31"),
        ({"draft_top_k": 0}, "draft_top_k: expected 1 to 32"),
        ({"draft_top_k": 9}, "draft vocabulary's 8"),
        ({"draft_top_k": 32, "levels": 10}, "at most 8192"),
        ({"max_nodes": 0}, "max_nodes: expected 1 to 256"),
        ({"max_nodes": 257}, "max_nodes: expected 1 to 256"),
        ({"max_batch": 0}, "max_batch: expected at least 1"),
        ({"max_length": 1025}, "max_length: expected 1 to the target's 1024"),
        ({"tau": 0.0}, "tau: expected a finite number > 0"),
        (
            {"draft": OracleDrafter({}, levels=1, max_nodes=2, vocab_size=9)},
            "head: expected None beside a draft",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            Engine(target, head, **options)


def test_a_head_from_a_folder(target, plain, tmp_path):
    config, tensors = random_head("eagle3", hidden=target.hidden_size, vocab=VOCAB)
    del tensors["embed_tokens.weight"]  # the target's own
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    prompt = prompts_of(1, seed=14)[0]
    for folder in (tmp_path, str(tmp_path)):
        result = Engine(target, folder).generate(prompt, SamplingParams(max_new_tokens=12))[0]
        assert result.tokens == plain(prompt, SamplingParams(max_new_tokens=12))
        assert result.metrics.draft_tokens > 0
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Engine(target, tmp_path / "nowhere")


def test_a_head_narrower_than_attention_knows(target, plain):
    prompt = prompts_of(1, seed=15)[0]
    head = tiny_head("eagle3", target, head_dim=16)
    result = Engine(target, head).generate(prompt, SamplingParams(max_new_tokens=12))[0]
    assert result.tokens == plain(prompt, SamplingParams(max_new_tokens=12))
    assert result.metrics.draft_tokens > 0


@pytest.mark.parametrize(
    ("top_k", "levels", "max_nodes"),
    [(4, 1, 5), (1, 5, 6), (8, 5, 64), (2, 1, 64), (8, 1, 61), (3, 2, 1), (1, 40, 41)],
)
def test_degenerate_trees(target, plain, top_k, levels, max_nodes):
    head = tiny_head("eagle3", target, draft_vocab=8)
    engine = Engine(target, head, levels=levels, draft_top_k=top_k, max_nodes=max_nodes, max_batch=1)
    prompt = prompts_of(1, seed=13)[0]
    assert engine.generate(prompt, SamplingParams(max_new_tokens=50))[0].tokens == plain(
        prompt, SamplingParams(max_new_tokens=50)
    )


def test_what_a_target_lacks_is_named():
    class Half:
        config, dtype, device, vocab_size = {}, torch.float32, torch.device("cpu"), 9

    with pytest.raises(ValueError, match="got Half without .*'max_positions'.*'forward', 'prefill'"):
        Engine(Half())


def test_a_tree_wider_than_agreed_is_refused():
    drafter = ChainOfTruth(list(range(60, 80)), levels=5)
    drafter.propose = functools.partial(_widen, drafter.propose)
    engine = Engine(ScriptedTarget({7: list(range(60, 80))}), draft=drafter)
    with pytest.raises(ValueError, match="trees of at most max_nodes = 6 nodes, got 9"):
        engine.generate([7])


def _widen(propose, batch):
    tree = propose(batch)
    return tree._replace(tokens=torch.nn.functional.pad(tree.tokens, (0, 9 - tree.tokens.shape[1])))


def test_a_drafter_that_is_never_right_is_reported_once():
    script = list(range(60, 130))
    drafter = OracleDrafter({0: [1] * 70}, levels=3, max_nodes=6, vocab_size=50)
    engine = Engine(ScriptedTarget({7: script}), draft=drafter)
    with pytest.warns(RuntimeWarning, match="draft tokens was accepted: is the head made for this target"):
        assert engine.generate([7], SamplingParams(max_new_tokens=70))[0].tokens == script
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([7], SamplingParams(max_new_tokens=70))


def test_logits_that_hold_no_number_are_an_error():
    target = ScriptedTarget({7: [65] * 20})
    target.spoil_after = 6
    engine = Engine(target)
    (result,) = engine.generate([7])
    assert (len(result.tokens), result.finish_reason) == (5, "error")
    assert result.error.startswith("request 0: the target's logits at position 6 hold no number")
    target.spoil_after = 10**9
    assert engine.generate([7], SamplingParams(max_new_tokens=3))[0].tokens == [65] * 3


def test_one_stream_at_a_time():
    engine = scripted_engine({7: list(range(60, 100))})
    stream = engine.stream([7])
    next(stream)
    with pytest.raises(RuntimeError, match="already generating"):
        engine.generate([7])
    stream.close()
    assert engine.generate([7], SamplingParams(max_new_tokens=5))[0].tokens == [60, 61, 62, 63, 64]


# ---- metrics


def test_counts_add_up():
    scripts = {7: list(range(100, 160)), 8: list(range(60, 130)), 9: list(b"and so on <end> unseen")}
    engine = scripted_engine(scripts, levels=4, max_nodes=10, max_batch=2)
    sampling = [
        SamplingParams(max_new_tokens=41),
        SamplingParams(max_new_tokens=33),
        SamplingParams(stop="<end>"),
    ]
    results = engine.generate([[7], [8, 1], [9]], sampling)
    for result in results:
        metrics = result.metrics
        assert sum(metrics.accepted_lengths) == metrics.cycles
        assert (
            metrics.tokens
            == len(result.tokens)
            == 1 + metrics.accepted_tokens + metrics.cycles - metrics.cut_tokens
        )
        assert metrics.first_tokens == metrics.requests == 1
        assert metrics.draft_tokens >= metrics.accepted_tokens > 0
        assert all(0 <= rate <= 1 for rate in metrics.acceptance_per_depth)
        assert metrics.tokens_per_cycle == (metrics.accepted_tokens + metrics.cycles) / metrics.cycles
    assert results[2].text == "and so on "
    total = engine.metrics
    assert total.requests == 3
    assert total.prompt_tokens == 4
    assert total.tokens == sum(len(result.tokens) for result in results)
    assert total.accepted_tokens == sum(result.metrics.accepted_tokens for result in results)
    assert sum(total.accepted_lengths) == total.cycles
    read = json.loads(total.to_json())
    assert read["tokens_per_cycle"] == total.tokens_per_cycle
    assert set(read["seconds"]) == set(PHASES)
    assert all(seconds > 0 for seconds in total.seconds.values())


def test_acceptance_per_depth():
    metrics = Metrics(speculative=True)
    for length in (0, 0, 1, 3):
        metrics.count_cycle(length, 8)
    assert metrics.accepted_lengths == [2, 1, 0, 1]
    assert metrics.acceptance_per_depth == [0.5, 0.5, 1.0]
    assert metrics.tokens_per_cycle == 2.0


def test_plain_decoding_says_so():
    engine = Engine(ScriptedTarget({7: [65] * 9}))
    metrics = engine.generate([7], SamplingParams(max_new_tokens=9))[0].metrics
    assert not metrics.speculative
    assert (metrics.cycles, metrics.tokens, metrics.draft_tokens, metrics.plain_cycles) == (8, 9, 0, 0)
    assert metrics.tokens_per_cycle == 1.0


def test_cycles_without_use_for_a_draft_are_counted(target):
    engine = Engine(target, tiny_head("eagle3", target), max_batch=1)
    metrics = engine.generate([1, 2], SamplingParams(max_new_tokens=2))[0].metrics
    assert (metrics.cycles, metrics.plain_cycles, metrics.draft_tokens) == (1, 1, 0)
