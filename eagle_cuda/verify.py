"""verify: which draft tokens the target accepts, by equality or by tests of probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from eagle_cuda._allocate import empty, integer, shape_of
from eagle_cuda._extension import _C

if TYPE_CHECKING:
    from eagle_cuda.tree import DraftTree


class Accepted(NamedTuple):
    """Outputs of `verify`, all int32. A cycle emits ``num_accepted + 1`` tokens."""

    path: Any  # [B, P] visited nodes from the root, -1 padded
    num_accepted: Any  # [B] draft tokens kept; -1: nothing was emitted
    next_tokens: Any  # [B] last emitted token, the next root
    finished: Any  # [B] 0 no, 1 stop token, 2 length
    new_seq_lens: Any  # [B] seq_lens + num_accepted + 1


def verify(
    tree: DraftTree,
    target_tokens: Any,
    seq_lens: Any,
    *,
    stop_tokens: Any = None,
    budget: Any = None,
    max_path: int | None = None,
    out: Accepted | None = None,
) -> Accepted:
    """Walks from the root along the children that equal the target's own token.

    Every visited node emits its target token. The walk ends at a stop token (finished 1), when `budget`
    tokens have been emitted (2; a stop token at the same place wins), or where no child carries the emitted
    token (0). The emitted tokens are those of plain decoding, at any temperature. Among equal siblings the
    first counts; links outside the tree are absent.
    A request with no nodes or no budget emits nothing: num_accepted -1, next_tokens 0.

    Args:
        tree: tokens, links and num_nodes are read.
        target_tokens: ``[B, N]`` int32, the target's token after each node (`sample_tokens`).
        seq_lens: ``[B]`` int32, rows in the cache, root excluded.
        stop_tokens: ``[B, S]`` int32, -1 unused.
        budget: ``[B]`` int32, tokens that may still be emitted.
        max_path: width of `path`, root included; default N. The walk visits at most that many nodes.
        out: outputs to write into.

    Raises:
        ValueError: wrong dtype, shape, device or layout, naming the argument.

    Source: EAGLE (Li et al., arXiv 2401.15077) section 3; sample-then-match verification.
    """
    tokens = tree.tokens
    if out is None:
        batch, nodes = shape_of("tokens", tokens, 2)
        width = max(nodes, 1) if max_path is None else integer("max_path", max_path, 1)
        one = (batch,)
        out = Accepted(
            empty(tokens, (batch, width), torch.int32),
            empty(tokens, one, torch.int32),
            empty(tokens, one, torch.int32),
            empty(tokens, one, torch.int32),
            empty(tokens, one, torch.int32),
        )
    _C.verify(
        tokens,
        tree.first_child,
        tree.next_sibling,
        tree.num_nodes,
        target_tokens,
        seq_lens,
        stop_tokens,
        budget,
        *out,
    )
    return out


class AcceptedByRejection(NamedTuple):
    """Outputs of `verify_rejection`, all int32; the first five as in `Accepted`."""

    path: Any  # [B, P] visited nodes from the root, -1 padded
    num_accepted: Any  # [B] draft tokens kept; -1: nothing was emitted
    next_tokens: Any  # [B] last emitted token, the next root
    finished: Any  # [B] 0 no, 1 stop token, 2 length
    new_seq_lens: Any  # [B] seq_lens + num_accepted + 1
    emitted: Any  # [B, P] the token that each visited node emitted, -1 padded
    flags: Any  # [B] bits: 1 an entry is no probability, 2 a row without mass, 4 an impossible child


def verify_rejection(
    tree: DraftTree,
    target_probs: Any,
    seq_lens: Any,
    *,
    scheme: str,
    draft_probs: Any = None,
    coins: Any = None,
    final_coins: Any = None,
    seeds: Any = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    stop_tokens: Any = None,
    budget: Any = None,
    max_path: int | None = None,
    out: AcceptedByRejection | None = None,
) -> AcceptedByRejection:
    """Speculative sampling: walks from the root along children that pass a test of probabilities.

    With p and q the target's and the draft's distribution at a node and x_1 .. x_c its children's tokens:

    - ``"point_mass"``: children chosen without chance (EAGLE-2, EAGLE-3). x_j passes if
      ``u_j < p(x_j) / (1 - p(x_1) - .. - p(x_{j-1}))``.
    - ``"coin_walk"``: the same law with one uniform a node: the first x_j with ``u < p(x_1) + .. + p(x_j)``
      passes. SGLang's ``tree_speculative_sampling_target_only``, its thresholds included; below 1 they are
      lossy.
    - ``"sampled_tree"``: children drawn from q without replacement, in that order (EAGLE-1, SpecInfer). x_j
      passes if ``u_j < p_j(x_j) / q_j(x_j)``; then p_{j+1} is ``max(p_j - q_j, 0)``, q_{j+1} is q_j without
      x_j, both renormalised. Not for a tree whose sampled nodes were pruned by score afterwards.
    - ``"chain"``: ``"sampled_tree"`` that looks at the first child only.

    A child that passes is accepted and visited next; where none does, the node emits a token of what is left
    of p and the walk ends. Each is exact: the emitted tokens have the target's law. They are not the tokens
    of plain decoding with the same seed; those, at the same acceptance rate for trees made without chance,
    come from `verify` (docs/rejection.md). No token without probability is ever accepted or emitted, whatever
    the uniforms: tests are strict, ``u < ...`` for u in [0, 1), on exact integer sums.

    Args:
        tree: tokens, links and num_nodes are read; at most 256 nodes.
        target_probs: ``[B, N, V]`` float32, row i the target's distribution after node i, of any sum. The
            last dimension contiguous, outer strides free. NaN, infinite and negative entries count as 0 (flag
            1); a row without mass emits token 0 (flag 2).
        seq_lens: ``[B]`` int32, rows in the cache, root excluded.
        scheme: see above.
        draft_probs: like `target_probs`, row i what node i's children were drawn from: with the sampled
            schemes only. A child that it cannot have drawn is passed over (flag 4), as are a token outside
            the vocabulary (flag 4) and, in all schemes, a token that an elder sibling carries.
        coins: ``[B, N]`` float32 in [0, 1): entry i for the test of child i, in "coin_walk" for that of node
            i's children. Values outside are moved to the nearest end, NaN to 0.
        final_coins: ``[B]`` float32, for the token that is drawn where no child passed. Independent of
            `coins`: with one of those used again the law is wrong.
        seeds: ``[B]`` int64, instead of coins: Philox noise of (seed, position, token), of streams that no
            draft uses. The result is then a function of the request alone.
        threshold_single: "coin_walk": a child of at least this probability passes. 1: off.
        threshold_acc: "coin_walk": the sum is divided by this before the test. 1: off.
        stop_tokens: ``[B, S]`` int32, -1 unused.
        budget: ``[B]`` int32, tokens that may still be emitted: what is emitted is cut off there.
        max_path: width of `path`, root included; default N. The walk visits at most that many nodes.
        out: outputs to write into.

    Raises:
        ValueError: wrong dtype, shape, device or layout, an unknown scheme, arguments that do not belong to
            it, naming the argument.

    Source: speculative sampling, Leviathan et al., arXiv 2211.17192, section 2.3, Chen et al., arXiv
        2302.01318, algorithm 2; several rounds, SpecInfer, arXiv 2305.09781, section 4.3; EAGLE, arXiv
        2401.15077, section 3.3 and appendix.
    """
    tokens = tree.tokens
    if out is None:
        batch, nodes = shape_of("tokens", tokens, 2)
        width = max(nodes, 1) if max_path is None else integer("max_path", max_path, 1)
        shapes = ((batch, width), *((batch,),) * 4, (batch, width), (batch,))
        out = AcceptedByRejection(*(empty(tokens, shape, torch.int32) for shape in shapes))
    _C.verify_rejection(
        tokens,
        tree.first_child,
        tree.next_sibling,
        tree.num_nodes,
        target_probs,
        draft_probs,
        scheme,
        threshold_single,
        threshold_acc,
        coins,
        final_coins,
        seeds,
        seq_lens,
        stop_tokens,
        budget,
        *out,
    )
    return out
