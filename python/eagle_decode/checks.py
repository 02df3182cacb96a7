"""What an engine refuses to be made of: ValueErrors with the argument, what was expected, what was given."""

from __future__ import annotations

from eagle_decode.heads.loaded import LoadedHead
from eagle_decode.models.base import Target


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


def check_coupling(coupling: float | None) -> None:
    """Raises for what is no share of the noise."""
    number = isinstance(coupling, (int, float)) and not isinstance(coupling, bool)
    if coupling is not None and not (number and 0 <= coupling <= 1):
        raise ValueError(f"coupling: expected a number from 0 to 1, or None, got {coupling!r}")


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
