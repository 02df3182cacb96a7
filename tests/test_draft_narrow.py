"""Trees of heads in 16 bits and fewer, against a naive search in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draft_rig import HEADS, Rig, trees_of
from reference import draft as reference


def watched(monkeypatch, **tree):
    """The naive search's tree, and the smallest difference between scores that it put in order."""
    gaps = []

    def best(scores, count, real=reference.best):
        ordered = scores.double().sort(descending=True).values[: count + 1]
        if count == tree["num_nodes"] - 1:  # the final choice: no order within
            ordered = ordered[count - 1 :]
        gaps.append(float((ordered[:-1] - ordered[1:]).min()) if len(ordered) > 1 else math.inf)
        return real(scores, count)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "best", best)
        found = reference.draft_tree(**tree)
    return found, min(gaps)


# How far apart two scores must be for their order to be sure, and the error of a node's score, which grows
# with its distance from the best.
SURE = {torch.bfloat16: (0.1, 0.25), torch.float16: (0.03, 0.03)}


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.unchecked  # a law of values
@pytest.mark.parametrize("weights", [None, pytest.param("fp8", marks=pytest.mark.full), "int4"])
@pytest.mark.parametrize("dtype", SURE, ids=str)
@pytest.mark.parametrize("case", [HEADS[0], HEADS[2]], ids=["EAGLE-2", "EAGLE-3.1"])
def test_narrow_trees_equal_a_naive_search_where_that_is_sure(case, dtype, weights, monkeypatch):
    """Wherever the search in float64 has no call closer than rounding to 16 bits can turn. The naive head
    multiplies with what the stored matrices are worth."""
    apart, error = SURE[dtype]
    shape, sure = {"top_k": 2, "levels": 3}, 0
    for seed in range(11):
        settings = case[1] | ({"weights": weights} if weights else {})
        rig = Rig.random((case[0], settings), dtype, seed=seed, peaked=True)
        rig.random.manual_seed(seed)
        features, tokens = rig.pairs(9)
        naive, root = rig.naive(torch.float64), int(tokens[-1])
        g = naive.extend(features.double(), tokens)[-1]
        want, gap = watched(monkeypatch, head=naive, g=g, root=root, num_nodes=5, **shape)
        if gap < apart:
            continue
        sure += 1
        rig.prompt(0, features[:-1], tokens[:-1])
        (tree,) = trees_of(rig.draft_last(features[-1], tokens[-1], order="candidate", max_nodes=5, **shape))
        for part in ("tokens", "parents"):
            assert tree[part] == want[part], (part, seed)
        np.testing.assert_allclose(tree["scores"], want["scores"], atol=error)
    assert sure >= 2
