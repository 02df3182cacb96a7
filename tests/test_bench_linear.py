"""The linear benchmark's GPU part without a GPU: floors, planned launches, peers, and a run with a stand-in
for the device, whose times are looked at and thrown away."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_timing  # noqa: E402
import linear_cases as cases  # noqa: E402
import linear_gpu  # noqa: E402
import linear_report  # noqa: E402
from ceilings import H200, Ceilings  # noqa: E402
from gpu_arms import WrongResult, right  # noqa: E402
from head_shapes import FORMATS, HEADS, Matrix, weight_bytes  # noqa: E402
from linear_cases import AIMS, MATRICES, TOP_K, Case, floor  # noqa: E402
from linear_gpu import OURS, Settings, expected  # noqa: E402
from linear_plan import AHEAD_BYTES, STEP, Device, Plan, plan  # noqa: E402
from peers import linear as peers  # noqa: E402

from eagle_cuda._extension import _C  # noqa: E402
from eagle_cuda.linear import linear, lm_head_topk, pack_weight  # noqa: E402
from stand_in import StandIn, run_benchmark  # noqa: E402
from traffic import bytes_moved, lines_of, packed_bytes  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Matrices that a CPU multiplies at once."""
    for matrix in (
        Matrix("plain", 80, 96),
        Matrix("gated", 96, 64, paired=True),
        Matrix("lm_head", 208, 64),
    ):
        monkeypatch.setitem(cases.MATRICES, matrix.name, matrix)


# ---- floors and plans


def test_heads_are_those_of_the_published_checkpoints():
    """Bytes of a bf16 level and of the fusion matrix, in MB."""
    found = {
        name: tuple(
            sum(weight_bytes(m.n, m.k, "bf16") for m in part) / 1e6 for part in (h.every_level, h.once)
        )
        for name, h in HEADS.items()
    }
    want = {
        "llama8b-eagle3": (748.7, 100.7),
        "vicuna13b-eagle2": (1066.9, 0),
        "qwen8b-eagle3": (698.4, 100.7),
        "qwen32b-eagle3": (1407.7, 157.3),
    }
    for name, sizes in want.items():
        assert found[name] == pytest.approx(sizes, abs=0.1), name


def test_floor_by_hand(small):
    got = floor(Case("linear", "gated", "int4", 3))
    assert got.weight_bytes == 96 * 32 + 96 * 2
    assert got.x_bytes == 3 * 64 * 2
    assert got.out_bytes == 3 * 48 * 2
    assert got.operations == 2 * 3 * 96 * 64
    assert got.bytes == sum(got) - got.operations
    assert floor(Case("lm_head_topk", "lm_head", "fp8", 10)).out_bytes == 10 * 84
    assert floor(Case("linear", "plain", "int8_dynamic", 4)).operations == 4 * 80 * 96
    (aim,) = AIMS
    assert floor(aim).seconds(Ceilings("", 4.3e12, 790e12)) == (pytest.approx(61.0e-6, rel=0.01), "bytes")


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_those_of_a_packed_weight(form):
    """Of sizes that need no padding."""
    if not _C.build_info()["cuda"]:
        pytest.skip("needs a build with CUDA kernels")
    assert weight_bytes(64, 256, form) == _C.packed_weight_bytes(64, 256, form, True)


@pytest.mark.parametrize("form", FORMATS)
def test_enough_weights_are_on_their_way(form):
    """100 KB to a multiprocessor of the H200, or all that it has to read, so that memory is busy over its
    latency: of all matrices of the heads, for as many rows as a tree has. Of 256 rows, whose products take
    longer than the bytes, half of that."""
    for name, matrix in MATRICES.items():
        for op in ["linear", "draft", *(["lm_head_topk"] if "lm_head" in name else [])]:
            for rows in (1, 10, 16, 32, 60, 64, *([256] if op == "linear" else [])):
                found = plan(op, matrix, form, rows, TOP_K)
                enough = min(AHEAD_BYTES if rows <= 64 else 48_000, found.own_bytes)
                assert found.ahead_bytes >= enough, (op, name, rows, found)


PREFETCH = lines_of("cuda/linear/stream.cuh", "prefetch")


