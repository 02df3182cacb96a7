"""The attention benchmark's GPU part without a GPU: one mask in four languages, floors, timing, peers.

A stand-in takes the place of graphs and events, and one of FlashInfer's two wrappers reads its plan as the
package documents it. What they report is looked at and thrown away.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attention_cases as cases  # noqa: E402
import attention_gpu  # noqa: E402
import attention_report  # noqa: E402
import gpu_arms  # noqa: E402
import gpu_report  # noqa: E402
import gpu_timing  # noqa: E402
from attention_cases import AIMS, Case, Shape, floor, random_parents, random_trees  # noqa: E402
from attention_gpu import OURS, TOLERANCE, Settings, expected, make_inputs, ours  # noqa: E402
from ceilings import H200, Ceilings  # noqa: E402
from gpu_arms import WrongResult  # noqa: E402
from peers import attention as peers  # noqa: E402

from reference import attention as reference  # noqa: E402
from stand_in import StandIn, run_benchmark  # noqa: E402

CPU = torch.device("cpu")


def right(got, want):
    return gpu_arms.right(got, want, TOLERANCE)


@pytest.fixture
def shapes(monkeypatch):
    """Small ones, with grouped heads and without."""
    monkeypatch.setitem(cases.SHAPES, "grouped", Shape(6, 2, 64, 1))
    monkeypatch.setitem(cases.SHAPES, "plain", Shape(2, 2, 64, 1))


class FakeFlashInfer(SimpleNamespace):
    """The package's interface, in as many words as the benchmark uses."""

    def __init__(self, misread: bool = False):
        super().__init__(
            __version__="stand-in",
            BatchPrefillWithPagedKVCacheWrapper=lambda space, layout: Wrapper(layout, misread),
            BatchDecodeWithPagedKVCacheWrapper=lambda space, layout, **options: Wrapper(layout, misread),
        )

    def segment_packbits(self, bits, indptr, *, bitorder):
        parts = [np.packbits(bits[a:b].numpy(), bitorder=bitorder) for a, b in zip(indptr, indptr[1:])]
        return torch.from_numpy(np.concatenate(parts)), None


class Wrapper:
    def __init__(self, layout, misread):
        assert layout == "NHD"
        self.misread = misread

    def plan(self, *args, custom_mask=None, causal=False, q_data_type, kv_data_type):
        assert not causal
        assert q_data_type == kv_data_type == torch.bfloat16
        if len(args) == 7:  # decode: a query each
            args = (torch.arange(len(args[0]), dtype=torch.int32), *args)
        self.q_at, self.pages_at, self.pages, self.last, self.heads, self.kv_heads, self.dim, self.size = args
        self.mask = custom_mask

    def run(self, q, cache, *, out):
        at = 0
        for b in range(len(self.last)):
            pages = self.pages[self.pages_at[b] : self.pages_at[b + 1]].long()
            rows = (len(pages) - 1) * self.size + int(self.last[b])
            k, v = (
                part[pages].flatten(0, 1)[:rows].double().repeat_interleave(self.heads // self.kv_heads, 1)
                for part in cache
            )
            mine = slice(int(self.q_at[b]), int(self.q_at[b + 1]))
            scores = torch.einsum("nhd,khd->hnk", q[mine].double(), k) / math.sqrt(self.dim)
            if self.mask is not None:
                count = scores.shape[1] * rows
                seen = self.mask[at : at + count].view(-1, rows)
                at += count
                scores.masked_fill_(~(seen | self.misread), -torch.inf)
            out[mine] = torch.einsum("hnk,khd->nhd", torch.softmax(scores, -1), v).to(out.dtype)
        return out


# ---- trees, masks, order -----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 8, 16, 32, 33, 60])
def test_one_mask_in_four_languages(nodes):
    context, batch, group = 21, 3, 2
    tree = random_trees(batch, nodes, seed=nodes)
    want = torch.zeros(batch, nodes, context + nodes, dtype=torch.bool)
    want[:, :, :context] = True
    for b in range(batch):
        parents = random_parents(nodes, nodes + b)
        for node in range(nodes):
            want[b, node, [context + slot for slot in reference.ancestors(parents, node)]] = True
    seen = cases.visible(tree.mask, context)
    assert torch.equal(seen, want)
    bias = cases.additive(seen, group, torch.bfloat16)
    assert bias.shape == (batch, 1, group * nodes, context + nodes)
    assert bias.stride(2) % 16 == 0
    assert torch.equal(bias.view(batch, group, nodes, -1) == 0, want[:, None].expand(-1, group, -1, -1))
    assert torch.isinf(bias[bias != 0]).all()
    b, row, key = torch.meshgrid(*map(torch.arange, want.shape), indexing="ij")
    assert torch.equal(cases.mask_mod(tree.mask, context)(b, 0, row, key), want)
    packed = cases.packed_bits(seen).view(batch, -1).numpy()
    bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : nodes * (context + nodes)]
    assert torch.equal(torch.from_numpy(bits).bool().view(want.shape), want)


