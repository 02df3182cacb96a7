"""Heads that know the target's logits: drafting with all of the target's noise, they are always right. A
wrong seed, position or id of the noise costs accepted tokens alone, which no comparison of texts shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle_decode.engine import Engine
from eagle_decode.sampling import SamplingParams
from tiny_models import target_and_perfect_head

VOCAB = 97
CHAIN = {"levels": 4, "draft_top_k": 1, "max_nodes": 5}


def prompts_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(VOCAB, size=3 + 7 * i).tolist() for i in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_a_perfect_head_is_always_right(temperature):
    """Coupled drafting ranks by the target's own noise: where the head knows the logits, a mere chain is
    accepted whole, at any temperature. With less of the noise, or none, only at temperature 0."""
    target, head = target_and_perfect_head(vocab_size=VOCAB)
    prompts = prompts_of(5)
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=1 + 5 * 20, ignore_eos=True)
    rates = []
    for coupling in (1.0, 0.5, 0.0):
        engine = Engine(target, head, max_batch=3, coupling=coupling, **CHAIN)
        results = engine.generate(prompts, params)
        assert [result.tokens for result in results] == [
            Engine(target).generate(prompt, params)[0].tokens for prompt in prompts
        ]
        rates.append(engine.metrics.tokens_per_cycle)
    assert rates[0] == 5.0
    if temperature == 0:
        assert rates == [5.0] * 3
    else:
        assert rates[2] < 3.5
        assert rates[2] < rates[1] < 5.0


@pytest.mark.unchecked  # a law of values
@pytest.mark.op(
    "append_kv", "tree_attention", "draft", "extend_draft", "sample_tokens", "verify", "compact_kv"
)
@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [
        (torch.bfloat16, 0.8),
        (torch.float32, 0.0),
        *(
            pytest.param(dtype, temperature, marks=pytest.mark.full)
            for dtype, temperature in (
                (torch.bfloat16, 0.0),
                (torch.bfloat16, 1.5),
                (torch.float32, 0.8),
                (torch.float32, 1.5),
            )
        ),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_head_of_fewer_tokens_is_always_right(dtype, temperature, draft_launches):
    """Its vocabulary is a part of the target's: the noise is that of the target's ids, request by request,
    row by row."""
    target, head = target_and_perfect_head("eagle3", draft_vocab=60, vocab_size=VOCAB, dtype=dtype)
    known = head.draft_to_target.tolist()
    assert len(known) == 60
    assert known != list(range(60))
    prompts = prompts_of(3)
    assert not set(known).issuperset(token for prompt in prompts for token in prompt)
    sampling = [
        SamplingParams(temperature=temperature, seed=30 + i, max_new_tokens=1 + 5 * (3 + i)) for i in range(3)
    ]
    engine = Engine(target, head, max_batch=2, coupling=1.0, **CHAIN)
    results = engine.generate(prompts, sampling)
    plain = Engine(target, max_batch=3).generate(prompts, sampling)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert [result.metrics.accepted_lengths for result in results] == [[0] * 4 + [3 + i] for i in range(3)]
    assert len({token for result in results for token in result.tokens}) > 8
    if dtype == torch.float32:
        assert min(draft_launches, default=11) > 10
    else:
        assert set(draft_launches) <= {1}
