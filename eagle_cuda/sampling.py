"""sampling: the target's own token for every row of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eagle_cuda._allocate import empty, integer, shape_of
from eagle_cuda._extension import _C
from eagle_cuda.tree import DraftTree


class Sampled(NamedTuple):
    """Outputs of `sample_tokens`. All but the tokens may be None in `out=`, which skips them."""

    tokens: Any  # [B, N] int32
    log_probs: Any  # [B, N] float32, log_softmax of the untouched logits at the token
    flags: Any  # [B, N] int32, 1: no allowed token has a logit above -inf
    top_tokens: Any = None  # [B, N, n] int32, the n largest untouched logits in order, ties to the lower id
    top_log_probs: Any = None  # [B, N, n] float32, theirs; with top_tokens


class SamplingState(NamedTuple):
    """What a request's constraints and its tokens so far do to its logits, before the temperature.

    Every field is optional, and absent counts are zero. In this order, for a token with the logit ``l``:

    1. bias: ``l += bias_values`` of every entry that names the token.
    2. repetition penalty ``r``, where prompt or output holds the token: ``l / r`` where ``l > 0``, else
       ``l * r``.
    3. frequency and presence penalty, where the output holds it: ``l -= frequency * count``, then
       ``l -= presence``.
    4. min_new_tokens: stop tokens are not allowed where ``positions < prompt_lens + min_new_tokens``.
    5. token_mask.

    The output at a node is `output_counts`, the tokens of its own ancestors below the root, and its own: a
    penalty over N > 1 nodes needs `tree=`. A token that is not allowed counts as -inf, as does NaN. Where no
    allowed token has a logit above -inf, the lowest allowed id comes out and the row is flagged.
    Log-probabilities stay those of the untouched logits. Values on the device are never read by the host.

    Source: repetition penalty: CTRL (Keskar et al., arXiv 1909.05858).
    """

    prompt_counts: Any = None  # [B, V] int32, how often the prompt holds each token
    output_counts: Any = None  # [B, V] int32, the same of the output, the root's token included
    repetition_penalty: Any = None  # [B] float32; 1, NaN, 0 and below: off
    presence_penalty: Any = None  # [B] float32; 0, NaN: off
    frequency_penalty: Any = None  # [B] float32; 0, NaN: off
    bias_tokens: Any = None  # [B, M] int32, ids outside the vocabulary are unused entries; with bias_values
    bias_values: Any = None  # [B, M] float32, added to the logits of bias_tokens
    min_new_tokens: Any = None  # [B] int32; with prompt_lens and stop_tokens
    prompt_lens: Any = None  # [B] int32
    stop_tokens: Any = None  # [B, S] int32, -1 unused
    # [B, N, ceil(V/32)] int32, bit t % 32 of word t / 32: token t is allowed (as xgrammar has it). Outer
    # strides are free: 0 over the nodes gives all of them one mask.
    token_mask: Any = None


_NO_STATE = SamplingState()


def sample_tokens(
    logits: Any,
    *,
    temperature: Any,
    seeds: Any,
    positions: Any,
    num_nodes: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    top_k_top_p: str = "sequential",
    tree: DraftTree | None = None,
    state: SamplingState | None = None,
    num_top: int | None = None,
    out: Sampled | None = None,
) -> Sampled:
    """The target's token at every node: a pure function of the row's logits, parameters, seed and position.

    Order: state, temperature, top-k, top-p, min-p, Gumbel noise, argmax; ties to the lower id. An exact
    sample of the (restricted) softmax, equal whatever else is in the batch.

    Args:
        logits: ``[B, N, V]`` float32, bfloat16 or float16; last dimension contiguous, outer strides free. NaN
            counts as -inf.
        temperature: ``[B]`` float32. Below 1e-5, negative or NaN: argmax of the logits, nothing else applied.
        seeds: ``[B]`` int64, the bits of the request's 64-bit seed.
        positions: ``[B, N]`` int32, absolute index of the token to be produced (``seq_lens + depth + 1``).
        num_nodes: ``[B]`` int32, rows in use; all outputs of those beyond are 0. None: all.
        top_k: ``[B]`` int32. Not positive or at least V: off.
        top_p: ``[B]`` float32. At least 1 or NaN: off. The most likely token always stays.
        min_p: ``[B]`` float32, relative to the most likely token. Not positive or NaN: off; above 1: as 1.
        top_k_top_p: "sequential": top-p measures what top-k left, renormalised; "joint": the whole
            distribution.
        tree: whose nodes the rows are. Penalties alone read it (tokens and parents): they count a node's own
            ancestors, followed while ``0 <= parent < node``.
        state: bias, penalties, shortest length and allowed tokens, applied before the temperature.
        num_top: n, the most likely tokens to return with their log-probabilities: 0 to 32, at most V. None:
            none, or as many as `out` has room for.
        out: outputs to write into.

    Raises:
        ValueError: wrong dtype, rank, shape, device or layout, naming the argument; a penalty over N > 1
            nodes without a tree; fields of `state` without those that they go with.

    Source: Gumbel-max trick; Philox-4x32-10 (Salmon et al., SC 2011); min-p (Nguyen et al., arXiv
        2407.01082).
    """
    if num_top is not None:
        num_top = integer("num_top", num_top, 0, min(32, shape_of("logits", logits, 3)[2]))
    if out is None:
        shape = shape_of("logits", logits, 3)[:2]
        out = Sampled(
            empty(logits, shape, torch.int32),
            empty(logits, shape, torch.float32),
            empty(logits, shape, torch.int32),
            empty(logits, (*shape, num_top), torch.int32) if num_top else None,
            empty(logits, (*shape, num_top), torch.float32) if num_top else None,
        )
    elif num_top is not None:
        room = 0 if out.top_tokens is None else shape_of("top_tokens", out.top_tokens, 3)[-1]
        if num_top != room:
            raise ValueError(f"num_top: expected {room}, what out.top_tokens has room for, got {num_top}")
    if state is None:
        state = _NO_STATE
    elif not isinstance(state, SamplingState):
        raise TypeError(f"state: expected a SamplingState, got {type(state).__name__}")
    if tree is not None and not isinstance(tree, DraftTree):
        raise TypeError(f"tree: expected a DraftTree, got {type(tree).__name__}")
    _C.sample_tokens(
        logits,
        num_nodes,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        top_k_top_p,
        None if tree is None else tree.tokens,
        None if tree is None else tree.parents,
        *state,
        *out,
    )
    return out


def gumbel_noise(seeds: Any, positions: Any, vocab_size: int | None = None, *, out: Any = None) -> Any:
    """The noise of `sample_tokens` by itself: standard Gumbel ``g[r, t]`` of (seeds[r], positions[r], token
    t).

    Args:
        seeds: ``[R]`` int64. positions: ``[R]`` int32.
        vocab_size: columns of the result; not needed with `out`.
        out: ``[R, V]`` float32.

    Raises:
        ValueError: wrong dtype, shape, device or layout, naming the argument.
    """
    if out is None:
        shape = (*shape_of("seeds", seeds, 1), integer("vocab_size", vocab_size, 0))
        out = empty(seeds, shape, torch.float32)
    _C.gumbel_noise(seeds, positions, out)
    return out
