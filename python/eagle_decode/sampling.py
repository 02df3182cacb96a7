"""Sampling parameters of a request, checked once, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Plain and speculative decoding read the
    same fields.

    temperature: 0 takes the most likely token (ties: the lowest id); below 1e-5 counts as 0.
    top_k: the k most likely tokens stay; 0 or -1: off. top_p: in (0, 1]; 1: off. min_p: in [0, 1); 0: off.
    seed: any integer of 64 bits. (seed, position) decides the noise, so a request's tokens do not depend on
        the batch.
    max_new_tokens: None: until the context ends; 0: nothing is generated.
    stop_token_ids: end the request, beside the model's own end ids; an integer, several, or None.
    stop: strings that end the request; the text ends before the string, the tokens with the one that
        completes it.
    ignore_eos: the model's own end ids do not end the request.
    logprobs: record log_softmax of the untouched logits at every token.
    n: samples of the prompt; sample i uses seed + i.
    top_k_top_p: "sequential" applies top-p to what top-k left, renormalised; "joint" to the whole
        distribution.

    Raises ValueError (TypeError for unknown names) with the field, what was expected, and what was given.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int | None = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    n: int = 1
    top_k_top_p: Literal["sequential", "joint"] = "sequential"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("temperature", _number("temperature", self.temperature))
        put("top_p", _number("top_p", self.top_p))
        put("min_p", _number("min_p", self.min_p))
        _check(self.temperature >= 0, "temperature", "a finite number >= 0", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
        _check(0 <= self.min_p < 1, "min_p", "a number in [0, 1)", self.min_p)
        put("top_k", integer("top_k", self.top_k))
        _check(-1 <= self.top_k < 2**31, "top_k", "an integer of 32 bits >= 0, or -1 for off", self.top_k)
        put("seed", integer("seed", self.seed))
        _check(-(2**63) <= self.seed < 2**64, "seed", "an integer of 64 bits", self.seed)
        put("n", integer("n", self.n))
        _check(self.n >= 1, "n", "an integer >= 1", self.n)
        if self.max_new_tokens is not None:
            put("max_new_tokens", integer("max_new_tokens", self.max_new_tokens))
            _check(self.max_new_tokens >= 0, "max_new_tokens", "an integer >= 0 or None", self.max_new_tokens)
        put("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        stop = (
            (self.stop,) if isinstance(self.stop, str) or not isinstance(self.stop, Iterable) else self.stop
        )
        put("stop", () if self.stop is None else tuple(stop))
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", "non-empty strings", text)
        modes = ("sequential", "joint")
        _check(self.top_k_top_p in modes, "top_k_top_p", " or ".join(modes), self.top_k_top_p)

    def sample(self, i: int) -> SamplingParams:
        """The parameters of sample i of a prompt: seed + i, one sample."""
        return replace(self, seed=(self.seed + i) % 2**64, n=1)

    @property
    def seed_bits(self) -> int:
        """The seed's 64 bits as a signed integer, the form that tensors hold."""
        return (self.seed + 2**63) % 2**64 - 2**63


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids given as an integer, a sequence, a tensor, or None for no ids."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        value = (value,)
    ids = tuple(integer(name, token) for token in value)
    for token in ids:
        _check(0 <= token < 2**31, name, "token ids >= 0", token)
    return ids


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return value.__index__()


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return number


def _check(condition: bool, name: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")
