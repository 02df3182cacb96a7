"""The CUDA kernels of linear: K in slices, many rows, tensors that begin anywhere, results in x's memory,
grids of any size, traffic. What holds on every backend runs on the CPU too."""

from __future__ import annotations

import functools

import pytest
import torch

from compare import assert_close_to_fp64, assert_same_bits
from eagle_cuda.linear import linear, lm_head_topk, pack_weight, rms_norm
from linear_inputs import DTYPES, FORMATS, NAN, QUANTIZED, case, head_case, normal
from reference import linear as naive
from traffic import ROWS, WEIGHTS, bytes_moved, packed_bytes
from workspace_checks import check_workspace

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: FORMATS[d])


def check_against_fp64(got, x, weight):
    assert_close_to_fp64(got, naive.linear(x, weight), naive.linear(x, weight, dtype=torch.float32))


@pytest.mark.op("linear")
@pytest.mark.parametrize(
    ("n", "k", "dtype"), [(40, 1100, torch.float16), (40, 600, torch.float32), (300, 650, torch.bfloat16)]
)
def test_k_in_slices(n, k, dtype):
    """Few rows of weights, long columns: several blocks sum one output, with everything that follows."""
    m = 11
    x, weight = case(m, n, k, dtype)
    gamma, bias = normal(k, dtype=dtype, seed=3), normal(n, dtype=dtype, seed=4)
    residual, packed = normal(m, n, seed=5), pack_weight(weight)
    check_against_fp64(linear(x, packed, out_dtype=torch.float32), x, weight)
    normed = rms_norm(x, gamma)
    got = linear(x, packed, rms_norm=gamma, bias=bias, residual=residual, out_dtype=torch.float32)
    assert_same_bits(linear(normed, packed, bias=bias, residual=residual, out_dtype=torch.float32), got)
    plain = linear(normed, packed, out_dtype=torch.float32)
    assert_same_bits(residual + (plain + bias.float()), got)
    paired = pack_weight(weight, paired=True)
    assert_same_bits(linear(normed, paired, out_dtype=torch.float32), plain)  # rows pair, sums stay


# 32 and 33: one or two row tiles a warp; 64, 128 and 256: tokens over more warps; 257: another launch.
@pytest.mark.op("linear")
@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (24, torch.float32),
        pytest.param(24, torch.float16, marks=pytest.mark.unchecked),
        pytest.param(40, torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_any_number_of_rows(n, dtype):
    k = 600  # in slices
    x, weight = case(300, n, k, dtype)
    packed, gamma = pack_weight(weight), normal(k, dtype=dtype, seed=3)
    every = linear(x, packed, rms_norm=gamma, out_dtype=torch.float32)
    for m in (1, 7, 8, 9, 32, 33, 64, 65, 128, 129, 256, 257):
        first = (37 * m) % (301 - m)
        part = x[first : first + m].flip(0)
        assert_same_bits(
            linear(part, packed, rms_norm=gamma, out_dtype=torch.float32), every[first : first + m].flip(0)
        )
    check_against_fp64(every, rms_norm(x, gamma), weight)


@pytest.mark.op("linear")
@pytest.mark.full
@pytest.mark.parametrize("m", range(1, 301, 13))
def test_every_number_of_rows(m):
    x, weight = case(m, 70, 700, torch.bfloat16, seed=m)
    packed, gamma = pack_weight(weight), normal(700, dtype=torch.bfloat16, seed=3)
    every = linear(x, packed, rms_norm=gamma)
    for row in range(0, m, 7):
        assert_same_bits(linear(x[row : row + 1], packed, rms_norm=gamma), every[row : row + 1])


@pytest.mark.op("linear", "lm_head_topk")
@dtypes
def test_tensors_that_begin_anywhere(dtype):
    m, n, k = 5, 40, 147

    def shifted(x, shift):
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 9), NAN).to(dtype)
        view = wide[..., shift : shift + x.shape[-1]]
        view.copy_(x)
        return view

    x, weight = case(m, n, k, dtype)
    packed, gamma, bias = pack_weight(weight), normal(k, dtype=dtype, seed=3), normal(n, dtype=dtype, seed=4)
    want = linear(x, packed, rms_norm=gamma, bias=bias)
    head = lm_head_topk(x, packed, 5, rms_norm=gamma)
    for shift in (1, 2, 3, 8):
        odd, out = shifted(gamma, shift), shifted(torch.zeros_like(want), shift)
        linear(shifted(x, shift), packed, rms_norm=odd, bias=shifted(bias, shift), out=out)
        assert_same_bits(out.contiguous(), want)
        assert_same_bits(lm_head_topk(shifted(x, shift), packed, 5, rms_norm=odd).log_probs, head.log_probs)


