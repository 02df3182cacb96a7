"""From what a caller passes, text or token ids and parameters for one or for all, to checked requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_decode.metrics import Metrics
from eagle_decode.sampling import SamplingParams, token_ids
from eagle_decode.sequence import Request
from eagle_decode.text import TextStream

Prompt = str | Sequence[int]


def make_requests(
    prompts: Any,
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    tokenizer: Any,
    vocab_size: int,
    max_length: int,
    end_ids: tuple[int, ...],
    speculative: bool,
) -> list[Request]:
    """One request per prompt and sample, in that order. Raises ValueError as `Engine.generate` says."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts: expected text or token ids, or a list of them, got {prompts!r:.80}")
    if isinstance(prompts, str) or (len(prompts) and _is_one(prompts[0])):
        prompts = [prompts]
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    if not isinstance(sampling, Sequence) or not all(isinstance(one, SamplingParams) for one in sampling):
        raise ValueError(f"sampling: expected SamplingParams or a list of them, got {sampling!r:.80}")
    if len(sampling) != len(prompts):
        raise ValueError(
            f"sampling: expected one for all or {len(prompts)}, one per prompt, got {len(sampling)}"
        )
    requests: list[Request] = []
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        tokens = _tokens(f"prompts[{index}]", prompt, tokenizer, vocab_size, max_length)
        stop_tokens = frozenset(params.stop_token_ids + (() if params.ignore_eos else end_ids))
        params.check_vocabulary(vocab_size, stop_tokens)
        if params.stop and tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and the engine has none")
        room = max_length - len(tokens)
        for sample in range(params.n):
            requests.append(
                Request(
                    index=len(requests),
                    prompt_index=index,
                    sample=sample,
                    prompt=tokens,
                    params=params.sample(sample),
                    budget=room if params.max_new_tokens is None else min(room, params.max_new_tokens),
                    stop_tokens=stop_tokens,
                    stream=None if tokenizer is None else TextStream(tokenizer, params.stop),
                    metrics=Metrics(speculative, requests=1, prompt_tokens=len(tokens)),
                )
            )
    return requests


def _is_one(item: Any) -> bool:
    """Whether it is a token id and no prompt: a number, or a tensor of one."""
    return not hasattr(item, "__len__") or getattr(item, "ndim", None) == 0


def _tokens(name: str, prompt: Any, tokenizer: Any, vocab_size: int, max_length: int) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name}: text needs a tokenizer, and the engine has none; pass token ids")
        prompt = tokenizer(prompt)["input_ids"]
    tokens = list(token_ids(name, prompt))
    if not tokens:
        raise ValueError(f"{name}: expected at least one token, got none")
    if max(tokens) >= vocab_size:
        raise ValueError(f"{name}: expected token ids below the vocabulary's {vocab_size}, got {max(tokens)}")
    if len(tokens) > max_length:
        raise ValueError(f"{name}: expected at most max_length = {max_length} tokens, got {len(tokens)}")
    return tokens
