"""Requests drawn at random over everything that SamplingParams offers, edges of the ranges included."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from eagle_decode.sampling import SamplingParams
from eagle_decode.sequence import Result

Asked = list[tuple[list[int], SamplingParams]]


def outcome(result: Result) -> tuple:
    """All of a result that must not depend on how it was decoded."""
    return (
        result.tokens, result.text, result.logprobs, result.top_logprobs, result.finish_reason,
        result.stop_reason, result.error and result.error.partition(":")[2],
    )  # fmt: skip


def random_batch(seed: int, vocab: int) -> tuple[random.Random, int, list[Asked]]:
    """The generator they came from, a length of context, and groups of requests to come one after the other.
    Many prompts have one token; some fill the context or leave room for one token."""
    drawn = random.Random(seed)
    length = drawn.choice([16, 40, 200])
    sizes = [1, 1, 2, 5, min(length, 50) - 1, min(length, 50)]
    groups = []
    for _ in range(drawn.randint(1, 4)):
        prompts = [
            [drawn.randrange(vocab) for _ in range(drawn.choice(sizes))] for _ in range(drawn.randint(1, 3))
        ]
        groups.append([(prompt, random_params(drawn, vocab)) for prompt in prompts])
    return drawn, length, groups


def random_params(drawn: random.Random, vocab: int) -> SamplingParams:
    """Each field with some probability. Never nothing left to say."""

    def some(most: int) -> list[int]:
        return [drawn.randrange(vocab) for _ in range(drawn.randint(0, most))]

    most = drawn.choice([0, 1, 2, 3, 5, 8, 20, 40, None])
    fields: dict[str, tuple[float, Any]] = {
        "top_k": (0.3, drawn.choice([-1, 0, 1, 2, 5, vocab, vocab + 1, 2**31 - 1])),
        "top_p": (0.3, drawn.choice([1e-50, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1])),
        "min_p": (0.3, drawn.choice([0, 1e-9, 0.01, 0.3, 0.9999999999, 1])),
        "top_k_top_p": (0.3, "joint"),
        "repetition_penalty": (0.3, drawn.choice([0.5, 1.1, 1.5, 100.0])),
        "presence_penalty": (0.3, drawn.choice([-1.0, 0.5, 2.0])),
        "frequency_penalty": (0.3, drawn.choice([-0.3, 0.4, 1.5])),
        "logit_bias": (0.3, {token: drawn.choice([-math.inf, -3, 2.5, 10]) for token in some(5)}),
        "banned_tokens": (0.3, some(8)),
        "logits_mask": (0.2, without_one(drawn.randint(1, 9), vocab)),
        "stop_token_ids": (0.4, some(4)),
        "ignore_eos": (0.2, True),
        "min_new_tokens": (0.3, drawn.randint(0, 10 if most is None else min(most, 10))),
        "logprobs": (0.5, True),
        "top_logprobs": (0.3, drawn.choice([1, 3, min(vocab, 32)])),
        "stop": (0.3, [bytes(some(2)).decode() or "\x01" for _ in range(2)]),
        "n": (0.1, 3),
    }
    chosen = {name: value for name, (share, value) in fields.items() if drawn.random() < share}
    return SamplingParams(
        temperature=drawn.choice([0, 1e-6, 0.02, 0.3, 0.8, 1, 1.7, 50.0, 1e30]),
        seed=drawn.choice([0, -1, 2**64 - 1, drawn.randrange(1000)]),
        max_new_tokens=most,
        **chosen,
    )


def without_one(factor: int, vocab: int):
    """A mask that bans one token, which depends on what was said before it."""

    def mask(tokens: list[int], words: np.ndarray) -> None:
        if tokens:
            banned = (tokens[-1] * factor + len(tokens)) % vocab
            words[banned // 32] &= ~np.int32(np.uint32(1 << banned % 32).view(np.int32))

    return mask