@pytest.mark.op("linear")
@dtypes
@pytest.mark.parametrize("m", [3, 40, 300])
def test_results_in_the_memory_of_x(m, dtype):
    """Blocks still read x when others write: the emulator's checker would see the race."""
    x, weight = case(m, 96, 96, dtype)
    packed, gamma = pack_weight(weight), normal(96, dtype=dtype, seed=3)
    want, plain = linear(x, packed, rms_norm=gamma, residual=x), linear(x, packed)
    place = x.clone()
    linear(place, packed, rms_norm=gamma, residual=place, out=place)
    assert_same_bits(place, want)
    place = x.clone()
    linear(place, packed, out=place)
    assert_same_bits(place, plain)


@pytest.mark.op("linear")
def test_results_across_the_rows_of_x():
    """An output that overlaps x otherwise: up to 256 rows; more are refused where launches would meet."""
    x, weight = case(9, 16, 40, torch.float32)
    packed, words = pack_weight(weight), torch.zeros(400 * 40)
    words[40 : 40 + x.numel()] = x.flatten()
    x_view, out = words[40:].view(-1, 40)[:9], words[: 9 * 16].view(9, 16)
    want = linear(x, packed)
    assert_same_bits(linear(x_view, packed, out=out).clone(), want)


@pytest.mark.op("lm_head_topk")
@pytest.mark.parametrize("m", [1, 33, 70])
def test_many_rows_of_the_head(m):
    x, weight, options = head_case(m, 700, torch.bfloat16, coupled=True, mapped=True)
    gamma, packed = normal(24, dtype=torch.bfloat16, seed=3), pack_weight(weight)
    fixed = {"rms_norm": gamma, "draft_to_target": options.pop("draft_to_target"), "tau": 1.3}
    every = lm_head_topk(x, packed, 9, **fixed, **options)
    for row in {0, m // 2, m - 1}:
        mine = {name: value[row : row + 1] for name, value in options.items()}
        alone = lm_head_topk(x[row : row + 1], packed, 9, **fixed, **mine)
        for got, want in zip(alone, every):
            assert_same_bits(got, want[row : row + 1])


@pytest.mark.op("linear", "lm_head_topk")
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.unchecked)],
    ids=lambda d: FORMATS[d],
)
def test_rows_of_quantised_products(format, dtype):
    """K in slices (twice as long for int8_dynamic, whose steps are), both shapes of warps, a head."""
    m, n, k = 40, 60, 1030
    x, weight = case(m, n, k, dtype)
    gamma, packed = normal(k, dtype=dtype, seed=3), pack_weight(weight, format)
    every = linear(x, packed, rms_norm=gamma, out_dtype=torch.float32)
    assert_same_bits(linear(rms_norm(x, gamma), packed, out_dtype=torch.float32), every)
    head_x, head_weight, options = head_case(m, 300, dtype, coupled=True, mapped=False)
    head = pack_weight(head_weight, format)
    best = lm_head_topk(head_x, head, 9, tau=1.3, **options)
    for rows in ([0], [39, 3], list(range(5, 38)), list(range(30, 8, -1))):
        assert_same_bits(linear(x[rows], packed, rms_norm=gamma, out_dtype=torch.float32), every[rows])
        mine = {name: value[rows] for name, value in options.items()}
        for got, want in zip(lm_head_topk(head_x[rows], head, 9, tau=1.3, **mine), best):
            assert_same_bits(got, want[rows])


# ---- the workspace --------------------------------------------------------------------------------


@pytest.mark.op("linear")
def test_a_workspace_of_linear(backend):
    """Rows that are normalised apart, sums of slices and their counters."""
    x, weight = case(40, 40, 600, torch.bfloat16)
    packed, gamma = pack_weight(weight), normal(600, dtype=torch.bfloat16, seed=3)
    out = torch.full((40, 40), NAN)

    def outputs(workspace):
        return [linear(x, packed, rms_norm=gamma, out=out, workspace=workspace).clone()]

    check_workspace(outputs, backend, [out])


@pytest.mark.op("lm_head_topk")
def test_a_workspace_of_lm_head_topk(backend):
    x, weight, options = head_case(3, 500, torch.bfloat16, coupled=True, mapped=False)
    packed = pack_weight(weight)

    def outputs(workspace):
        return lm_head_topk(x, packed, 4, workspace=workspace, **options)

    check_workspace(outputs, backend)