def asked_first(plan: Plan, matrix: Matrix, form: str) -> int:
    """Bytes of weights that all blocks ask for before they multiply anything. Weights of one pass a block."""
    step_k, tile_bytes = STEP[form]
    tiles = -(-matrix.n // 16)
    steps, total = -(-matrix.k // step_k), 0
    for block in range(plan.blocks):
        item, last = (plan.slices * tiles * b // plan.blocks for b in (block, block + 1))
        left = (plan.ring - 1) * plan.stage_steps  # whole stages: a slice may end within one
        while item < last and left > 0:
            slice_, run = item // tiles, min(last - item, tiles - item % tiles)
            run = -(-run // -(-run // plan.pass_tiles))
            own = steps * (slice_ + 1) // plan.slices - steps * slice_ // plan.slices
            total += run * min(own, left) * tile_bytes
            left -= -(-own // plan.stage_steps) * plan.stage_steps
            item += run
    return total


@pytest.mark.op("linear")
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("n", "k", "rows", "multiprocessors"), [(96, 4096, 10, 3), (272, 1600, 64, 4), (528, 704, 200, 3)]
)
@pytest.mark.parametrize("form", ["bf16", "fp8", "int4"])
def test_as_many_weights_are_asked_for_as_planned(simulator, form, n, k, rows, multiprocessors):
    """The last one: all that there is room for beside the rows."""
    weight, x = pack_weight(torch.randn(n, k).bfloat16(), form), torch.randn(rows, k).bfloat16()
    matrix = Matrix("", n, k)
    planned = plan("linear", matrix, form, rows, device=Device(multiprocessors, 227 * 1024))
    with simulator.device(multiprocessors=multiprocessors), simulator.counting():
        linear(x, weight)
    assert bytes_moved(simulator, PREFETCH) == asked_first(planned, matrix, form)


@pytest.mark.op("linear")
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("n", "k", "paired", "rows"),
    [
        (96, 512, False, 10),
        (192, 640, True, 40),
        (4112, 384, False, 3),
        (1072, 640, False, 2),
        (256, 768, False, 256),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_linear_is_planned_as_it_runs(simulator, form, n, k, paired, rows):
    """Launches, blocks and warps, and every byte that is loaded: weights, activations by block, partial
    sums."""
    weight = pack_weight(torch.randn(n, k).bfloat16(), form, paired=paired)
    x = torch.randn(rows, k).bfloat16()
    for device in (Device(132, 227 * 1024), Device(24, 227 * 1024)):
        with simulator.device(multiprocessors=device.multiprocessors), simulator.counting() as counted:
            linear(x, weight, activation="swiglu" if paired else None)
        want = plan("linear", Matrix("", n, k, paired), form, rows, device=device)
        assert counted.launches == want.launches
        codes = form == "int8_dynamic"  # a launch beside it makes them: 256 threads read a row twice
        assert counted.threads == 32 * want.warps * want.blocks + (256 * rows if codes else 0)
        loaded = packed_bytes((n, k), form=form) + want.x_bytes + want.partial_bytes
        loaded += 2 * 2 * rows * k + 4 * n * rows if codes else 0  # and for every result the scale of x
        if form not in ("bf16", "int4"):  # the rows' scales, for the four lanes of a warp that sum a row
            loaded += 4 * 4 * n * -(-rows // 64)
        assert counted.global_load_bytes == loaded


@pytest.mark.op("linear")
@pytest.mark.unchecked
@pytest.mark.parametrize("form", ["bf16", "int4"])
@pytest.mark.parametrize(("n", "rows", "passes"), [(528, 256, 3), (1072, 10, 3)])
def test_every_pass_of_a_block_reads_its_activations(simulator, form, n, rows, passes):
    """Where a block has more row tiles than it takes at a time."""
    weight, x = pack_weight(torch.randn(n, 128).bfloat16(), form), torch.randn(rows, 128).bfloat16()
    want = plan("linear", Matrix("", n, 128), form, rows, device=Device(2, 227 * 1024))
    with simulator.device(multiprocessors=2), simulator.counting() as counted:
        linear(x, weight)
    assert want.x_bytes == passes * want.blocks * 2 * rows * 128
    assert counted.global_load_bytes == packed_bytes((n, 128), form=form) + want.x_bytes


@pytest.mark.op("lm_head_topk")
@pytest.mark.unchecked
@pytest.mark.parametrize("form", ["bf16", "int4"])
@pytest.mark.parametrize(("n", "rows", "multiprocessors"), [(1008, 10, 132), (16544, 10, 132), (1536, 64, 4)])
def test_lm_head_topk_is_planned_as_it_runs(simulator, form, n, rows, multiprocessors):
    """The last one: where shared memory holds fewer tiles than a block's warps could take."""
    weight, x = pack_weight(torch.randn(n, 128).bfloat16(), form), torch.randn(rows, 128).bfloat16()
    device = Device(multiprocessors, 227 * 1024)
    with simulator.device(multiprocessors=multiprocessors), simulator.counting() as counted:
        lm_head_topk(x, weight, 10)
    want = plan("lm_head_topk", Matrix("", n, 128), form, rows, 10, device)
    assert counted.launches == want.launches
    assert counted.threads == 32 * want.warps * want.blocks
    assert counted.global_load_bytes == weight_bytes(n, 128, form) + want.x_bytes + want.partial_bytes


# ---- arms


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("op", "name"), [("linear", "plain"), ("linear", "gated"), ("lm_head_topk", "lm_head")]
)
def test_every_arm_computes_the_op(small, op, name, form):
    rows = 24
    case = Case(op, name, form, rows)
    weights = linear_gpu.make_weights(linear_gpu.Group(name, form, (case,)), 1 << 16, CPU)
    assert len(weights.packed) == len(weights.dense) > 1
    x = torch.randn(rows, case.shape.k, generator=torch.Generator().manual_seed(3)).bfloat16()
    worth = linear_gpu.unpack_weight(weights.packed[0])
    want = expected(case, linear_gpu.as_codes(x) if form == "int8_dynamic" else x, worth)
    variants = [(linear_gpu.ours(case, x, weights.packed), want, linear_gpu.TOLERANCE)]
    inputs, dense = peers.Inputs(case, x, weights.dense), expected(case, x, weights.dense[0])
    variants += [(peers.eager(inputs), dense, linear_gpu.TOLERANCE)]
    variants += [(peers.codes(inputs), dense, linear_gpu.CODES_TOLERANCE)]
    for offered, right_one, tolerance in variants:
        for variant in (make() for make in offered.values()):
            right(variant.view(variant.call(0)), right_one, tolerance)
            with pytest.raises(WrongResult):  # another set, another result
                right(variant.view(variant.call(1)), right_one, tolerance)
    assert ("cuBLAS, codes" in peers.offered(case, False)) == bool(peers.codes(inputs))


def test_torch_compile_is_asked_for_some_of_bf16():
    """Of the first head, after what needs less time."""
    chosen = cases.chosen(None, FORMATS, [1, 16], [10])
    groups = linear_gpu.grouped(chosen, [16])
    assert len(groups) == len({(case.matrix, case.format) for case in chosen}) + 7
    compiled = [i for i, group in enumerate(groups) if group.compiled]
    assert {case.rows for i in compiled for case in groups[i].cases if case.op == "linear"} == {16}
    assert {case.rows for i in compiled for case in groups[i].cases if case.op != "linear"} == {10}
    assert {groups[i].matrix.split()[0] for i in compiled} == {"llama8b"}
    assert {group.format for group in groups[: compiled[0]]} == {"bf16", "fp8", "int4"}
    assert {group.format for group in groups[compiled[-1] + 1 :]} == {"int8", "int8_dynamic"}
    assert str(groups[compiled[0]]) == "llama8b lm_head bf16, torch.compile"
    assert groups[0].matrix == "llama8b lm_head"  # which has an aim
    assert not any(group.compiled for group in linear_gpu.grouped(chosen, []))
    assert peers.offered(groups[compiled[0]].cases[0], True) == ["cuBLAS", "torch.compile"]


# ---- a run


def run(chosen, settings, minutes=None):
    lines = []
    rows = list(linear_gpu.run(chosen, settings, StandIn(), CPU, gpu_timing.Budget(minutes), lines.append))
    return rows, lines


def test_a_run_goes_on_when_a_peer_fails(small, monkeypatch, capsys):
    def no_memory(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore words")

    monkeypatch.setitem(peers.PEERS, "torch.compile", lambda inputs: {"bf16": lambda: no_memory(inputs)})
    monkeypatch.setattr(linear_gpu, "COMPILED", ["plain"])
    chosen = cases.chosen(["plain", "lm_head"], ["bf16", "fp8"], [1, 16], [10])
    rows, lines = run(chosen, Settings(rounds=3, cold_bytes=1 << 15, compiled_rows=[16], ceilings=H200))
    want = sorted(
        chosen, key=lambda case: (case.format != "bf16", case.matrix != "plain", case.op != "linear")
    )
    assert [Case(*(row[key] for key in Case._fields)) for row in rows] == [
        *want, Case("linear", "plain", "bf16", 16)
    ]  # fmt: skip
    assert lines[0].startswith("case 1 of 5: plain bf16")
    first, last = rows[0], rows[-1]
    assert first["arms"][OURS]["microseconds"] == pytest.approx(1000)
    assert first["arms"]["cuBLAS"]["times_ours"] == pytest.approx(1)
    assert first["share_of_floor"] == pytest.approx(first["floor_microseconds"] / 1000)
    assert first["share_of_read"] == pytest.approx(first["bytes"] / 1e-3 / 4.8e12)
    assert set(first["arms"]) == {OURS, "cuBLAS"}
    assert "OutOfMemoryError" in last["arms"]["torch.compile"]["error"]
    assert "times_ours" in rows[-4]["arms"]["cuBLAS, codes"]
    assert json.loads(json.dumps(rows)) == rows
    linear_report.show(rows, H200, linear_report.Console(width=200))
    out = capsys.readouterr().out
    assert "linear plain bf16 M=16: torch.compile: bf16: OutOfMemoryError" in out
    assert "aim: lm_head_topk llama8b lm_head bf16 M=10 in 66 us: not measured" in out
    assert "…" not in out


def test_aims_are_told(small, capsys):
    """Of rows as a run would give them."""
    (aim,) = AIMS
    rows = [cases.row_of(case, H200) for case in (aim, Case("linear", "llama8b down", "bf16", 8))]
    for row, us in zip(rows, (65.0, 30.0)):
        seconds = us * 1e-6
        row["arms"] = {OURS: {"microseconds": us, "min_microseconds": us, "max_microseconds": us}}
        row["arms"]["cuBLAS"] = {"times_ours": us / 30}
        row |= {"share_of_read": row["bytes"] / seconds / 4.8e12, "share_of_floor": 1.0}
    assert linear_report.aims(rows) == [
        "aim: lm_head_topk llama8b lm_head bf16 M=10 in 66 us: 65.0 us, reached",
        "aim: linear at 90% of the read ceiling from 100 MB of weights up, where bytes set the floor: 0 of 1 "
        "cases; least 82% (linear llama8b down bf16 M=8)",
        "cuBLAS, bf16: 1.47 times as long (geometric mean of 2 cases); least 1.00 (linear llama8b down bf16 "
        "M=8)",
    ]


def test_a_wrong_result_of_ours_ends_the_run(small, monkeypatch):
    def half(x, weight, *, out, real=linear_gpu.linear, **options):
        return real(x, weight, out=out, **options).mul_(0.5)

    monkeypatch.setattr(linear_gpu, "linear", half)
    with pytest.raises(SystemExit, match="linear plain bf16 M=2: eagle_cuda: linear: WrongResult"):
        run([Case("linear", "plain", "bf16", 2)], Settings(rounds=1, cold_bytes=0, ceilings=H200))


# ---- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("arguments", ["--floors", "--backend cuda --rows 1 64"])
def test_without_a_gpu_there_are_floors_and_nothing_else(monkeypatch, tmp_path, capsys, arguments):
    _, figures = run_benchmark("bench_linear", arguments, monkeypatch, tmp_path)
    assert set(figures["results"]) == {"ceilings", "floors"}
    rows = figures["results"]["floors"]
    assert rows[0]["aim_microseconds"] == 66.0
    largest = [max(row["weight_bytes"] for row in rows if row["format"] == form) for form in FORMATS]
    assert min(largest) > 100e6
    assert not any("microseconds" in row for row in rows)
    out = capsys.readouterr().out
    assert "No GPU is here" in out
    assert "4.80 TB/s, 989 TFLOP/s (H200, datasheet)" in " ".join(out.split())
    assert "…" not in out


def test_the_whole_gpu_part(small, monkeypatch, tmp_path, capsys):
    """From the command line to the file, with a stand-in for the device."""
    module, _ = run_benchmark("bench_linear", "--floors --rows 1 --formats int4", monkeypatch, tmp_path)
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_timing, "COLD", 100)
    real = gpu_timing.measure_ceilings
    monkeypatch.setattr(
        gpu_timing, "measure_ceilings", lambda *args: real(*args, log2_words=10, size=16, rounds=1)
    )
    options = SimpleNamespace(minutes=5, rounds=2, json=file, compiled_rows=[])
    chosen = cases.chosen(["gated"], ["bf16", "int8_dynamic"], [1, 40], [])
    module["on_gpu"](chosen, options, linear_report.Console(width=200), StandIn(), CPU)
    rows = json.loads(file.read_text())["results"]["linear"]
    assert [row["rows"] for row in rows] == [1, 40, 1, 40]
    assert rows[3]["arms"]["cuBLAS, codes"]["variant"] == "int8"
    assert "case 2 of 2" in capsys.readouterr().out
