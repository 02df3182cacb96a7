"""Comparisons shared by the tests."""

from __future__ import annotations

import torch


def assert_close_to_fp64(
    got: torch.Tensor, reference64: torch.Tensor, naive_same_dtype: torch.Tensor
) -> None:
    """Error against fp64 at most twice that of a naive computation in the same dtype, plus one ulp.

    The naive error is its maximum over the tensor. NaN and infinities must stand at the same places.
    """
    assert got.shape == reference64.shape, f"shape {tuple(got.shape)}, expected {tuple(reference64.shape)}"
    finite = torch.isfinite(reference64)
    assert torch.equal(got.double()[~finite].nan_to_num(0.0), reference64[~finite].nan_to_num(0.0)), (
        "infinities differ"
    )
    assert torch.equal(torch.isnan(got), torch.isnan(reference64)), "NaN at other places"
    if not bool(finite.any()):
        return
    want = reference64[finite]
    info = torch.finfo(got.dtype)
    unit = torch.clamp(want.abs(), min=info.tiny) * info.eps
    naive_error = (naive_same_dtype.double()[finite] - want).abs().max()
    error = (got.double()[finite] - want).abs()
    excess = error - (2 * naive_error + unit)
    worst = int(excess.argmax())
    assert float(excess.max()) <= 0, (
        f"error {float(error[worst]):.3e} at a value of {float(want[worst]):.6g}, "
        f"naive {got.dtype} error {float(naive_error):.3e}"
    )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shape, dtype and bits; NaN equals the same NaN, +0 differs from -0."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.contiguous().view(integer) == want.contiguous().view(integer)
    if bool(same.all()):
        return
    where = (~same).nonzero()
    first = tuple(where[0].tolist())
    raise AssertionError(
        f"{len(where)} of {got.numel()} elements differ, first {first}: {got[first]!r}, {want[first]!r}"
    )