@pytest.mark.parametrize(("context", "nodes"), [(400, 128), (100, 3), (128, 1)])
def test_flex_visits_every_block_and_masks_those_of_the_tree(context, nodes):
    tree = random_trees(2, nodes)
    got = peers.prefix_blocks(tree.mask, context)
    want = create_block_mask(
        cases.mask_mod(tree.mask, context), 2, None, nodes, context + nodes, device="cpu"
    )
    assert torch.equal(got.to_dense(), want.to_dense())
    assert got.shape == want.shape
    if nodes == 128:  # a whole block of queries: torch finds the blocks of the prefix too
        assert torch.equal(got.full_kv_num_blocks, want.full_kv_num_blocks)
        assert torch.equal(got.kv_num_blocks, want.kv_num_blocks)
    assert int(got.full_kv_num_blocks[0]) == context // 128


@pytest.mark.parametrize("nodes", [1, 2, 8, 60, 256])
def test_trees_are_those_of_drafting(nodes):
    """At most MAX_DEPTH levels, the best path in the first slots; the same for the same seed."""
    tree = random_trees(2, nodes)
    depths = tree.depths[0].tolist()
    assert max(depths) <= cases.MAX_DEPTH
    path = max(i for i in range(nodes) if depths[: i + 1] == list(range(i + 1)))
    assert path >= min(nodes - 1, 3)
    assert torch.equal(tree.parents, random_trees(2, nodes).parents)
    assert nodes < 8 or not torch.equal(tree.parents[0], tree.parents[1])


def test_cases_with_an_aim_come_first():
    grid = [
        Case(shape, batch, context, nodes)
        for shape in ("vicuna13b", "llama8b")
        for batch in (32, 1, 8)
        for context in (32768, 512, 8192, 2048)
        for nodes in (1, 8, 16, 32, 60)
    ]
    order = sorted(grid, key=cases.importance)
    assert order[:3] == list(AIMS)
    batches = [case.batch for case in order]
    assert batches == sorted(batches)
    assert all(case.shape == "llama8b" for case in order[:20])
    assert all(case.context <= cases.AIM_CONTEXT for case in order[3:17])


# ---- floors ------------------------------------------------------------------------------------------


def test_floor_by_hand(shapes):
    """Two requests, a chain of three nodes at 100 rows each: tails begin at 64, what is before is common."""
    depths = torch.tensor([[0, 1, 2], [0, 1, 2]])
    row = 2 * 2 * 64 * 2  # keys and values, two heads of 64, two bytes
    got = floor(Case("grouped", 2, 100, 3), depths, page_size=16)
    assert got.kv_bytes == 2 * 64 * row
    assert got.tail_bytes == 2 * 39 * row
    assert got.tail_loads_bytes == 2 * (37 + 38 + 39) * row
    assert got.q_bytes == got.out_bytes == 2 * 3 * 6 * 64 * 2
    assert got.partials_bytes == 2 * (2 * 3 * 6) * 66 * 4
    assert got.mask_bytes == 2 * 3 * 4 + 2 * 7 * 4
    assert got.operations == 4 * 6 * 64 * 2 * (101 + 102 + 103)
    assert got.bytes == sum(got) - got.operations - got.tail_loads_bytes
    tiles = floor(Case("grouped", 1, 100, 86), torch.zeros(1, 86))  # 258 packed rows
    assert tiles.kv_bytes == 2 * 64 * row


