"""lm_head_topk against fp64: order, log-probabilities, noise, ties, values that are no numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import assert_same_bits
from eagle_cuda.linear import TopK, linear, lm_head_topk, pack_weight
from eagle_cuda.sampling import gumbel_noise
from linear_inputs import DTYPES, FORMATS, INF, NAN, head_case, normal
from reference import linear as naive
from reference.sampling import gumbel

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: FORMATS[d])


def check_topk(got: TopK, logits, k, options, tau=1.0):
    vocab = logits.shape[1]
    ids = options.get("draft_to_target", torch.arange(vocab, dtype=torch.int32))
    for row in range(logits.shape[0]):
        temperature, noise = 0.0, None
        if "temperature" in options:
            temperature = float(options["temperature"][row])
            seed, position = int(options["seeds"][row]), int(options["positions"][row])
            noise = torch.from_numpy(gumbel(seed, position, int(ids.max()) + 1))[ids.long()]
        best, log_probs, lse = naive.topk(logits[row], k, noise=noise, temperature=temperature, tau=tau)
        assert got.tokens[row].tolist() == ids[best].tolist()
        assert got.log_probs[row].tolist() == pytest.approx(log_probs, rel=1e-5, abs=2e-5)
        assert float(got.lse[row]) == pytest.approx(lse, rel=1e-6, abs=1e-5)
        assert bool((got.log_probs[row] <= 0).all())


# What the checker of the emulator sees of them: every type, every option with and without the other.
CHECKED = [
    (False, False, DTYPES[1]),
    (True, True, DTYPES[0]),
    (False, True, DTYPES[2]),
    (True, False, DTYPES[1]),
]


@pytest.mark.op("lm_head_topk")
@pytest.mark.parametrize(
    ("coupled", "mapped", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.unchecked] * (case not in CHECKED))
        for case in itertools.product((False, True), (False, True), DTYPES)
    ],
)
def test_topk_against_fp64(coupled, mapped, dtype):
    for m, vocab, k, tau in ((1, 1, 1, 1.0), (3, 70, 32, 1.5), (6, 2500, 8, 0.7)):
        x, weight, options = head_case(m, vocab, dtype, coupled=coupled, mapped=mapped, seed=vocab)
        got = lm_head_topk(x, pack_weight(weight), k, tau=tau, **options)
        check_topk(got, naive.linear(x, weight), k, options, tau)


@pytest.mark.op("linear", "lm_head_topk")
def test_topk_uses_the_logits_of_linear():
    x, weight, _ = head_case(4, 300, torch.bfloat16, coupled=False, mapped=False)
    gamma, packed = normal(24, dtype=torch.bfloat16, seed=3), pack_weight(weight)
    got = lm_head_topk(x, packed, 32, rms_norm=gamma, eps=1e-3)
    logits = linear(x, packed, rms_norm=gamma, eps=1e-3, out_dtype=torch.float32)
    best = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :32]
    assert torch.equal(got.tokens, best.int())


@pytest.mark.unchecked  # a law of values
@pytest.mark.op("lm_head_topk", "gumbel_noise")
def test_topk_noise_is_the_noise_of_sampling():
    """With zero weights the scores are T * g alone: the order is that of the noise of `gumbel_noise`."""
    vocab, packed = 5000, pack_weight(torch.zeros(5000, 2))
    for ids in (
        None,
        torch.arange(0, 2 * vocab, 2, dtype=torch.int32),
        torch.arange(vocab, dtype=torch.int32),
    ):
        got = lm_head_topk(
            torch.ones(1, 2),
            packed,
            32,
            draft_to_target=ids,
            temperature=torch.tensor([0.5]),
            seeds=torch.tensor([-77]),
            positions=torch.tensor([9], dtype=torch.int32),
        )
        noise = gumbel_noise(torch.tensor([-77]), torch.tensor([9], dtype=torch.int32), 2 * vocab)[0]
        used = noise[: vocab if ids is None else 2 * vocab : 1 if ids is None or ids[1] == 1 else 2][:vocab]
        best = torch.sort(used, descending=True, stable=True).indices[:32].int()
        assert torch.equal(got.tokens[0], best if ids is None else ids[best.long()])


@pytest.mark.op("lm_head_topk")
@given(st.integers(1, 4), st.integers(1, 2100), st.integers(1, 32), st.integers(0, 10**6))
@settings(max_examples=25)
def test_topk_with_heavy_ties(m, vocab, k, seed):
    """Small integers: logits are exact and most are equal, so the order is decided by the ids."""
    k = min(k, vocab)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (m, 3), generator=generator).float()
    weight = torch.randint(-1, 2, (vocab, 3), generator=generator).float()
    check_topk(lm_head_topk(x, pack_weight(weight), k), naive.linear(x, weight), k, {})


@pytest.mark.op("lm_head_topk")
def test_topk_non_finite():
    """NaN is -inf; what is missing is filled with the lowest unused ids; +inf ranks first."""
    vocab = 1100
    weight = torch.full((vocab, 1), NAN)
    packed, one = pack_weight(weight), torch.ones(1, 1)
    got = lm_head_topk(one, packed, 4)
    assert got.tokens.tolist() == [[0, 1, 2, 3]]
    assert got.log_probs.tolist() == [[-INF] * 4]
    assert got.lse.tolist() == [-INF]
    weight[1], weight[1050] = 2.0, 3.0
    got = lm_head_topk(one, pack_weight(weight), 5)
    assert got.tokens.tolist() == [[1050, 1, 0, 2, 3]]
    check_topk(got, weight.t(), 5, {})
    weight[700] = INF
    got = lm_head_topk(one, pack_weight(weight), 3)
    assert got.tokens.tolist() == [[700, 1050, 1]]
    check_topk(got, weight.t(), 3, {})
    ids = torch.full((vocab,), 2**31 - 1, dtype=torch.int32)
    ids[::2] = -(2**31)
    options = {
        "temperature": torch.tensor([NAN]),
        "seeds": torch.tensor([1]),
        "positions": torch.tensor([-1]).int(),
    }
    got = lm_head_topk(one, packed, 2, draft_to_target=ids, **options)
    assert got.tokens.tolist() == [[-(2**31), 2**31 - 1]]


@pytest.mark.op("lm_head_topk")
def test_topk_writes_only_its_outputs():
    x, weight, _ = head_case(3, 40, torch.float32, coupled=False, mapped=False)
    buffers = [torch.full((5, 6), 77, dtype=d) for d in (torch.int32, torch.float32)] + [
        torch.full((5,), 77.0)
    ]
    out = TopK(buffers[0][1:4], buffers[1][1:4], buffers[2][1:4])
    got = lm_head_topk(x, pack_weight(weight), 6, out=out)
    assert got is out
    for buffer in buffers:
        assert bool((buffer[[0, 4]] == 77).all())
    without = lm_head_topk(x, pack_weight(weight), 6, out=TopK(*out[:2], None))
    assert without.lse is None
    assert_same_bits(without.log_probs, lm_head_topk(x, pack_weight(weight), 6).log_probs)
