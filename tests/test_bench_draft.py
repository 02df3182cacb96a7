"""The draft benchmark's GPU part without a GPU: the peer's trees, floors, and a run with a stand-in for the
device, whose times are looked at and thrown away."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import draft_gpu  # noqa: E402
import draft_report  # noqa: E402
import gpu_timing  # noqa: E402
from ceilings import H200, Ceilings  # noqa: E402
from draft_cases import AIMS, BARRIERS, Cycle, floor, row_of  # noqa: E402
from draft_gpu import COMPILED, EAGER, GRAPH, OURS, SHORT, Settings  # noqa: E402
from gpu_arms import WrongResult  # noqa: E402
from head_shapes import HEADS, HeadShape, weight_bytes  # noqa: E402
from peers import draft as peers  # noqa: E402

from eagle_cuda._extension import _C  # noqa: E402
from eagle_cuda.attention import rope_table  # noqa: E402
from eagle_cuda.draft import DraftHead, DraftLayer, draft  # noqa: E402
from eagle_cuda.kv_cache import KVCache  # noqa: E402
from eagle_cuda.linear import PackedWeight  # noqa: E402
from stand_in import StandIn, run_benchmark  # noqa: E402

CPU = torch.device("cpu")
SMALL = {
    "eagle3": HeadShape("eagle3", 64, 96, 4, 2, 64, 300, 120),
    "eagle2": HeadShape("eagle1", 64, 96, 2, 2, 64, 150, 150),
}
CYCLE = Cycle(levels=4, top_k=3, nodes=16, context=21, accepted=2)


@pytest.fixture
def small(monkeypatch):
    for name, shape in SMALL.items():
        monkeypatch.setitem(HEADS, name, shape)


def setup(kind, dtype=torch.float32, cycle=CYCLE, form=None, seed=None):
    """(shape, weights, head, what it is worth, request)."""
    shape = SMALL[kind]
    dense = draft_gpu.make_dense(shape, cycle.rows, dtype, CPU)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        dense = dense._replace(embedding=torch.randn(dense.embedding.shape, generator=generator).to(dtype))
    request = draft_gpu.make_request(shape, cycle, dtype, CPU)
    return shape, dense, *draft_gpu.make_head(shape, dense, form), request


def our_tree(head, request, cycle=CYCLE):
    variants, tree = draft_gpu.ours(head, request, cycle)
    variant = variants["draft"]()
    scores, _ = variant.view(variant.call(0))
    nodes = slice(1, int(tree.num_nodes[0]))
    return peers.Tree(tree.tokens[0, nodes].long(), tree.parents[0, nodes].long(), scores)


# ---- the peer


def exact_tree(shape, dense, request, cycle, monkeypatch):
    """(the peer's tree in float64, the smallest difference between scores that its search put in order)."""
    gaps = []

    def watched(values, count, real=peers.best):
        ordered = values.sort(descending=True).values[..., : count + 1]
        if values.dim() == 1 and count != cycle.top_k:  # the final choice: no order within
            ordered = ordered[count - 1 :]
        gaps.append(float((ordered[..., :-1] - ordered[..., 1:]).min()))
        return real(values, count)

    wide = dense._replace(**{
        name: value.double() for name, value in dense._asdict().items()
        if value is not None and value.is_floating_point() and name not in ("cos", "sin")
    })  # fmt: skip
    cache = draft_gpu.KVCache(request.cache.k.double(), request.cache.v.double())
    request = request._replace(cache=cache, features=request.features.double())
    with monkeypatch.context() as patch:
        patch.setattr(peers, "best", watched)
        tree = draft_gpu.peer(shape, wide, request, cycle)()
    return tree, min(gaps)


@pytest.mark.op("draft")
@pytest.mark.unchecked
@pytest.mark.parametrize("kind", SMALL)
def test_the_peer_grows_our_trees(kind, monkeypatch):
    """Wherever the search has no closer call than both sides' error: the same tokens and parents, in the
    same order."""
    bound, told = 1e-4, 0
    for seed in range(8):
        shape, dense, head, _, request = setup(kind, seed=seed)
        exact, gap = exact_tree(shape, dense, request, CYCLE, monkeypatch)
        if gap < 2 * bound:
            continue
        told += 1
        # The peer first: each writes its own keys and values of the path and of the levels.
        for tree in (draft_gpu.peer(shape, dense, request, CYCLE)(), our_tree(head, request)):
            assert torch.equal(tree.tokens, exact.tokens)
            assert torch.equal(tree.parents, exact.parents)
            assert float((tree.scores - exact.scores).abs().max()) < bound
    assert told >= 4


def test_trees_end_where_candidates_do():
    cycle = Cycle(levels=2, top_k=2, nodes=16, context=5, accepted=0)
    shape, dense, head, _, request = setup("eagle3", cycle=cycle)
    tree = draft_gpu.peer(shape, dense, request, cycle)()
    assert len(tree.tokens) == 2 + 4
    assert tree.parents.tolist() == our_tree(head, request, cycle).parents.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.full
def test_the_peer_can_be_compiled():
    """Every step as one graph, and one for all levels: what torch.compile is given on a GPU."""
    shape, dense, _, _, request = setup("eagle3", torch.bfloat16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # which a reset leaves to other tests

    def traced(step):
        return torch.compile(step, dynamic=False, fullgraph=True, backend="eager")

    with torch.no_grad():
        tree = draft_gpu.peer(shape, dense, request, CYCLE, traced)()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    want = draft_gpu.peer(shape, dense, request, CYCLE)()
    assert torch.equal(tree.tokens, want.tokens)
    assert torch.equal(tree.scores, want.scores)


@pytest.mark.parametrize("kind", SMALL)
def test_a_wrong_tree_is_told(kind):
    """bf16 and int4 stay within the tolerance of the benchmark; another request's tree does not."""
    for form in ("bf16", "int4"):
        shape, _, head, worth, request = setup(kind, torch.bfloat16, form=form)
        want = draft_gpu.both(draft_gpu.peer(shape, worth, draft_gpu.in_float(request), CYCLE)())
        got = draft_gpu.both(our_tree(head, request))
        assert draft_gpu.close(got, want) < draft_gpu.TOLERANCE / 4
        wrong = request._replace(features=request.features.flip(1))
        with pytest.raises(WrongResult):
            draft_gpu.close(draft_gpu.both(our_tree(head, wrong)), want)


# ---- floors


def test_floor_by_hand(small):
    got = floor("eagle2", "int4", CYCLE)
    matrices = [(64 * 6, 64), (64, 128), (192, 64), (64, 96), (64, 128), (150, 64)]
    assert got.level_bytes == sum(weight_bytes(n, k, "int4") for n, k in matrices)
    assert got.once_bytes == 0
    assert got.kv_bytes == 24 * 2 * 2 * 64 * 2
    assert got.barriers == 4 * 7
    assert got.bytes == 4 * (got.level_bytes + got.kv_bytes)
    fused = floor("eagle3", "bf16", CYCLE)
    assert fused.once_bytes == 2 * 64 * 192
    assert fused.bytes == 4 * (fused.level_bytes + fused.kv_bytes) + fused.once_bytes
    assert fused.barriers == 4 * 6


def test_floors_of_the_aims():
    """A level's weights alone are 174, 87 and 46 us at 4.3 TB/s."""
    rates = Ceilings("", 4.3e12, 790e12)
    for (head, form), alone in zip(AIMS, (174, 87, 46)):
        row = row_of(head, form, Cycle(), rates)
        assert row["level_bytes"] / 4.3e6 == pytest.approx(alone, abs=0.5)
        assert alone < row["floor_microseconds_per_level"] < 1.05 * alone
        assert row["floor_microseconds_per_level"] < row["aim_microseconds_per_level"] == AIMS[head, form]


def blank_head(shape: HeadShape, form: str, dtype: torch.dtype) -> DraftHead:
    """Of zeros, its weights as packed: packing some takes longer than the draft."""

    def pack(name: str) -> PackedWeight:
        n, k, paired = (getattr(shape.matrices[name], part) for part in ("n", "k", "paired"))
        data = torch.zeros(_C.packed_weight_bytes(n, k, form, False), dtype=torch.uint8)
        return _C.own_weight(n, k, form, paired, data)

    gain, eagle3 = torch.zeros(shape.hidden, dtype=dtype), shape.kind == "eagle3"
    norms = {"input_norm": gain, "hidden_norm": gain} if eagle3 else {}
    layer = DraftLayer(
        **{name: pack(name) for name in ("qkv", "o", "gate_up", "down")}, **norms, post_norm=gain
    )
    table = rope_table(64, shape.head_dim)
    ids = torch.arange(shape.draft_vocab).int() if shape.draft_vocab < shape.vocab else None
    return DraftHead(
        kind=shape.kind, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        norm_eps=1e-5, embedding=torch.zeros(shape.vocab, shape.hidden, dtype=dtype), fc=pack("fc"),
        lm_head=pack("lm_head"), layers=[layer], norm=gain if eagle3 else None, draft_to_target=ids,
        cos=table.cos, sin=table.sin,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.unchecked
@pytest.mark.op("draft")
@pytest.mark.parametrize("name", ["llama8b-eagle3", "vicuna13b-eagle2"])
def test_a_published_head_is_one_launch_of_the_whole_device(name, simulator):
    """It fits the persistent kernel, and meets as often as the benchmark says. Nobody is there, so that level
    0 is all that runs."""
    shape, cycle = HEADS[name], Cycle()
    head = blank_head(shape, "int4", torch.bfloat16)
    cache = KVCache.empty(1, 64, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    width = cycle.levels + 1
    absent = SimpleNamespace(
        path=torch.full((1, width), -1, dtype=torch.int32), num_accepted=torch.full((1,), -1).int()
    )
    features, tokens = torch.zeros(1, width, shape.features).bfloat16(), torch.zeros(1, width).int()
    with simulator.device(multiprocessors=132), simulator.counting() as counters:
        tree = draft(
            head, features, tokens, absent, torch.zeros(1).int(), [cache],
            max_nodes=cycle.nodes, top_k=cycle.top_k, levels=cycle.levels,
        )  # fmt: skip
    assert counters.launches == 1
    assert counters.threads == 132 * 256
    before = 2 if shape.kind == "eagle3" else 1
    assert counters.grid_arrivals == 132 * (before + BARRIERS[shape.kind])
    assert tree.num_nodes.tolist() == [0]


# ---- a run


def run(heads, settings, minutes=None):
    lines = []
    budget = gpu_timing.Budget(minutes)
    rows = list(draft_gpu.run(heads, settings, StandIn(), CPU, budget, lines.append))
    return rows, lines


@pytest.fixture
def settings():
    return Settings(rounds=2, cycle=CYCLE, formats=["bf16", "int4"], ceilings=H200)


def test_a_run_goes_on_when_a_peer_fails(small, settings, monkeypatch, capsys):
    def broken(mode):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore words")

    monkeypatch.setattr(draft_gpu, "compiler", broken)
    rows, lines = run(["eagle3", "eagle2"], settings)
    assert [(row["head"], row["format"]) for row in rows] == [
        *((head, form) for head in ("eagle3", "eagle2") for form in ("bf16", "int4")),
        ("eagle3", "bf16"), ("eagle2", "bf16"),
    ]  # fmt: skip
    assert lines[0].startswith("case 1 of 4: eagle3")
    assert lines[3].startswith("case 4 of 4: eagle2, torch.compile")
    for row in rows[:4]:
        arms = row["arms"]
        assert set(arms) == {OURS, SHORT, GRAPH, EAGER}
        assert arms[OURS]["microseconds"] == pytest.approx(1000)
        assert row["microseconds_per_level"] == pytest.approx(250)
        assert row["microseconds_per_further_level"] == pytest.approx(0)
        assert row["share_of_read"] == pytest.approx(row["bytes"] / 1e-3 / 4.8e12)
        assert arms[GRAPH]["times_ours"] == pytest.approx(1)
        assert arms[EAGER]["times_ours"] > 0
    for row in rows[4:]:
        assert set(row["arms"]) == {OURS, COMPILED}
        assert "OutOfMemoryError" in row["arms"][COMPILED]["error"]
    assert json.loads(json.dumps(rows)) == rows
    draft_report.show(rows, H200, draft_report.Console(width=200))
    out = capsys.readouterr().out
    assert "eagle3 bf16: torch.compile, graph: default: OutOfMemoryError" in out
    assert "aim: llama8b-eagle3 bf16 in 190 us a level: not measured" in out
    assert "…" not in out


def test_aims_are_told():
    row = row_of("llama8b-eagle3", "fp8", Cycle(), H200) | {"microseconds_per_level": 101.0}
    assert draft_report.aims([row]) == [
        "aim: llama8b-eagle3 bf16 in 190 us a level: not measured",
        "aim: llama8b-eagle3 fp8 in 100 us a level: 101.0 us, missed",
        "aim: llama8b-eagle3 int4 in 58 us a level: not measured",
    ]


def test_a_wrong_result_of_ours_ends_the_run(small, settings, monkeypatch):
    def worse(*args, real=draft_gpu.draft, **options):
        tree = real(*args, **options)
        tree.scores.mul_(2)

    monkeypatch.setattr(draft_gpu, "draft", worse)
    with pytest.raises(SystemExit, match="eagle3 bf16: draft: draft: WrongResult: log-probabilities differ"):
        run(["eagle3"], settings)


# ---- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("arguments", ["--floors", "--backend cuda --formats fp8"])
def test_without_a_gpu_there_are_floors_and_nothing_else(monkeypatch, tmp_path, capsys, arguments):
    _, figures = run_benchmark("bench_draft", arguments, monkeypatch, tmp_path)
    assert set(figures["results"]) == {"ceilings", "floors"}
    rows = figures["results"]["floors"]
    assert {row["head"] for row in rows} == set(HEADS)
    assert not any("microseconds_per_level" in row for row in rows)
    out = capsys.readouterr().out
    assert "nothing was timed on one" in out
    assert "4.80 TB/s (H200, datasheet)" in " ".join(out.split())
    assert "…" not in out


def test_the_whole_gpu_part(small, monkeypatch, tmp_path, capsys):
    """From the command line to the file, with a stand-in for the device."""
    module, _ = run_benchmark("bench_draft", "--floors --formats int4", monkeypatch, tmp_path)
    file = tmp_path / "gpu.json"
    real = gpu_timing.measure_ceilings
    monkeypatch.setattr(
        gpu_timing, "measure_ceilings", lambda *args: real(*args, log2_words=10, size=16, rounds=1)
    )
    monkeypatch.setattr(draft_gpu, "compiler", lambda mode: lambda step: step)
    options = SimpleNamespace(
        minutes=5, rounds=1, json=file, context=16, heads=["eagle3"], formats=["bf16"], tuned=["eagle3"]
    )
    module["on_gpu"](options, draft_report.Console(width=200), StandIn(), CPU)
    row, beside = json.loads(file.read_text())["results"]["draft"]
    assert (row["levels"], row["top_k"], row["nodes"], row["context"]) == (8, 10, 60, 16)
    assert row["microseconds_per_level"] == pytest.approx(125)
    assert set(beside["arms"][COMPILED]["tried"]) == {"default", "max-autotune-no-cudagraphs"}
    assert "case 2 of 2" in capsys.readouterr().out
