"""The decoding loop over the CUDA kernels that exist: speculative decoding that appends, attends, grows and
chooses trees, samples, verifies and compacts by them emits the tokens, and the bits of the log-probabilities,
of plain decoding by the same kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eagle_decode.engine import Engine
from eagle_decode.sampling import SamplingParams
from tiny_models import tiny_head, tiny_target

VOCAB = 16  # with few tokens and wide levels, chance alone accepts every length

# kind of head, dtype, temperature, rows of the batch, nodes
CASES: dict[str, tuple[str, torch.dtype, float, int, int]] = {
    "eagle3-float32-greedy": ("eagle3", torch.float32, 0.0, 2, 33),
    "eagle1-bfloat16-T1": ("eagle1", torch.bfloat16, 1.0, 3, 64),
    "eagle1-float32-T0.7": ("eagle1", torch.float32, 0.7, 1, 64),
    "eagle1-float16-T1": ("eagle1", torch.float16, 1.0, 2, 64),
}


def decode(name: str, *, speculate: bool) -> dict[str, Any]:
    """Tokens and log-probabilities by request, and the accepted lengths that occurred."""
    kind, dtype, temperature, batch, nodes = CASES[name]
    target = tiny_target(dtype=dtype, vocab_size=VOCAB, num_heads=3, num_kv_heads=1)
    head = tiny_head(kind, target, seed=31, **({"draft_vocab": 13} if kind == "eagle3" else {}))
    engine = Engine(target, head, levels=3, draft_top_k=8, max_nodes=nodes, max_batch=batch, max_length=128)
    random = np.random.default_rng(7)
    prompts = [random.integers(VOCAB, size=1 + 5 * i).tolist() for i in range(2 * batch + 1)]
    limits: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.05}]
    sampling = [
        SamplingParams(
            temperature=temperature, seed=31 + i, max_new_tokens=18 + i, logprobs=True, **limits[i % 4]
        )
        for i in range(len(prompts))
    ]
    results = engine.generate(prompts, sampling, speculate=speculate)
    counts = [result.metrics.accepted_lengths for result in results]
    return {
        "tokens": [list(result.tokens) for result in results],
        "log_probs": [list(result.logprobs) for result in results],
        "lengths": sorted({length for each in counts for length, count in enumerate(each) if count}),
    }


@pytest.mark.op(
    "append_kv", "tree_attention", "expand_tree", "build_tree", "sample_tokens", "verify", "compact_kv"
)
@pytest.mark.parametrize("name", CASES)
def test_the_loop_equals_plain_decoding(name):
    plain, speculative = (decode(name, speculate=speculate) for speculate in (False, True))
    assert plain["lengths"] == [0]
    assert speculative["lengths"] == [0, 1, 2, 3]
    assert speculative["tokens"] == plain["tokens"]
    assert speculative["log_probs"] == plain["log_probs"]
    assert len({token for tokens in plain["tokens"] for token in tokens}) >= 8