def test_floors_of_the_aims():
    """Keys and values or products alone are 31, 2.6 and 41 us at 4.3 TB/s and 790 TFLOP/s."""
    rates = Ceilings("", 4.3e12, 790e12)
    found = [
        floor(case, random_trees(case.batch, case.nodes).depths, 16).seconds(rates)[0] * 1e6 for case in AIMS
    ]
    assert found == pytest.approx([33.3, 2.7, 40.8], abs=0.1)
    assert all(us < aim for us, aim in zip(found, AIMS.values()))


@pytest.mark.op("tree_attention")
def test_the_kernel_moves_what_the_floor_counts(simulator, shapes):
    """One request among so many that a block takes all of its positions. Queries are read twice: by the
    common pass and by the tail."""
    case, others = Case("grouped", 1, 2080, 20), 299
    inputs = make_inputs(case, 16, 0, CPU)
    tree = inputs.tree

    def traffic(present: int) -> int:
        counts = torch.zeros(1 + others, dtype=torch.int32)
        counts[0] = present * case.nodes
        with simulator.counting() as counted:
            attention_gpu.tree_attention(
                inputs.q.expand(1 + others, -1, -1, -1).contiguous(),
                inputs.caches[0]._replace(page_table=inputs.caches[0].page_table.repeat(1 + others, 1)),
                seq_lens=inputs.seq_lens.repeat(1 + others),
                num_nodes=counts,
                mask=tree.mask.repeat(1 + others, 1, 1),
            )
        return counted.global_load_bytes + counted.global_store_bytes

    needed = floor(case, tree.depths, 16)
    moved = traffic(1) - traffic(0)  # without what every thread asks before it ends
    counted = needed.bytes - needed.tail_bytes + needed.tail_loads_bytes + needed.q_bytes
    assert 0.98 * counted <= moved <= 1.08 * counted


# ---- timing ------------------------------------------------------------------------------------------


def test_arms_take_turns():
    clock, order = StandIn(), []

    def arm(name, calls, milliseconds):
        def replay():
            order.append(name)
            clock.now += calls * milliseconds

        return gpu_timing.Arm(replay, calls, lambda i: None, lambda: None)

    arms = {"a": arm("a", 2, 0.5), "b": arm("b", 5, 0.25)}
    samples = gpu_timing.interleave(clock, arms, rounds=4, warmup=1)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert clock.log == ["backlog", "flush", "flush", "synchronize"] * 5
    assert samples["a"].rounds == [[pytest.approx(0.5e-3)]] * 4
    assert samples["b"].median == samples["b"].maximum == pytest.approx(0.25e-3)


def test_a_graph_goes_round_the_sets_and_ends_with_the_first():
    used = []
    arm = gpu_timing.capture(StandIn(), lambda i: used.append(i) or i, 3, 7)
    assert used == [0, 2, 1, 0, 2, 1, 0]
    assert arm.result() == 0
    assert arm.calls == 7


def test_the_time_budget():
    now = [0.0]
    budget = gpu_timing.Budget(1.0, clock=lambda: now[0])
    for seconds in (20.0, 20.0):
        assert budget.allows()
        now[0] += seconds
        budget.done()
    assert budget.expected == 20.0
    assert "0.7 of 1.0 min, about 1.0 for" in budget.words(3)
    assert budget.allows()  # ends at 60
    now[0] += 1.0
    assert not budget.allows()
    assert gpu_timing.Budget(None).allows()


def test_ceilings_are_those_of_what_was_timed():
    ceilings, details = gpu_timing.measure_ceilings(StandIn(), CPU, log2_words=16, size=64, rounds=2)
    assert ceilings.bytes_per_second == pytest.approx(4 * 2**16 / 1e-3)
    assert ceilings.operations_per_second == pytest.approx(2 * 64**3 / 1e-3)
    assert details["copy_gigabytes_per_second"] == pytest.approx(2 * 4 * 2**16 / 1e-3 / 1e9)


