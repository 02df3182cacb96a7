"""Why a request cannot go on, in words for its `Result.error`: which request, where, what to do about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle_decode.sequence import Request
    from eagle_decode.text import UnreadableToken


def unreadable(request: Request, fault: UnreadableToken) -> str:
    """The tokenizer raised at a token of those about to be committed."""
    return (
        f"request {request.index}: the tokenizer cannot read token {fault.token}, "
        f"{_place(request, fault.count)}: {_described(fault.__cause__)}; keep ids that it does not have out "
        "of the text with banned_tokens"
    )


def speechless(request: Request, after: int, raised: Exception | None) -> str:
    """No token can follow the first `after` of those about to be committed. raised: by logits_mask there."""
    where = _place(request, after)
    if raised is not None:
        return (
            f"request {request.index}: logits_mask failed {where}: {_described(raised)}; it is to answer for "
            "all tokens that it allowed"
        )
    params = request.params
    too_short = len(request.tokens) + after < params.min_new_tokens and bool(request.stop_tokens)
    limits = {
        "logits_mask": params.logits_mask is not None,
        "allowed_tokens": params.allowed_tokens is not None,
        "banned_tokens": bool(params.banned_tokens),
        "logit_bias": any(value == -math.inf for _, value in params.logit_bias),
        "min_new_tokens": too_short,
    }
    names = ", ".join(name for name, limits_here in limits.items() if limits_here)
    if not names:
        return (
            f"request {request.index}: the target's logits {where} hold no number; check its weights, and in "
            "float16 that nothing overflows"
        )
    return (
        f"request {request.index}: no token is left {where}: none that {names} would allow has a logit above "
        "-inf; allow another there, such as a stop token"
    )


def _place(request: Request, after: int) -> str:
    return f"at position {len(request.prompt) + len(request.tokens) + after}"


def _described(fault: BaseException | None) -> str:
    """One that a user's function raised: its words may be missing, very many, or raise themselves."""
    try:
        words = str(fault)
    except Exception:
        words = ""
    return f"{type(fault).__name__}: {words:.1000}" if words else type(fault).__name__
