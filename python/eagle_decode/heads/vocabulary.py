"""The draft vocabulary: d2t offsets (or absolute ids) and t2d flags -> absolute target ids."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def draft_to_target(
    d2t: Tensor | None, t2d: Tensor | None, draft_vocab: int, target_vocab: int
) -> tuple[Tensor | None, str, str]:
    """Returns (absolute target ids [Vd] int32 or None for the identity, decision, why).

    Two conventions are met in files: offsets (target = draft + d2t[draft], EAGLE and SpecForge) and absolute
    ids. The one that gives strictly increasing ids below the target's vocabulary, equal to the ids that t2d
    flags, is taken.
    """
    if d2t is None:
        if t2d is not None:
            raise ValueError("head: t2d is given without d2t")
        if draft_vocab != target_vocab:
            raise ValueError(
                f"head: missing tensor d2t: the draft vocabulary ({draft_vocab}) differs from the target's "
                f"({target_vocab})"
            )
        return None, "identity", "no d2t, and both vocabularies have the same size"
    if d2t.dtype not in (torch.int64, torch.int32) or list(d2t.shape) != [draft_vocab]:
        raise ValueError(f"head: d2t: expected int64 [{draft_vocab}], got {d2t.dtype} {list(d2t.shape)}")
    d2t = d2t.to(torch.int64)
    if draft_vocab == target_vocab and not d2t.any():
        return None, "identity", "d2t is all zero and both vocabularies have the same size"
    flagged = None
    if t2d is not None:
        if t2d.dim() != 1 or t2d.shape[0] < target_vocab:
            raise ValueError(f"head: t2d: expected bool [{target_vocab}], got {t2d.dtype} {list(t2d.shape)}")
        flagged = t2d.to(torch.bool).nonzero().flatten()
        if len(flagged) != draft_vocab:
            raise ValueError(
                f"head: t2d flags {len(flagged)} tokens, but the draft vocabulary has {draft_vocab}"
            )

    def fits(ids: Tensor) -> bool:
        in_range = bool((ids >= 0).all() and (ids < target_vocab).all())
        increasing = bool((ids[1:] > ids[:-1]).all())
        return in_range and increasing and (flagged is None or torch.equal(ids, flagged))

    offsets = torch.arange(draft_vocab) + d2t
    agrees = (
        "strictly increasing and equal to the ids that t2d flags"
        if t2d is not None
        else "strictly increasing"
    )
    if fits(offsets):
        if not d2t.any():
            warnings.warn(
                f"head: d2t is all zero: only the first {draft_vocab} of {target_vocab} ids are proposed. "
                "Check that the map was exported.",
                stacklevel=4,
            )
        return offsets.to(torch.int32), "offsets", f"draft id + d2t is {agrees}"
    if fits(d2t):
        return d2t.to(torch.int32), "absolute ids", f"d2t itself is {agrees}; read as offsets it is not"
    raise ValueError(_fault(offsets, target_vocab, flagged))


def _fault(ids: Tensor, target_vocab: int, flagged: Tensor | None) -> str:
    """Says what is wrong with a map, read as offsets, which is what files hold."""
    outside = ((ids < 0) | (ids >= target_vocab)).nonzero().flatten()
    if len(outside):
        i = int(outside[0])
        return f"head: d2t: entry {i} gives target id {int(ids[i])}, outside [0, {target_vocab})"
    falling = (ids[1:] <= ids[:-1]).nonzero().flatten()
    if len(falling):
        i = int(falling[0])
        return (
            f"head: d2t: target ids must increase strictly, entries {i} and {i + 1} give {int(ids[i])}, "
            f"{int(ids[i + 1])}"
        )
    i = int((ids != flagged).nonzero()[0])
    return f"head: d2t: entry {i} gives target id {int(ids[i])}, but t2d flags {int(flagged[i])}"