# ---- arms --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case", [Case("grouped", 2, 150, 9), Case("plain", 3, 40, 33), Case("grouped", 2, 70, 1)], ids=str
)
def test_every_arm_computes_tree_attention(shapes, monkeypatch, case):
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer())
    inputs = make_inputs(case, 16, 1 << 20, CPU)
    assert len(inputs.caches) == len(inputs.dense) > 1
    want = expected(inputs)
    keys, values = (part.transpose(1, 2) for part in inputs.dense[0])
    for b in range(case.batch):
        parents = inputs.tree.parents[b].tolist()
        for node in (0, case.nodes - 1):
            slots = reference.ancestors(parents, node)
            out, _ = reference.attend(inputs.q[b, node], keys[b], values[b], case.context, slots,
                                      scale=inputs.q.shape[-1] ** -0.5)  # fmt: skip
            torch.testing.assert_close(want[b, node], out)
    for make in (ours, *peers.PEERS.values()):
        for variant in (made() for made in make(inputs).values()):
            right(variant.view(variant.call(0)), want)
            with pytest.raises(WrongResult):  # another set, another result
                right(variant.view(variant.call(1)), want)


def test_a_wrong_mask_shows_in_a_long_context(shapes):
    """A node that misses an ancestor, or sees a stranger, at 32768 rows."""
    inputs = make_inputs(Case("plain", 1, 32768, 16), 16, 0, CPU)
    want = expected(inputs)
    right(ours(inputs)["paged"]().call(0), want)
    node = 15
    path = reference.ancestors(inputs.tree.parents[0].tolist(), node)
    stranger = next(slot for slot in range(1, node) if slot not in path)
    for slot in (path[1], stranger):
        wrong = inputs.tree.mask.clone()
        wrong[0, node, 0] ^= 1 << slot
        with pytest.raises(WrongResult):
            right(ours(inputs._replace(tree=inputs.tree._replace(mask=wrong)))["paged"]().call(0), want)


# ---- a run -------------------------------------------------------------------------------------------


def run(settings, *chosen, minutes=None):
    lines = []
    budget = gpu_timing.Budget(minutes)
    rows = list(attention_gpu.run(chosen, settings, StandIn(), CPU, budget, lines.append))
    return rows, lines


@pytest.fixture
def settings():
    return Settings(page_size=16, rounds=3, cold_bytes=1 << 18, ceilings=H200)


def test_a_run_goes_on_when_a_peer_fails(shapes, settings, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer(misread=True))

    def no_memory(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore words")

    def flex(inputs, real=peers.sdpa):  # another peer's arithmetic is faster to test with
        return {"efficient": lambda: no_memory(inputs), **real(inputs)}

    monkeypatch.setitem(peers.PEERS, "SDPA", lambda inputs: {"efficient": lambda: no_memory(inputs)})
    monkeypatch.setitem(peers.PEERS, "FlexAttention", flex)
    chosen = [Case("grouped", 2, 100, 5), Case("grouped", 1, 50, 1)]
    rows, lines = run(settings, *chosen)
    assert [row["nodes"] for row in rows] == [5, 1]
    arms = rows[0]["arms"]
    assert arms["SDPA"]["error"] == "efficient: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert "WrongResult" in arms["FlashInfer"]["error"]
    for name in (OURS, "FlexAttention"):
        assert arms[name]["microseconds"] == pytest.approx(1000)
        assert arms[name]["error_share"] < attention_gpu.TOLERANCE
    assert arms["FlexAttention"]["times_ours"] == pytest.approx(1)
    assert set(arms["FlexAttention"]["tried"]) == {"efficient", "as torch chooses"}
    assert arms["FlexAttention"]["variant"] == "as torch chooses"
    assert rows[0]["share_of_floor"] == pytest.approx(rows[0]["floor_microseconds"] / 1000)
    assert lines[0].startswith("case 1 of 2: grouped B=2 context=100 q=5")
    assert json.loads(json.dumps(rows)) == rows
    console = attention_report.Console(width=200)
    attention_report.show(rows, settings.arms, H200, console)
    out = capsys.readouterr().out
    assert "grouped B=2 context=100 q=5: SDPA: efficient: OutOfMemoryError" in out
    assert "aim: llama8b B=1 context=32768 q=16 in 37 us: not measured" in out
    pytest.importorskip("matplotlib")
    attention_report.plot(rows, settings.arms, tmp_path / "plots" / "attention.png")
    assert (tmp_path / "plots" / "attention.png").stat().st_size > 1000


def test_a_wrong_result_of_ours_ends_the_run(shapes, settings, monkeypatch):
    def blind(q, cache, *, mask, real=attention_gpu.tree_attention, **rest):
        return real(q, cache, mask=0 * mask, **rest)

    monkeypatch.setattr(attention_gpu, "tree_attention", blind)
    with pytest.raises(SystemExit, match="grouped B=1 context=40 q=6: tree_attention: paged: WrongResult"):
        run(settings, Case("grouped", 1, 40, 6))


def test_a_graph_that_does_nothing_is_not_timed(shapes):
    inputs = make_inputs(Case("grouped", 1, 40, 6), 16, 0, CPU)
    want = expected(inputs)

    def check(got):
        return right(got, want)

    for works in (True, False):
        arm, record = gpu_arms.best_variant(StandIn(works), lambda: ours(inputs), check, 1)
        assert (arm is not None) == works, record
    assert "WrongResult" in record["error"]


def test_absent_peers_and_lost_cases_have_their_reasons(shapes, settings, monkeypatch):
    settings.absent = {"FlashInfer": "absent: not installed"}

    def no_room(case, *rest, real=make_inputs):
        if case.nodes == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, *rest)

    monkeypatch.setattr(attention_gpu, "make_inputs", no_room)
    chosen = [Case("grouped", 1, 40, 9), Case("grouped", 1, 40, 6), Case("plain", 1, 40, 6)]
    settings.arms = (OURS, "FlashInfer")
    rows, _ = run(settings, *chosen)
    assert rows[1]["arms"]["FlashInfer"] == {"error": "absent: not installed"}
    lost = "grouped B=1 context=40 q=9: OutOfMemoryError: CUDA out of memory"
    assert gpu_report.errors(rows, attention_report.case_of) == [lost, "FlashInfer is absent: not installed"]
    rows, lines = run(settings, *chosen[1:], minutes=1e-4)
    assert len(rows) == 1
    assert lines[-1] == "time is up after 1 of 2 cases; not run: plain B=1 context=40 q=6"


