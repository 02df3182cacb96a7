"""Quantised weights: packed codes against a naive quantiser, products against fp64, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compare import assert_close_to_fp64, assert_same_bits
from eagle_cuda import _huge_pages
from eagle_cuda._extension import _C
from eagle_cuda.linear import linear, lm_head_topk, pack_weight, rms_norm, unpack_weight
from linear_inputs import DTYPES, FORMATS, INF, NAN, QUANTIZED, case, guarded, head_case, normal
from reference import linear as naive

formats = pytest.mark.parametrize("format", QUANTIZED)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: FORMATS[d])
weight_only = pytest.mark.parametrize("format", ["fp8", "int8", "int4"])


def hard_rows(n, k, dtype):
    """A matrix with rows of zeros, of one large value, of halves of a step, tiny and huge ones."""
    weight = normal(n, k, dtype=dtype, seed=n)
    for i, row in enumerate(weight):
        if i % 8 == 1:
            row.zero_()
        elif i % 8 == 2:
            row[k // 2] = 1000.0
        elif i % 8 == 3:  # integers and halves once divided by the scale
            row.copy_((torch.arange(k) % 255 - 127) / 2)
            row[0] = 127 if i % 16 == 3 else 7 if i % 16 == 11 else 448
        elif i % 8 == 4:
            row.mul_(2.0**-24 if dtype == torch.float16 else 1e-40)
        elif i % 8 == 5:
            row.mul_(60.0 if dtype == torch.float16 else 3e3)
        elif i % 8 == 6:
            row.neg_()
    return weight


# ---- pack_weight -------------------------------------------------------------------------------------------


@pytest.mark.op("pack_weight", "unpack_weight")
@formats
@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 2), (33, 65), (50, 127), (32, 192)])
def test_unpack_is_the_naive_quantiser(n, k, format, dtype):
    weight = hard_rows(n, k, dtype)
    packed = pack_weight(weight, format)
    assert (packed.n, packed.k, packed.format) == (n, k, format)
    assert packed.data.data_ptr() % 64 == 0
    got = unpack_weight(packed)
    assert_same_bits(got + 0.0, naive.dequantize(weight, format) + 0.0)  # but for the sign of zero


@pytest.mark.op("pack_weight", "unpack_weight")
@formats
def test_rounding_error_is_half_a_step(format):
    weight = normal(40, 256)
    error = (unpack_weight(pack_weight(weight, format)) - weight).abs()
    largest = weight.abs().view(40, -1, 64 if format == "int4" else 256).amax(-1, keepdim=True)
    if format == "fp8":  # 4 bits of mantissa, or half the smallest step
        bound = torch.maximum(weight.abs() / 16, largest.view(40, 1) / 448 / 1024) * 1.0001
    else:
        step = largest / (7 if format == "int4" else 127)
        bound = (step * (0.505 if format == "int4" else 0.5001)).expand(40, -1, 256 // largest.shape[1])
    assert (error <= bound.reshape(40, -1)).all()
    assert float(error.max()) > 0


@pytest.mark.op("pack_weight", "unpack_weight")
@formats
def test_sources_are_concatenated_by_rows(format):
    parts = [normal(rows, 70, seed=rows) for rows in (5, 32, 1, 0, 44)]
    whole = torch.cat(parts)
    packed = pack_weight(parts, format)
    assert_same_bits(packed.data, pack_weight(whole, format).data)
    for half in (3, 16, 41):
        gate, up = normal(half, 70), normal(half, 70, seed=1)
        paired = pack_weight([gate, up], format, paired=True)
        assert_same_bits(paired.data, pack_weight(torch.cat([gate, up]), format, paired=True).data)
        assert_same_bits(unpack_weight(paired), unpack_weight(pack_weight(torch.cat([gate, up]), format)))
    mixed = pack_weight([parts[0].half(), parts[1].bfloat16(), parts[2].double()], format)
    apart = [pack_weight(w, format) for w in (parts[0].half(), parts[1].bfloat16(), parts[2])]
    assert_same_bits(unpack_weight(mixed), torch.cat([unpack_weight(w) for w in apart]))
    assert_same_bits(
        pack_weight(normal(9, 140)[:, ::2], format).data,
        pack_weight(normal(9, 140)[:, ::2].contiguous(), format).data,
    )


@formats
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_values_that_are_no_numbers_are_refused(format, bad):
    weight = normal(4, 6)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match=f"^weights: expected .* for {format}, got .*(nan|inf)"):
        pack_weight([normal(4, 6), weight], format)


def test_int4_refuses_what_its_scales_cannot_reach():
    most = torch.full((2, 3), 458528.0)
    assert_same_bits(unpack_weight(pack_weight(most, "int4")), most)
    with pytest.raises(ValueError, match="^weights: expected values from -458528 to 458528 for int4, got"):
        pack_weight(-most - 1, "int4")
    pack_weight(most * 1e30, "int8")


@pytest.mark.op("pack_weight", "unpack_weight")
@formats
def test_native_packing_makes_a_bad_row_nan_and_no_other(format):
    """The native library does not look at values first: a row (int4: a group) with NaN or infinity is NaN."""
    weight = normal(40, 130)
    weight[3, 70], weight[20, 0] = NAN, -INF
    data = _huge_pages.empty(_C.packed_weight_bytes(40, 130, format, False))
    _C.pack_weight(weight, 0, 40, 130, format, False, data)
    got = unpack_weight(_C.own_weight(40, 130, format, False, data))
    bad = torch.zeros(40, 130, dtype=torch.bool)
    bad[3, 64:128] = bad[20, :64] = True
    if format != "int4":
        bad[[3, 20]] = True
    assert torch.equal(torch.isnan(got), bad)
    good = torch.where(bad, 0.0, weight)
    assert_same_bits(got[[0, 39]], unpack_weight(pack_weight(good, format))[[0, 39]])


# ---- linear ------------------------------------------------------------------------------------------------


@pytest.mark.op("linear")
@weight_only
@dtypes
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 33, 7), (2, 64, 65), (3, 100, 128), (9, 32, 130), (17, 70, 190)]
)
def test_linear_against_fp64(m, n, k, format, dtype):
    """Against the product with the dequantised matrix, within twice the error of the naive fp32 sum."""
    x, weight = case(m, n, k, dtype)
    packed, values = pack_weight(weight, format), naive.dequantize(weight, format)
    for out_dtype in DTYPES:
        got = linear(x, packed, out_dtype=out_dtype)
        simple = naive.linear(x, values, dtype=torch.float32).to(out_dtype)
        assert_close_to_fp64(got, naive.linear(x, values), simple)


@pytest.mark.op("linear")
@dtypes
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (2, 33, 7), (9, 64, 130), (17, 70, 191)])
def test_int8_dynamic_is_exact(m, n, k, dtype):
    """Sums of integers: every bit is known."""
    x, weight = hard_rows(m, k, dtype), hard_rows(n, k, dtype).flip(0)
    want = naive.int8_dynamic(x, weight)
    packed = pack_weight(weight, "int8_dynamic")
    for out_dtype in DTYPES:
        assert_same_bits(linear(x, packed, out_dtype=out_dtype), want.to(out_dtype))


def test_int8_dynamic_sums_do_not_overflow():
    x = torch.ones(1, 131072)
    packed = pack_weight(torch.cat([x, -x]), "int8_dynamic")
    one = torch.tensor(1.0)
    want = torch.tensor(127.0 * 127 * 131072) * (one / 127) * (one / 127)
    assert_same_bits(linear(x, packed), torch.stack([want, -want])[None])
    with pytest.raises(ValueError, match="^weights: expected at most 131072 columns in int8_dynamic"):
        pack_weight(torch.ones(1, 131073), "int8_dynamic")


@pytest.mark.op("linear")
@formats
@dtypes
def test_everything_fused_against_fp64(format, dtype):
    m, k, half = 5, 70, 37
    x, weight = case(m, 2 * half, k, dtype)
    bias, gamma = normal(2 * half, dtype=dtype, seed=5), normal(k, dtype=dtype, seed=6)
    paired, plain = (pack_weight(weight, format, paired=paired) for paired in (True, False))
    normed, values = rms_norm(x, gamma, 1e-6), naive.dequantize(weight, format)
    if format == "int8_dynamic":
        normed = naive.dequantize(normed, "int8")
    for packed, swiglu, columns in (
        (paired, True, half),
        (paired, False, 2 * half),
        (plain, False, 2 * half),
    ):
        residual = normal(m, columns, seed=7)
        out, check = guarded(m, columns, torch.float32)
        options = {"bias": bias, "residual": residual, "swiglu": swiglu}
        activation = "swiglu" if swiglu else None
        linear(
            x, packed, rms_norm=gamma, eps=1e-6, bias=bias, residual=residual, activation=activation, out=out
        )  # fmt: skip
        check()
        simple = naive.linear(normed, values, **options, dtype=torch.float32)
        assert_close_to_fp64(out.contiguous(), naive.linear(normed, values, **options), simple)


@pytest.mark.op("linear")
@formats
def test_a_row_that_is_no_number_spoils_no_other(format):
    x, weight = case(4, 40, 33, torch.bfloat16)
    x[1], x[2, 3] = NAN, INF
    packed = pack_weight(weight, format)
    got = linear(x, packed)
    assert torch.isnan(got[1]).all()
    assert not torch.isfinite(got[2]).any()
    assert_same_bits(got[[0, 3]], linear(x[[0, 3]], packed))


@formats
def test_sizes_of_nothing_and_numpy(format):
    packed = pack_weight(normal(6, 4), format)
    assert linear(torch.empty(0, 4).half(), packed).shape == (0, 6)
    assert linear(torch.ones(2, 4), pack_weight(torch.empty(0, 4), format)).shape == (2, 0)
    for dtype in (np.float32, np.float16):
        x = np.ones((2, 4), dtype)
        got = linear(x, packed)
        assert got.dtype == dtype
        assert_same_bits(torch.from_numpy(got), linear(torch.from_numpy(x), packed))


# ---- lm_head_topk ------------------------------------------------------------------------------------------


@pytest.mark.unchecked  # a law of values
@pytest.mark.op("linear", "lm_head_topk")
@formats
@dtypes
def test_lm_head_ranks_the_logits_of_linear(format, dtype):
    x, weight, options = head_case(6, 1100, dtype, coupled=False, mapped=True)
    packed = pack_weight(weight, format)
    got = lm_head_topk(x, packed, 7, **options)
    logits = linear(x, packed, out_dtype=torch.float32)
    for row in range(6):
        ids, log_probs, lse = naive.topk(logits[row], 7)
        assert got.tokens[row].tolist() == options["draft_to_target"][ids].tolist()
        assert torch.allclose(
            got.log_probs[row].double(), torch.tensor(log_probs, dtype=torch.float64), atol=1e-5
        )
        assert abs(float(got.lse[row]) - lse) < 1e-5


# ---- row invariance ----------------------------------------------------------------------------------------


@formats
@dtypes
def test_row_invariance(format, dtype, one_and_two_threads):
    """A row's bits depend neither on the rows beside it, their number and its place, nor on threads."""
    rows, n, k = 75, 700, 200
    x, weight = case(rows, n, k, dtype)
    packed, paired = pack_weight(weight, format), pack_weight(weight, format, paired=True)
    gamma, bias = normal(k, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)
    head_x, head_weight, options = head_case(rows, 2100, dtype, coupled=True, mapped=True)
    ids, head = options.pop("draft_to_target"), pack_weight(head_weight, format)

    def run(i):
        chosen = {name: value[i] for name, value in options.items()}
        return [
            linear(x[i], packed, bias=bias, out_dtype=torch.float32),
            linear(x[i], paired, rms_norm=gamma, activation="swiglu"),
            *lm_head_topk(head_x[i], head, 9, draft_to_target=ids, tau=1.3, **chosen),
        ]

    one, two = one_and_two_threads(lambda: run(list(range(rows))))
    for a, b in zip(one, two):
        assert_same_bits(a, b)
    for size in (1, 2, 3, 5, 6, 7, 8, 9, 16):
        chosen = [(7 * size + 11 * j) % rows for j in range(size)]
        for part, whole in zip(run(chosen), one):
            assert_same_bits(part, whole[chosen])
