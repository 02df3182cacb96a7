"""What SamplingState does: against a naive oracle on random trees, by hand, and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_cuda.sampling import Sampled, SamplingState, sample_tokens
from eagle_cuda.tree import tree_from_parents
from guarded import Guards
from reference import sampling as naive
from sampling_cases import CORNER_VOCAB, CORNERS, make_corner
from state_cases import make_state_case, pack_mask

INF, NAN = float("inf"), float("nan")


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def greedy(logits, **options) -> Sampled:
    """Rows [N, V] of one request at T = 0."""
    rows = torch.as_tensor(logits, dtype=torch.float32)[None]
    arguments = {
        "temperature": torch.zeros(1),
        "seeds": torch.zeros(1, dtype=torch.int64),
        "positions": torch.zeros(rows.shape[:2], dtype=torch.int32),
    }
    return sample_tokens(rows, **arguments | options)


def counts(tokens, vocab: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab).int()[None]


# ---- against the oracle ------------------------------------------------------------------------------------

TALLY = {"close": 0, "all": 0, "flagged": 0}


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 16, 70, 300])
def test_random_trees_and_requests(vocab, dtype):
    """C19, C29: a node sees prompt, output and its own ancestors, and its own mask, nothing else."""
    num_top = min(4, vocab)
    for seed in range(6):
        case = make_state_case(vocab, 12, seed, dtype=dtype)
        guards, shape = Guards(), case.logits.shape[:2]
        out = Sampled(
            guards.new(*shape),
            guards.new(*shape, dtype=torch.float32),
            guards.new(*shape),
            guards.new(*shape, num_top),
            guards.new(*shape, num_top, dtype=torch.float32),
        )
        case.call(out=out)
        guards.check()
        for b in range(shape[0]):
            for n in range(shape[1]):
                check_row(case, out, b, n)


def check_row(case, out: Sampled, b: int, n: int) -> None:
    got = [t[b, n].tolist() for t in out]
    if n >= case.settings["num_nodes"][b]:
        assert got == [0, 0.0, 0, [0] * len(got[3]), [0.0] * len(got[3])]
        return
    state, settings = case.state, {name: t[b].tolist() for name, t in case.settings.items()}
    row = case.logits[b, n].float().numpy()
    allowed = naive.allowed_tokens(
        len(row),
        mask=state.token_mask[b, n],
        stop_tokens=state.stop_tokens[b],
        early=settings["positions"][n] < int(state.prompt_lens[b] + state.min_new_tokens[b]),
    )

    def penalty(values, off):
        value = float(values[b])
        return off if np.isnan(value) else value

    repetition = penalty(state.repetition_penalty, 1.0)
    adjusted = naive.adjust(
        row,
        prompt=case.prompts[b],
        output=case.outputs[b]
        + naive.output_at(n, case.tree.tokens[b].tolist(), case.tree.parents[b].tolist()),
        repetition=repetition if repetition > 0 else 1.0,
        frequency=penalty(state.frequency_penalty, 0.0),
        presence=penalty(state.presence_penalty, 0.0),
        bias=list(zip(state.bias_tokens[b].tolist(), state.bias_values[b].tolist())),
        allowed=set(allowed),
    )
    token, flag, margin = naive.sample(
        adjusted,
        temperature=np.float32(settings["temperature"]),
        seed=settings["seeds"],
        position=settings["positions"][n],
        top_k=settings["top_k"],
        top_p=np.float32(settings["top_p"]),
        min_p=np.float32(settings["min_p"]),
        rule=case.rule,
    )
    if flag:
        token = allowed[0] if allowed else 0
    TALLY["all"] += 1
    TALLY["close"] += margin < 2e-6
    TALLY["flagged"] += flag
    assert got[0] == token or margin < 2e-6, (b, n)
    assert got[2] == flag
    exact = naive.log_softmax_at(row, got[0])
    assert got[1] == exact or abs(got[1] - exact) <= 1e-6 + 2.0**-22 * abs(exact)
    tokens, log_probs = naive.top(row, len(got[3]))
    assert got[3] == tokens
    assert got[4] == pytest.approx(log_probs, rel=2.0**-20, abs=1e-6)


def test_few_rows_were_close_and_some_flagged():
    if not TALLY["all"]:
        pytest.skip("runs after test_random_trees_and_requests")
    assert TALLY["close"] <= 0.05 * TALLY["all"], TALLY
    assert TALLY["flagged"] >= 20, TALLY


def test_row_invariance_with_a_state(one_and_two_threads):
    """The same bits with one thread and with two, and of each request alone."""
    case = make_state_case(300, 12, 2)
    one, two = one_and_two_threads(lambda: case.call(num_top=5))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    for row in range(case.logits.shape[0]):
        own = slice(row, row + 1)
        alone = sample_tokens(
            case.logits[own],
            **{name: value[own] for name, value in case.settings.items()},
            tree=type(case.tree)(*(value[own] for value in case.tree)),
            state=SamplingState(*(value[own] for value in case.state)),
            num_top=5,
        )
        for a, b in zip(one, alone, strict=True):
            assert torch.equal(a[own].view(torch.int32), b.view(torch.int32))


# ---- by hand -----------------------------------------------------------------------------------------------


@pytest.mark.op("sample_tokens")
def test_c19_a_frequency_penalty_along_a_chain_of_the_favourite():
    """V = 16, frequency penalty 2, a target that always prefers 3 by 5 over 4, chain [3, 3, 3, 3]."""
    row = torch.zeros(16)
    row[3], row[4] = 5.0, 0.5
    tree = tree_from_parents([[9, 3, 3, 3, 3]], [[-1, 0, 1, 2, 3]])
    state = SamplingState(output_counts=counts([9], 16), frequency_penalty=torch.tensor([2.0]))
    # 5, 3, 1, -1, -3 for token 3.
    assert greedy(row.repeat(5, 1), tree=tree, state=state).tokens.tolist() == [[3, 3, 3, 4, 4]]
    # Siblings do not add up.
    star = tree_from_parents([[9, 3, 3, 3, 3]], [[-1, 0, 0, 0, 0]])
    assert greedy(row.repeat(5, 1), tree=star, state=state).tokens.tolist() == [[3] * 5]
    # The plain loop, whose counts hold what the tree held.
    for depth, token in enumerate([3, 3, 3, 4, 4]):
        plain = state._replace(output_counts=counts([9] + [3] * depth, 16))
        assert greedy(row[None], state=plain).tokens.tolist() == [[token]]


@pytest.mark.op("sample_tokens")
def test_c29_a_mask_per_node():
    """Grammar "ab|cd": under the root a or c, under a only b, under c only d."""
    a, b, c, d = range(4)
    tree = tree_from_parents([[9, a, b, c, d]], [[-1, 0, 1, 0, 3]])
    allowed = np.zeros((1, 5, 32), bool)
    for node, tokens in enumerate([[a, c], [b], [], [d], []]):
        allowed[0, node, tokens] = True
    out = greedy(torch.zeros(5, 10), tree=tree, state=SamplingState(token_mask=pack_mask(allowed)))
    assert out.tokens.tolist() == [[a, b, 0, d, 0]]
    assert out.flags.tolist() == [[0, 0, 1, 0, 1]]  # the grammar has ended: nothing is allowed


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("vocab", [40, 300])
def test_nothing_left_gives_the_lowest_allowed_token(vocab):
    """C21: masked, NaN, -inf; an id of the vocabulary all the same, and a flag."""
    rows = torch.zeros(4, vocab)
    rows[0], rows[1], rows[1, 36:39] = NAN, 1.0, -INF
    allowed = np.zeros((1, 4, 320), bool)
    allowed[0, :3, 36:39] = True
    allowed[0, 2, vocab:] = True
    state = SamplingState(
        token_mask=pack_mask(allowed)[..., : (vocab + 31) // 32].contiguous(),
        min_new_tokens=int32([1]),
        prompt_lens=int32([0]),
        stop_tokens=int32([[36, -1]]),
        bias_tokens=int32([[37, 38]]),
        bias_values=torch.tensor([[-INF, -INF]]),
    )
    out = greedy(rows, state=state)
    assert out.tokens.tolist() == [[37, 37, 37, 0]]
    assert out.flags.tolist() == [[1, 1, 1, 1]]
    assert out.log_probs[0, :2].tolist() == [-INF, -INF]
    assert out.log_probs[0, 2].item() == pytest.approx(-np.log(vocab), rel=1e-6)  # of the untouched logits


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("vocab", [40, 300])
def test_order_of_what_a_state_does(vocab):
    """Bias before the repetition penalty, which asks for the sign after it; a mask beats any bias."""
    row = torch.full((vocab,), -3.0)
    row[7], row[8] = 2.0, 1.5
    state = SamplingState(
        prompt_counts=counts([8], vocab),
        repetition_penalty=torch.tensor([2.0]),
        bias_tokens=int32([[8, 8, vocab, -1]]),
        bias_values=torch.tensor([[1.0, 1.6, INF, INF]]),  # 4.1 / 2 = 2.05
    )
    assert greedy(row[None], state=state).tokens.tolist() == [[8]]
    less = state._replace(bias_values=torch.tensor([[1.0, 1.4, INF, INF]]))  # 3.9 / 2 = 1.95
    assert greedy(row[None], state=less).tokens.tolist() == [[7]]
    allowed = np.ones((1, 1, 320), bool)
    allowed[..., 8] = False
    forced = SamplingState(
        bias_tokens=int32([[8]]),
        bias_values=torch.tensor([[INF]]),
        token_mask=pack_mask(allowed)[..., : (vocab + 31) // 32].contiguous(),
    )
    assert greedy(row[None], state=forced).tokens.tolist() == [[7]]


@pytest.mark.op("sample_tokens")
def test_one_mask_for_all_nodes_and_the_same_in_full():
    random = np.random.default_rng(1)
    mask = pack_mask(random.random((2, 1, 320)) < 0.3)
    logits = torch.tensor(random.normal(size=(2, 5, 320)), dtype=torch.float32)
    arguments = {
        "temperature": torch.ones(2),
        "seeds": torch.tensor([3, 4]),
        "positions": torch.arange(10, dtype=torch.int32).view(2, 5),
    }
    one = sample_tokens(logits, **arguments, state=SamplingState(token_mask=mask.expand(2, 5, 10)))
    full = sample_tokens(logits, **arguments, state=SamplingState(token_mask=mask.repeat(1, 5, 1)))
    for a, b in zip(one[:3], full[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("order", ["ascending", "descending", "flat", "corner"])
def test_the_n_best_of_rows_that_fill_the_list(order):
    vocab = CORNER_VOCAB if order == "corner" else 20001
    row = torch.arange(vocab, dtype=torch.float32) / vocab
    row = {
        "ascending": row,
        "descending": row.flip(0),
        "flat": torch.zeros(vocab),
        "corner": make_corner(CORNERS["counted"]),
    }[order]
    out = greedy(row[None], num_top=32)
    tokens, log_probs = naive.top(row.numpy(), 32)
    assert out.top_tokens[0, 0].tolist() == tokens
    assert out.top_log_probs[0, 0].tolist() == pytest.approx(log_probs, rel=1e-5, abs=1e-5)


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize(
    ("options", "reads", "beside"),
    [
        ({"temperature": 0.0}, 1, 8),
        ({"temperature": 1.0, "top_p": 0.9}, 3, 8),
        ({"temperature": 1.0, "top_k": 12000, "top_p": 0.9}, 4, 8),
    ],
)
def test_reads_of_a_row_with_a_state(options, reads, beside, simulator):
    """At most four reads of the logits as without a state; beside each, the counts, and one bit of the mask,
    of which a thread reads the word that holds it. The n best take one more read of the logits alone."""
    vocab = 32001
    random = np.random.default_rng(2)
    logits = torch.tensor(random.normal(0, 3, (1, 1, vocab)), dtype=torch.float32)
    arguments = {
        "seeds": torch.zeros(1, dtype=torch.int64),
        "positions": int32([[5]]),
        **{k: torch.tensor([v], dtype=torch.int32 if k == "top_k" else None) for k, v in options.items()},
    }
    penalties = SamplingState(
        prompt_counts=counts([5, 6], vocab),
        output_counts=counts([7], vocab),
        repetition_penalty=torch.tensor([1.2]),
        frequency_penalty=torch.tensor([0.5]),
    )
    with simulator.counting() as counters:
        sample_tokens(logits, **arguments, state=penalties)
    assert reads * (4 + beside) * vocab <= counters.global_load_bytes
    assert counters.global_load_bytes <= reads * (4 + beside) * vocab + 256
    with simulator.counting() as counters:
        sample_tokens(logits, **arguments, num_top=20)
    assert (reads + 1) * 4 * vocab <= counters.global_load_bytes <= (reads + 1) * 4 * vocab + 256
    mask = SamplingState(token_mask=torch.full((1, 1, (vocab + 31) // 32), -1, dtype=torch.int32))
    with simulator.counting() as counters:
        sample_tokens(logits, **arguments, state=mask)
    # A word for each vector of 4 logits, two where it crosses a word's end.
    assert counters.global_load_bytes <= reads * (4 + 2) * vocab + 256


# ---- against transformers ----------------------------------------------------------------------------------


def processors():
    """name -> (transformers' processors in our order, our arguments)."""
    hf = pytest.importorskip("transformers.generation.logits_process")
    prompt = [3, 5, 5, 9]

    def processed(*chain):
        def run(row):
            scores = row[None].clone()
            for processor in chain:
                scores = processor(torch.tensor([prompt]), scores)
            return scores[0]

        return run

    vocab = 60
    mask = np.ones((1, 1, 64), bool)
    mask[..., [3, 9, 20]] = False
    stops = {
        "min_new_tokens": int32([5]),
        "prompt_lens": int32([4]),
        "stop_tokens": int32([[2, 7]]),
    }
    return {
        "repetition": (
            processed(hf.RepetitionPenaltyLogitsProcessor(1.7)),
            {
                "state": SamplingState(
                    prompt_counts=counts(prompt, vocab), repetition_penalty=torch.tensor([1.7])
                )
            },
        ),
        "suppress": (
            processed(hf.SuppressTokensLogitsProcessor([3, 9, 20])),
            {"state": SamplingState(token_mask=pack_mask(mask))},
        ),
        "allowed": (
            processed(hf.PrefixConstrainedLogitsProcessor(lambda *_: [3, 9, 20], 1)),
            {"state": SamplingState(token_mask=~pack_mask(mask))},
        ),
        "bad words": (
            processed(hf.NoBadWordsLogitsProcessor([[3], [9], [20]])),
            {"state": SamplingState(token_mask=pack_mask(mask))},
        ),
        "min-p": (processed(hf.MinPLogitsWarper(0.2)), {"min_p": torch.tensor([0.2])}),
        "bias": (
            processed(hf.SequenceBiasLogitsProcessor([[[4], 2.5], [[5], -3.0]])),
            {"state": SamplingState(bias_tokens=int32([[4, 5]]), bias_values=torch.tensor([[2.5, -3.0]]))},
        ),
        "min new tokens": (
            processed(hf.MinNewTokensLengthLogitsProcessor(4, 5, [2, 7])),
            {"state": SamplingState(**stops)},
        ),
        "temperature, top-k": (
            processed(hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(6)),
            {"temperature": torch.tensor([0.7]), "top_k": int32([6])},
        ),
        "top-p": (processed(hf.TopPLogitsWarper(0.8)), {"top_p": torch.tensor([0.8])}),
        "top-k, top-p, min-p": (
            processed(hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.05)),
            {"top_k": int32([20]), "top_p": torch.tensor([0.9]), "min_p": torch.tensor([0.05])},
        ),
        "all": (
            processed(
                hf.SequenceBiasLogitsProcessor([[[4], 2.5], [[5], -3.0]]),
                hf.RepetitionPenaltyLogitsProcessor(1.7),
                hf.MinNewTokensLengthLogitsProcessor(4, 5, [2, 7]),
                hf.SuppressTokensLogitsProcessor([3, 9, 20]),
                hf.TemperatureLogitsWarper(0.7),
                hf.TopKLogitsWarper(20),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.05),
            ),
            {
                "temperature": torch.tensor([0.7]),
                "top_k": int32([20]),
                "top_p": torch.tensor([0.9]),
                "min_p": torch.tensor([0.05]),
                "state": SamplingState(
                    prompt_counts=counts(prompt, vocab),
                    repetition_penalty=torch.tensor([1.7]),
                    bias_tokens=int32([[4, 5]]),
                    bias_values=torch.tensor([[2.5, -3.0]]),
                    token_mask=pack_mask(mask),
                    **stops,
                ),
            },
        ),
    }