# ---- grids and shared memory of any size ----------------------------------------------------------


@functools.cache
def on_the_usual_device():
    """(a function that computes several products, what it gives here)."""
    x, weight, options = head_case(20, 1500, torch.bfloat16, coupled=True, mapped=False)
    head, gamma = pack_weight(weight), normal(24, dtype=torch.bfloat16, seed=3)
    wide, weight = case(20, 136, 600, torch.bfloat16)
    packed = pack_weight(weight)

    def everything():
        return [
            *lm_head_topk(x, head, 8, rms_norm=gamma, **options),
            linear(wide, packed, out_dtype=torch.float32),
            linear(wide.repeat(13, 1), packed),
        ]

    return everything, everything()


@pytest.mark.op("linear", "lm_head_topk")
@pytest.mark.parametrize(
    ("blocks", "capability"),
    [
        (2, 86),
        *(
            pytest.param(*case, marks=pytest.mark.unchecked)
            for case in ((1, 90), (5, 90), (108, 80), (700, 90))
        ),
    ],
)
def test_the_device_changes_no_bit(blocks, capability, simulator):
    """Another number of multiprocessors or another limit of shared memory: other grids, passes and rings."""
    everything, want = on_the_usual_device()
    with simulator.device(multiprocessors=blocks, compute_capability=capability):
        got = everything()
    for other, one in zip(got, want):
        assert_same_bits(other, one)


# ---- traffic --------------------------------------------------------------------------------------


def bytes_read(simulator, call) -> int:
    with simulator.counting() as counters:
        call()
    return counters.global_load_bytes


def codes_and_scales(m, n, k, form) -> int:
    """What int8_dynamic reads beside: x once for its rows' scales and once for their codes; a scale of x for
    every result; a scale of weights for the four lanes of a warp, with up to 64 tokens, that sum its row."""
    return 2 * 2 * m * k + 4 * 4 * n * -(-m // 64) + 4 * n * m if form == "int8_dynamic" else 0


@pytest.mark.op("linear")
@pytest.mark.unchecked  # both builds count alike
@pytest.mark.parametrize("m", [1, 10, 64, 256])
@pytest.mark.parametrize("form", ["bf16", "int4", "int8_dynamic"])
def test_linear_reads_the_weight_once(m, form, simulator):
    """Beside it, x: each of B blocks its own slice of K, for all of its row tiles together."""
    n, k = 1056, 512
    x, weight = case(m, n, k, torch.bfloat16)
    packed = pack_weight(weight, form)
    out = torch.empty(m, n)
    read = bytes_read(simulator, lambda: linear(x, packed, out=out))
    codes = form == "int8_dynamic"
    weights, slices = packed_bytes((n, k), form=form), 1 if codes else 2  # it has half as many steps
    assert packed.data.numel() * packed.data.element_size() == weights + (4 * n if codes else 0)
    activations = (1 if codes else 2) * m * k * 66  # row tiles: for each a block, or two
    assert weights <= bytes_moved(simulator, WEIGHTS) <= 1.01 * weights
    assert activations <= bytes_moved(simulator, ROWS, WEIGHTS) <= 1.01 * activations
    partials = 4 * slices * n * ((m + 7) // 8 * 8) if slices > 1 else 0
    everything = weights + activations + partials + codes_and_scales(m, n, k, form)
    assert everything <= read <= 1.01 * everything


@pytest.mark.op("lm_head_topk")
@pytest.mark.unchecked
@pytest.mark.parametrize("form", ["bf16", "int8_dynamic"])
def test_the_head_reads_the_weight_once(form, simulator):
    m, vocab, k = 10, 3000, 256
    x, weight = case(m, vocab, k, torch.bfloat16)
    packed = pack_weight(weight, form)
    read = bytes_read(simulator, lambda: lm_head_topk(x, packed, 10))
    blocks, chunks = 94, 94  # of 32 ids
    left = m * (chunks * 8 + blocks * 10 * 8)  # for the last block
    left += codes_and_scales(m, vocab + 8, k, form)
    weights = packed_bytes((vocab, k), form=form)
    activations = (1 if form == "int8_dynamic" else 2) * m * k * blocks
    assert weights <= read - left - activations <= 1.01 * weights
    assert weights <= bytes_moved(simulator, WEIGHTS) <= 1.01 * weights
