"""pack_weight, linear, rms_norm, lm_head_topk: against fp64, row by row, at every edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import assert_close_to_fp64, assert_same_bits
from eagle_cuda.linear import linear, lm_head_topk, pack_weight, rms_norm, unpack_weight
from linear_inputs import DTYPES, FORMATS, INF, NAN, case, guarded, head_case, normal
from reference import linear as naive

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: FORMATS[d])


# ---- pack_weight -------------------------------------------------------------------------------------------


@pytest.mark.op("pack_weight", "unpack_weight")
@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 2), (31, 3), (32, 64), (33, 65), (130, 7), (576, 96)])
def test_unpack_returns_the_packed_bits(n, k, dtype):
    generator = torch.Generator().manual_seed(n)
    bits = torch.randint(-(2**15), 2**15, (n, k), generator=generator, dtype=torch.int16)
    weight = bits.view(dtype) if dtype != torch.float32 else normal(n, k)
    packed = pack_weight(weight)
    assert (packed.n, packed.k, packed.format) == (n, k, FORMATS[dtype])
    assert (packed.paired, packed.backend) == (False, "cpu")
    assert packed.data.data_ptr() % 64 == 0
    assert_same_bits(unpack_weight(packed), weight)


@pytest.mark.op("pack_weight", "unpack_weight")
@dtypes
def test_sources_are_concatenated_by_rows(dtype):
    parts = [normal(rows, 19, dtype=dtype, seed=rows) for rows in (5, 32, 1, 0, 44)]
    whole = torch.cat(parts)
    packed = pack_weight(parts)
    assert_same_bits(unpack_weight(packed), whole)
    assert_same_bits(packed.data, pack_weight(whole).data)
    for half in (3, 16, 41):
        gate, up = normal(half, 19, dtype=dtype), normal(half, 19, dtype=dtype, seed=1)
        paired = pack_weight([gate, up], paired=True)
        assert_same_bits(unpack_weight(paired), torch.cat([gate, up]))
        assert_same_bits(paired.data, pack_weight(torch.cat([gate, up]), paired=True).data)


@pytest.mark.op("pack_weight", "unpack_weight")
def test_strided_and_converted_sources():
    weight = normal(40, 24)
    assert_same_bits(unpack_weight(pack_weight(weight[:, ::2])), weight[:, ::2].contiguous())
    assert_same_bits(unpack_weight(pack_weight(weight[::2])), weight[::2].contiguous())
    assert_same_bits(unpack_weight(pack_weight(weight.t())), weight.t().contiguous())
    assert_same_bits(unpack_weight(pack_weight(weight, "bf16")), weight.bfloat16())
    assert_same_bits(unpack_weight(pack_weight(weight.requires_grad_())), weight.detach())


def test_packed_weights_outlive_their_neighbours():
    weights = [normal(600, 512, dtype=torch.bfloat16, seed=i) for i in range(12)]
    packed = [pack_weight(w) for w in weights]
    kept = packed[::3]
    del packed
    more = [pack_weight(normal(600, 512, dtype=torch.bfloat16, seed=100 + i)) for i in range(12)]
    for w, p in zip(weights[::3], kept):
        assert_same_bits(unpack_weight(p), w)
    assert len({p.data.data_ptr() for p in kept + more}) == len(kept) + len(more)


# ---- linear ------------------------------------------------------------------------------------------------


@pytest.mark.op("linear")
@dtypes
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 33, 7), (2, 64, 65), (3, 100, 96), (8, 48, 31), (9, 32, 16), (17, 70, 50), (70, 40, 33)],
)
def test_linear_against_fp64(m, n, k, dtype):
    x, weight = case(m, n, k, dtype)
    packed = pack_weight(weight)
    for out_dtype in DTYPES:
        got = linear(x, packed, out_dtype=out_dtype)
        want = naive.linear(x, weight)
        assert_close_to_fp64(got, want, naive.linear(x, weight, dtype=torch.float32).to(out_dtype))


@pytest.mark.op("linear", "rms_norm")
@dtypes
@pytest.mark.parametrize("half", [1, 16, 37])
def test_everything_fused_against_fp64(half, dtype):
    m, k = 5, 70
    x, weight = case(m, 2 * half, k, dtype)
    bias, gamma = normal(2 * half, dtype=dtype, seed=5), normal(k, dtype=dtype, seed=6)
    paired, plain = pack_weight(weight, paired=True), pack_weight(weight)
    normed = rms_norm(x, gamma, 1e-6)
    for out_dtype in DTYPES:
        for packed, swiglu, columns in (
            (paired, True, half),
            (paired, False, 2 * half),
            (plain, False, 2 * half),
        ):
            residual = normal(m, columns, dtype=out_dtype, seed=7)
            out, check = guarded(m, columns, out_dtype)
            options = {"bias": bias, "residual": residual, "swiglu": swiglu}
            activation = "swiglu" if swiglu else None
            linear(
                x,
                packed,
                rms_norm=gamma,
                eps=1e-6,
                bias=bias,
                residual=residual,
                activation=activation,
                out=out,
            )
            check()
            simple = naive.linear(normed, weight, **options, dtype=torch.float32).to(out_dtype)
            assert_close_to_fp64(out.contiguous(), naive.linear(normed, weight, **options), simple)


@pytest.mark.op("linear")
def test_each_option_is_used():
    """Every option alone changes the result as its formula says: integers, so the comparison is exact."""
    x, weight = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 4.0]])
    packed, plain = pack_weight(weight), torch.tensor([[3.0, 2.0, 8.0], [2.0, 6.0, -4.0]])
    bias, residual = torch.tensor([1.0, 10.0, 100.0]), torch.tensor([[5.0, 6.0, 7.0], [8.0, 9.0, 1.0]])
    assert torch.equal(linear(x, packed), plain)
    assert torch.equal(linear(x, packed, bias=bias), plain + bias)
    assert torch.equal(linear(x, packed, residual=residual), plain + residual)
    assert torch.equal(linear(x, packed, bias=bias, residual=residual), plain + bias + residual)
    in_place = residual.clone()
    assert linear(x, packed, residual=in_place, out=in_place) is in_place
    assert torch.equal(in_place, plain + residual)


@pytest.mark.op("linear", "rms_norm")
@dtypes
def test_fused_norm_is_rms_norm(dtype):
    x, weight = case(6, 40, 75, dtype)
    gamma, packed = normal(75, dtype=dtype, seed=9), pack_weight(weight)
    assert_same_bits(linear(x, packed, rms_norm=gamma, eps=1e-3), linear(rms_norm(x, gamma, 1e-3), packed))


@pytest.mark.op("rms_norm")
@dtypes
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 15), (2, 16), (4, 17), (2, 576)])
def test_rms_norm_against_fp64(m, k, dtype):
    x, gamma = normal(m, k, dtype=dtype), normal(k, dtype=dtype, seed=1)
    for eps in (0.0, 1e-5, 1.0):
        got = rms_norm(x, gamma, eps)
        simple = naive.rms_norm(x, gamma, eps, dtype=torch.float32).to(dtype)
        assert_close_to_fp64(got, naive.rms_norm(x, gamma, eps), simple)
    out, check = guarded(m, k, dtype)
    rms_norm(x, gamma, 1.0, out=out)
    check()
    assert_same_bits(out.contiguous(), got)
    assert_same_bits(rms_norm(x, gamma, 1.0, out=x), got)


@pytest.mark.op("linear")
def test_strided_inputs():
    x, weight = case(8, 24, 20, torch.bfloat16)
    packed, residual = pack_weight(weight), normal(8, 24, dtype=torch.bfloat16)
    want = linear(x, packed, residual=residual)
    wide = torch.full((8, 50), NAN, dtype=torch.bfloat16)
    wide[:, 11:31] = x
    other = torch.full((8, 30), NAN, dtype=torch.bfloat16)
    other[:, 3:27] = residual
    assert_same_bits(linear(wide[:, 11:31], packed, residual=other[:, 3:27]), want)
    assert_same_bits(linear(x[::2], packed, residual=residual[::2]), want[::2].contiguous())
    same_row = x[:1].expand(5, -1)
    assert_same_bits(linear(same_row, packed), linear(same_row.contiguous(), packed))


def test_numpy():
    x, weight = case(3, 8, 5, torch.float32)
    packed = pack_weight([weight.numpy()])
    got = linear(x.numpy(), packed)
    assert isinstance(got, np.ndarray)
    assert_same_bits(torch.from_numpy(got), linear(x, packed))
    assert isinstance(lm_head_topk(x.numpy(), packed, 2).tokens, np.ndarray)
    assert isinstance(rms_norm(x.numpy(), np.ones(5, np.float32)), np.ndarray)


@pytest.mark.op("linear", "rms_norm", "lm_head_topk")
@dtypes
def test_empty_batch(dtype):
    weight = pack_weight(normal(6, 4, dtype=dtype))
    x = torch.empty(0, 4, dtype=dtype)
    assert linear(x, weight).shape == (0, 6)
    assert rms_norm(x, torch.ones(4, dtype=dtype)).shape == (0, 4)
    assert lm_head_topk(x, weight, 3).tokens.shape == (0, 3)
    assert linear(x.new_ones(2, 4), pack_weight(torch.empty(0, 4, dtype=dtype))).shape == (2, 0)


@pytest.mark.op("linear")
@dtypes
def test_non_finite_values_stay_in_their_row_and_column(dtype):
    x, weight = case(4, 40, 33, dtype)
    x[1], x[2, 3] = NAN, INF
    weight[7, 0], weight[9, 3] = INF, NAN
    got = linear(x, pack_weight(weight))
    simple = naive.linear(x, weight, dtype=torch.float32).to(dtype)
    assert_close_to_fp64(got, naive.linear(x, weight), simple)
    assert torch.isfinite(got[[0, 3]][:, [0, 39]]).all()


@pytest.mark.op("linear")
def test_large_values_round_to_infinity():
    x, weight = torch.full((1, 4), 200.0).half(), torch.full((3, 4), 200.0).half()
    assert torch.equal(linear(x, pack_weight(weight)), torch.full((1, 3), INF).half())
    assert torch.equal(linear(x, pack_weight(weight), out_dtype=torch.float32), torch.full((1, 3), 160000.0))


@pytest.mark.op("linear")
def test_swiglu_extremes():
    """silu must not overflow on the way: gates from -inf to inf, ups of one."""
    gate = torch.tensor([-INF, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, INF, NAN])
    weight = torch.cat([gate, torch.ones_like(gate)])[:, None]
    got = linear(torch.ones(1, 1), pack_weight(weight, paired=True), activation="swiglu")[0]
    assert torch.isnan(got[[0, 8]]).all()
    assert torch.equal(got[5:8], gate[5:8])
    assert (got[1:5].abs() <= 1e-38).all()


# ---- row invariance ----------------------------------------------------------------------------------------


def row_invariance_cases():
    """(name, rows, run(list of rows) -> tensors of [rows, ...])."""

    def of(op, *case):
        return pytest.param(*case, marks=pytest.mark.op(op))

    rows = 75
    for dtype in DTYPES:
        for n, k in ((576, 576), (1000, 97)):
            x, weight = case(rows, n, k, dtype, seed=n)
            packed, paired = pack_weight(weight), pack_weight(weight, paired=True)
            gamma, bias = normal(k, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)
            residual = normal(rows, n, seed=3)

            def plain(i, x=x, packed=packed, residual=residual, bias=bias):
                return [linear(x[i], packed, bias=bias, residual=residual[i], out_dtype=torch.float32)]

            def fused(i, x=x, paired=paired, gamma=gamma):
                return [linear(x[i], paired, rms_norm=gamma, activation="swiglu"), rms_norm(x[i], gamma)]

            yield of("linear", f"linear {FORMATS[dtype]} {n}x{k}", rows, plain)
            yield of("linear", f"norm and swiglu {FORMATS[dtype]} {n}x{k}", rows, fused)
        x, weight, options = head_case(rows, 2100, dtype, coupled=True, mapped=True)
        ids, packed = options.pop("draft_to_target"), pack_weight(weight)

        def topk(i, x=x, packed=packed, ids=ids, options=options):
            chosen = {name: value[i] for name, value in options.items()}
            return list(lm_head_topk(x[i], packed, 9, draft_to_target=ids, tau=1.3, **chosen))

        yield of("lm_head_topk", f"lm_head_topk {FORMATS[dtype]}", rows, topk)


@pytest.mark.unchecked  # test_linear_cuda.py has smaller ones
@pytest.mark.parametrize(
    ("name", "rows", "run"), list(row_invariance_cases()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_row_invariance(name, rows, run, one_and_two_threads, backend):
    """A row's bits depend neither on the rows beside it, their number and its place, nor threads or runs."""
    everything = list(range(rows))
    one, two = one_and_two_threads(lambda: run(everything))
    for a, b in zip(one, two):
        assert_same_bits(a, b)
    if backend == "cpu":
        for a, b in zip(one, run(everything)):
            assert_same_bits(a, b)
    # The emulator's time is for what tiles of eight rows can tell apart.
    for size in (1, 9, 32) if backend == "simt" else (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 32):
        chosen = [(7 * size + 11 * j) % rows for j in range(size)]
        for part, whole in zip(run(chosen), one):
            assert_same_bits(part, whole[chosen])


