"""verify: which draft tokens the target accepts."""

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