NAMES = ["repetition", "suppress", "allowed", "bad words", "bias", "min new tokens", "temperature, top-k"]
NAMES += ["top-p", "min-p", "top-k, top-p, min-p", "all"]


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers(name):
    """The noisy argmax over what transformers' processors leave, row by row: the same token."""
    run, options = processors()[name]
    generator = torch.Generator().manual_seed(5)
    differing = 0
    for i in range(200):
        row = torch.randn(60, generator=generator) * 2
        arguments = {"temperature": torch.ones(1), "seeds": torch.tensor([i]), "positions": int32([[4]])}
        token = sample_tokens(row[None, None], **arguments | options).tokens.item()
        score = run(row).double().numpy() + naive.gumbel(i, 4, 60)
        best = np.sort(score)[::-1]
        assert token == int(np.argmax(score)) or best[0] - best[1] < 1e-5
        plain = row.double().numpy() + naive.gumbel(i, 4, 60)
        differing += token != int(np.argmax(plain))
    assert differing >= 3, "the processor changed nothing: the test says nothing"


@pytest.mark.op("sample_tokens")
def test_a_repetition_penalty_along_a_tree_is_transformers_on_the_path():
    """Each node's scores are what transformers' processor makes of prompt, output and the node's own path,
    tokens that repeat on it included."""
    hf = pytest.importorskip("transformers.generation.logits_process")
    processor, vocab = hf.RepetitionPenaltyLogitsProcessor(1.7), 30
    prompt, output = [3, 5, 5], [9, 5]
    tokens = [5, 3, 7, 7, 12, 7, 9, 12]
    parents = [-1, 0, 0, 1, 3, 3, 2, 4]
    tree = tree_from_parents([tokens], [parents])
    state = SamplingState(
        prompt_counts=counts(prompt, vocab), output_counts=counts(output, vocab),
        repetition_penalty=torch.tensor([1.7]),
    )  # fmt: skip
    logits = torch.randn(20, len(tokens), vocab, generator=torch.Generator().manual_seed(3)) * 2
    differing = 0
    for rows in logits:
        chosen = greedy(rows, tree=tree, state=state).tokens[0].tolist()
        for node, row in enumerate(rows):
            path = naive.output_at(node, tokens, parents)
            scores = processor(torch.tensor([prompt + output + path]), row[None].clone())[0]
            assert chosen[node] == int(scores.argmax())
            differing += chosen[node] != int(row.argmax())
    assert differing > 10
