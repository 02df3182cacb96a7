"""What every op that takes a workspace owes: it names a wrong one and touches nothing then, and computes the
same in any that is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from compare import assert_same_bits

Outputs = Callable[[torch.Tensor | None], Sequence[torch.Tensor]]


def check_workspace(outputs: Outputs, backend: str, writes: Sequence[torch.Tensor] = ()) -> None:
    """`outputs(workspace)` calls the op. `writes`: what it writes besides, which an error leaves alone."""
    room = torch.zeros(1 << 22, dtype=torch.uint8)
    want = outputs(None)
    for wrong in (room.view(torch.int32), room[None], room[::2]):
        with pytest.raises(ValueError, match=r"^workspace: expected "):
            outputs(wrong)
    if backend == "cpu":  # which needs none
        return
    before = [tensor.clone() for tensor in writes]
    with pytest.raises(ValueError, match=r"^workspace: expected at least \d+ bytes, got 16$") as caught:
        outputs(room[:16])
    needed = int(re.findall(r"\d+", str(caught.value))[0])
    with pytest.raises(ValueError, match=rf"^workspace: expected at least {needed} bytes, got {needed - 1}$"):
        outputs(room[: needed - 1])
    for shift in (1, 8):
        with pytest.raises(ValueError, match=r"^workspace: expected an address that is a multiple of 16$"):
            outputs(room[shift : shift + needed])
    for tensor, copy in zip(writes, before):
        assert_same_bits(tensor, copy)
    assert not room.any()
    for got, expected in zip(outputs(room[16 : 16 + needed]), want, strict=True):
        assert_same_bits(got, expected)
    assert room[16 : 16 + needed].any()
    room[16 : 16 + needed] = 0
    for got, expected in zip(outputs(room[16:]), want, strict=True):  # more than is needed
        assert_same_bits(got, expected)
    assert not room[:16].any()
    assert not room[16 + needed :].any()