@pytest.mark.op("pack_weight", "unpack_weight", "linear")
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 20),
    st.integers(1, 150),
    st.integers(1, 80),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_shape(dtype, m, n, k, swiglu, seed):
    n += n % 2 if swiglu else 0
    x, weight = case(m, n, k, dtype, seed)
    packed = pack_weight(weight, paired=swiglu)
    assert_same_bits(unpack_weight(packed), weight)
    out, check = guarded(m, n // 2 if swiglu else n, torch.float32)
    linear(x, packed, activation="swiglu" if swiglu else None, out=out)
    check()
    want = naive.linear(x, weight, swiglu=swiglu)
    assert_close_to_fp64(out.contiguous(), want, naive.linear(x, weight, swiglu=swiglu, dtype=torch.float32))
    row = seed % m
    assert_same_bits(
        linear(x[row : row + 1], packed, activation="swiglu" if swiglu else None, out_dtype=torch.float32),
        out[row : row + 1].contiguous(),
    )


def test_out_may_be_x(one_and_two_threads):
    """A thread that comes late must not read what another has written: many tries, few rows."""
    random = torch.Generator().manual_seed(5)
    weight = pack_weight((torch.randn(2048, 2048, generator=random) * 0.02).bfloat16())
    x = torch.randn(1, 2048, generator=random).bfloat16()
    want = linear(x, weight)

    def wrong():
        places = [x.clone() for _ in range(200)]
        return sum(not torch.equal(linear(place, weight, out=place), want) for place in places)

    assert tuple(one_and_two_threads(wrong)) == (0, 0)
