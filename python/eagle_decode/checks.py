"""What an engine refuses to be made of: ValueErrors with the argument, what was expected, what was given."""

from __future__ import annotations

import math
import numbers

import torch

from eagle_cuda.tree import DraftTree, TreeShape
from eagle_decode.heads.loaded import LoadedHead
from eagle_decode.models.base import Target
from eagle_decode.sampling import integer
from eagle_decode.sequence import Batch


def check_target(target: Target) -> None:
    """Raises for an object without what the loop asks of a target."""
    wanted = ("config", "dtype", "device", "vocab_size", "max_positions")
    wanted += ("feature_size", "new_cache", "forward", "prefill")
    if missing := [name for name in wanted if not hasattr(target, name)]:
        raise ValueError(
            f"target: expected a models.base.Target, got {type(target).__name__} without {missing}"
        )


def check_head(head: LoadedHead, target: Target) -> None:
    """Raises for a head made for another target, as far as sizes and ids show it."""
    wanted = target.feature_size(head.feature_layers)
    if wanted and head.feature_size != wanted:
        raise ValueError(
            f"head: expected one for the target's features [{wanted}], got [{head.feature_size}]"
        )
    ids = head.draft_to_target
    last = head.draft_vocab_size - 1 if ids is None else int(ids.max())
    if last >= target.vocab_size:
        raise ValueError(f"head: expected token ids below the target's {target.vocab_size}, got {last}")


def check_draft(draft: object, **of_a_head: object) -> None:
    """Raises for what is no Drafter, and for what stands beside one though it is a head's alone: any of
    `of_a_head` that is not None."""
    if draft is None:
        return
    if not hasattr(draft, "propose"):
        raise ValueError(f"draft: expected a Drafter, got {type(draft).__name__} without propose")
    for name, value in of_a_head.items():
        if value is not None:
            raise ValueError(f"{name}: expected None beside a draft, got both")


def check_roots(tree: DraftTree, batch: Batch) -> None:
    """Raises for a tree of a Drafter whose root is not the request's next token: everything behind another
    one would be wrong. Not on GPUs, where reading it would hold up the cycle."""
    if tree.tokens.device.type != "cpu":
        return
    found, wanted = torch.where(tree.num_nodes > 0, tree.tokens[:, 0], -1), batch.next_tokens
    if not torch.equal(found, wanted):
        row = int((found != wanted).nonzero()[0])
        got = "no node" if found[row] < 0 else int(found[row])
        raise ValueError(f"draft: expected the root {int(wanted[row])} in row {row} of the tree, got {got}")


def check_coupling(coupling: float | None) -> None:
    """Raises for what is no share of the noise."""
    if coupling is not None and not (_is_real(coupling) and 0 <= coupling <= 1):
        raise ValueError(f"coupling: expected a number from 0 to 1, or None, got {coupling!r}")


def check_tau(tau: float) -> None:
    """Raises for what scores cannot be divided by."""
    if not (_is_real(tau) and 0 < tau < math.inf):
        raise ValueError(f"tau: expected a finite number > 0, got {tau!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def tree_size(
    tree_shape: TreeShape | None, levels: int | None, top_k: int | None, max_nodes: int | None
) -> tuple[int, int, int]:
    """levels, draft_top_k and max_nodes of an engine: the shape's, or what was given, by default 4, 4 and 8.
    Raises where both were given, and for trees that the ops do not grow."""
    if tree_shape is not None:
        check_tree_shape(tree_shape)
        given = {"levels": levels, "draft_top_k": top_k, "max_nodes": max_nodes}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: expected None beside a tree_shape, got {value!r}")
        return tree_shape.levels, tree_shape.top_k, tree_shape.num_nodes + 1
    levels = 4 if levels is None else integer("levels", levels)
    top_k = 4 if top_k is None else integer("draft_top_k", top_k)
    max_nodes = 8 if max_nodes is None else integer("max_nodes", max_nodes)
    check_shape(levels, top_k, max_nodes)
    return levels, top_k, max_nodes


def check_tree_shape(tree_shape: TreeShape) -> None:
    """Raises for what is no TreeShape, or one that was never made."""
    if not isinstance(tree_shape, TreeShape) or not hasattr(tree_shape, "paths"):
        raise ValueError(f"tree_shape: expected an eagle_cuda.TreeShape, got {type(tree_shape).__name__}")


def check_shape(levels: int, top_k: int, max_nodes: int) -> None:
    """Raises for trees that the ops do not grow."""
    if not 1 <= top_k <= 32:
        raise ValueError(f"draft_top_k: expected 1 to 32, got {top_k}")
    if levels < 1 or (levels > 31 and top_k > 1):
        raise ValueError(f"levels: expected 1 to 31 (more for draft_top_k = 1), got {levels}")
    if not 1 <= max_nodes <= 256:
        raise ValueError(f"max_nodes: expected 1 to 256, got {max_nodes}")
    if (candidates := top_k + (levels - 1) * top_k**2) > 8192:
        raise ValueError(
            f"levels, draft_top_k: expected K + (levels - 1) K^2 of at most 8192, got {candidates}"
        )
