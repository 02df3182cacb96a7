"""Sampling parameters of a request, checked once, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

MOST_TOP_LOGPROBS = 32
_LARGEST = float(np.finfo(np.float32).max)


class LogitsMask(Protocol):
    """Says which tokens may come next: a grammar's matcher, for example."""

    def __call__(self, tokens: list[int], mask: np.ndarray) -> None:
        """Clears the bits of tokens that may not follow.

        tokens: what the request has emitted, and after that what a draft proposes; without the prompt. Every
            one of them was allowed after those before it. mask: [ceil(V/32)] int32 with all bits set; token t
            is bit t % 32 of word t // 32 (xgrammar's layout). Must depend on the tokens alone.
        """


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Plain and speculative decoding read the
    same fields.

    temperature: 0 takes the most likely token (ties: the lowest id); below 1e-5 counts as 0.
    top_k: the k most likely tokens stay; 0 or -1: off. top_p: in (0, 1]; 1: off. min_p: in [0, 1]; 0: off.
    seed: any integer of 64 bits. (seed, position) decides the noise, so a request's tokens do not depend on
        the batch.
    max_new_tokens: None: until the context ends; 0: nothing is generated.
    stop_token_ids: end the request, beside the model's own end ids; an integer, several, or None.
    stop: strings that end the request; the text ends before the string, the tokens with the one that
        completes it.
    ignore_eos: the model's own end ids do not end the request.
    logprobs: record log_softmax of the untouched logits at every token. top_logprobs: and of the n (0 to 32)
        most likely tokens at its place.
    repetition_penalty: > 0; logits of tokens that the prompt or the output holds are divided by it where
        positive, else multiplied; 1: off. frequency_penalty: subtracted for each time the output holds the
        token; presence_penalty: once if it does; 0: off. A drafted token sees the drafts before it.
    logit_bias: {token id: value} added to logits, before the penalties; -inf bans.
    min_new_tokens: stop tokens are not allowed among the first so many; stop strings are.
    allowed_tokens, banned_tokens: ids; None: all are allowed. logits_mask: a LogitsMask, asked for every node
        that can be reached, on the host; so it costs a transfer per cycle. Where nothing that is allowed has
        a logit above -inf, or the function raises, the request ends with an error (`Result.error`).
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()  # a mapping; kept as pairs in ascending order
    min_new_tokens: int = 0
    allowed_tokens: tuple[int, ...] | None = None
    banned_tokens: tuple[int, ...] = ()
    logits_mask: LogitsMask | None = None
    top_logprobs: int = 0
    top_k_top_p: Literal["sequential", "joint"] = "sequential"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("temperature", _number("temperature", self.temperature))
        put("top_p", _number("top_p", self.top_p))
        put("min_p", _number("min_p", self.min_p))
        _check(self.temperature >= 0, "temperature", "a finite number >= 0", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "a number in [0, 1]", self.min_p)
        put("top_k", integer("top_k", self.top_k))
        _check(-1 <= self.top_k < 2**31, "top_k", "an integer of 32 bits >= 0, or -1 for off", self.top_k)
        put("seed", integer("seed", self.seed))
        _check(-(2**63) <= self.seed < 2**64, "seed", "an integer of 64 bits", self.seed)
        for name in ("ignore_eos", "logprobs"):  # a number of logprobs is top_logprobs
            value = getattr(self, name)
            _check(isinstance(value, (bool, np.bool_)), name, "True or False", value)
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
        self._check_constraints(put)
        modes = ("sequential", "joint")
        _check(self.top_k_top_p in modes, "top_k_top_p", " or ".join(modes), self.top_k_top_p)

    def _check_constraints(self, put: Any) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            put(name, _number(name, getattr(self, name)))
        positive = np.float32(self.repetition_penalty) > 0  # what rounds to 0 would be no penalty at all
        _check(positive, "repetition_penalty", "a number > 0", self.repetition_penalty)
        put("logit_bias", _bias(self.logit_bias))
        put("min_new_tokens", integer("min_new_tokens", self.min_new_tokens))
        most = math.inf if self.max_new_tokens is None else self.max_new_tokens
        _check(
            0 <= self.min_new_tokens <= min(most, 2**31 - 1),
            "min_new_tokens", f"0 to max_new_tokens = {self.max_new_tokens}", self.min_new_tokens,
        )  # fmt: skip
        if self.allowed_tokens is not None:
            put("allowed_tokens", token_ids("allowed_tokens", self.allowed_tokens))
        put("banned_tokens", token_ids("banned_tokens", self.banned_tokens))
        if self.allowed_tokens is not None and not set(self.allowed_tokens) - set(self.banned_tokens):
            raise ValueError(
                f"allowed_tokens: expected one that is not among banned_tokens, got {self.allowed_tokens}"
            )
        if self.logits_mask is not None and not callable(self.logits_mask):
            raise ValueError(f"logits_mask: expected a function or None, got {self.logits_mask!r}")
        put("top_logprobs", integer("top_logprobs", self.top_logprobs))
        expected = f"an integer from 0 to {MOST_TOP_LOGPROBS}"
        _check(0 <= self.top_logprobs <= MOST_TOP_LOGPROBS, "top_logprobs", expected, self.top_logprobs)

    def check_vocabulary(self, size: int, stop_tokens: Iterable[int] = ()) -> None:
        """Raises ValueError for token ids that a target of `size` tokens does not have, and where no token is
        left that may be said. stop_tokens: all that end the request."""
        for name, ids in {
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_tokens": self.allowed_tokens or (),
            "banned_tokens": self.banned_tokens,
        }.items():
            for token in ids:
                _check(token < size, name, f"token ids below the vocabulary's {size}", token)
        if len(set(self.banned_tokens)) == size:
            raise ValueError(f"banned_tokens: expected fewer than the vocabulary's {size}, got all")
        banned = {*self.banned_tokens, *(token for token, bias in self.logit_bias if bias == -math.inf)}
        if self.min_new_tokens:
            banned |= set(stop_tokens)
        allowed = range(size) if self.allowed_tokens is None else self.allowed_tokens
        if banned.issuperset(allowed):
            raise ValueError(
                "allowed_tokens, banned_tokens, logit_bias, min_new_tokens: expected a token left, got none"
            )
        expected = f"at most the vocabulary's {size}"
        _check(self.top_logprobs <= size, "top_logprobs", expected, self.top_logprobs)

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before matters."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def has_mask(self) -> bool:
        """Whether some tokens may not be said."""
        return self.allowed_tokens is not None or bool(self.banned_tokens) or self.logits_mask is not None

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


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in ascending order, from a mapping or from such pairs."""
    if value is None:
        return ()
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(value, str) or not isinstance(pairs, Iterable):
        raise ValueError(f"logit_bias: expected a mapping from token ids to numbers, got {value!r}")
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"logit_bias: expected a mapping from token ids to numbers, got {value!r}")
        (token,) = token_ids("logit_bias", pair[0])
        banned = isinstance(pair[1], (float, np.floating)) and pair[1] == -math.inf
        bias[token] = -math.inf if banned else _number("logit_bias", pair[1])
    return tuple(sorted(bias.items()))


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    _check(abs(number) <= _LARGEST, name, "a number that float32 holds", value)
    return number


def _check(condition: bool, name: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")