def test_versions_name_what_is_absent(monkeypatch):
    for name in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    found = peers.versions()
    assert found["FlashInfer"].startswith("absent: ModuleNotFoundError")
    assert found["FlexAttention"].startswith("absent: it needs Triton")
    assert found["SDPA"] == f"torch {torch.__version__}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("arguments", ["--floors --batches 1 --nodes 16 60", "--backend cuda --batches 1"])
def test_without_a_gpu_there_are_floors_and_nothing_else(monkeypatch, tmp_path, capsys, arguments):
    _, figures = run_benchmark("bench_attention", arguments, monkeypatch, tmp_path)
    assert set(figures["results"]) == {"ceilings", "floors"}
    rows = figures["results"]["floors"]
    assert [Case(*(row[key] for key in Case._fields)) for row in rows[:3]] == list(AIMS)
    out = capsys.readouterr().out
    assert "No GPU is here" in out
    assert "4.80 TB/s, 989 TFLOP/s (H200, datasheet)" in out
    assert "…" not in out


def test_the_whole_gpu_part(shapes, monkeypatch, tmp_path, capsys):
    """From the command line to the file, with a stand-in for the device."""
    arguments = "--floors --shapes grouped --batches 1 --nodes 4 --contexts 64"
    module, _ = run_benchmark("bench_attention", arguments, monkeypatch, tmp_path)
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_timing, "COLD", 100)
    real = gpu_timing.measure_ceilings
    monkeypatch.setattr(
        gpu_timing, "measure_ceilings", lambda *args: real(*args, log2_words=10, size=16, rounds=1)
    )
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer())
    options = SimpleNamespace(
        minutes=5, page_size=64, rounds=2, arms=[OURS, "FlashInfer"], json=file, plot=tmp_path / "plot.png"
    )
    module["on_gpu"](
        [Case("grouped", 2, 64, 4)], options, attention_report.Console(width=200), StandIn(), CPU
    )
    results = json.loads(file.read_text())["results"]
    assert results["peers"]["FlashInfer"] == "stand-in"
    assert results["attention"][0]["arms"]["FlashInfer"]["variant"] == "prefill, custom mask"
    assert "case 1 of 1" in capsys.readouterr().out
