"""on_device: the copies that stand for CPU tensors on a GPU, with the CPU in the place of the GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import on_device
from eagle_cuda import kv_cache
from eagle_cuda._extension import _C
from eagle_cuda.draft import extend_draft
from gpu.draft_op_cases import HIDDEN, ROWS, caches_in, head_in
from gpu.op_cases import CASES
from on_device import Copies, copyable, op_of

ROOT = Path(__file__).resolve().parent.parent


def run(function, *args, **options):
    return on_device.on("cpu", "op", function)(*args, **options)


def test_views_keep_strides_offsets_and_aliases():
    words = torch.arange(100, dtype=torch.int32)
    table, column = words[10:70].view(6, 10), words.as_strided((5,), (10,), 13)

    def op(tables, other, *, absent, number):
        copy = tables[0]
        assert (absent, number) == (None, 7)
        assert copy.data_ptr() != table.data_ptr()
        assert copy.stride() == table.stride()
        assert copy.storage_offset() == 10
        assert other.stride() == (10,)
        assert other.data_ptr() - copy.data_ptr() == 12
        assert torch.equal(copy, table)
        copy[0, 3] = -1
        assert other[0] == -1
        return 5

    assert run(op, [table], column, absent=None, number=7) == 5
    assert words[13] == -1
    assert words[[12, 14]].tolist() == [12, 14]


def test_writes_outside_of_an_output_come_back():
    words = torch.zeros(30, dtype=torch.int32)

    def op(out):
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(9)

    run(op, words[10:20])
    assert words.nonzero().tolist() == [[9]]


def test_nothing_comes_back_from_a_call_that_fails():
    words = torch.zeros(4)

    def op(out):
        out.fill_(1)
        raise ValueError("out: expected something else")

    with pytest.raises(ValueError, match="something else"):
        run(op, words)
    assert not words.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64])
def test_bytes_are_copied_as_they_are(dtype):
    words = torch.arange(64, dtype=torch.uint8)
    values = words.view(dtype) if dtype != torch.bool else words.ne(5)
    seen = []
    run(lambda t: seen.append(t.clone()), values)
    assert torch.equal(seen[0].view(torch.uint8), values.view(torch.uint8))
    assert seen[0].dtype == dtype


def test_numpy_outputs_and_subclasses():
    class Own(torch.Tensor):
        pass

    array = np.zeros((4, 6), np.int32)
    kinds = []

    def op(a, b, c):
        kinds.extend([type(a), type(b)])
        a.fill_(3)
        assert c.shape == (0, 4)

    run(op, array[:, 1:3], torch.zeros(2).as_subclass(Own), torch.empty(0, 4))
    assert array.sum() == 3 * 8
    assert (array[:, 1:3] == 3).all()
    assert kinds == [torch.Tensor, Own]


def test_what_is_not_copied():
    conjugated = torch.zeros(3, dtype=torch.complex64).conj()
    backwards, locked = np.zeros(3)[::-1], np.zeros(3)
    locked.flags.writeable = False
    for value in (conjugated, conjugated.imag, backwards, locked, np.zeros(3, ">i4"), 3, None, "cpu"):
        assert copyable(value) is None
    meta = torch.zeros(3, device="meta")
    before = on_device.calls["op"]
    run(lambda t, u: None, meta, None)
    assert on_device.calls["op"] == before
    run(lambda t, u: None, meta, torch.zeros(3))
    assert on_device.calls["op"] == before + 1


def test_tensors_of_the_device_count_too():
    """As in a captured graph; other tensors do not, where nothing is copied."""
    op = on_device.on("meta", "op", lambda *args, **options: None)
    there, here = torch.zeros(3, device="meta"), torch.zeros(3)
    with on_device.on_cpu():
        before = on_device.calls["op"]
        op(here, [here], None, x=here)
        run(lambda t: None, here)
        assert on_device.calls["op"] == before
        for args, options in (((there,), {}), ((3, [[there]]), {}), ((), {"x": there}), ((here, there), {})):
            op(*args, **options)
        assert on_device.calls["op"] == before + 4
    op(there)
    assert on_device.calls["op"] == before + 5


def test_one_copy_of_each_memory():
    copies = Copies("cpu")
    words = torch.zeros(8)
    copies.to_device([words, words[2:], [words.view(2, 4)], torch.zeros(3)])
    assert len(copies) == 2


def test_a_draft_head_is_built_anew_over_copies():
    """Tensors and packed weights, each copied once: what is done to a copy is seen through the new head."""
    a = CASES["extend_draft"].arrays(0)

    def output(head):
        hidden = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
        rows = a["features"][0], a["tokens"][0], [0, ROWS], a["seq_lens"][:1]
        return extend_draft(head, *rows, caches_in({**a, "page_table": a["page_table"][:1]}), hidden=hidden)

    head, copies = head_in(a), Copies("cpu")
    other = copies.to_device([head])[0]
    assert len(copies) == 14  # 6 weights, 4 norms, 2 tables, the embedding, the map
    outputs = [output(head), output(other)]
    assert torch.equal(*outputs)
    for value in (a["embedding"], head._arguments[-2][0]["down"].data):
        copies.to_device(value).zero_()
        outputs.append(output(other))
        assert not torch.equal(outputs[-1], outputs[-2])
    assert torch.equal(output(head), outputs[0])


def test_on_cpu_takes_tensors_as_they_are():
    words = torch.zeros(2)
    with on_device.on_cpu():
        run(lambda t: t.fill_(t.data_ptr() == words.data_ptr()), words)
    assert words.all()


def test_every_name_of_an_op_is_replaced():
    places = {(module, name) for module, name, _ in on_device.wrapped(_C, "cpu")}
    assert {(_C, op) for op in on_device.ops_with_kernels()} <= places
    functions = [getattr(_C, op) for op in on_device.ops_with_kernels()]
    held = [(m, n) for m in (kv_cache,) for n, v in vars(m).items() if v in functions]
    assert set(held) <= places
    native = SimpleNamespace(
        **{op: lambda: None for op in on_device.ops_with_kernels()}, packed_weight_bytes=len, other=len
    )
    on_device.install(native, "cpu")
    assert native.other is len
    assert all(hasattr(getattr(native, op), "__wrapped__") for op in on_device.ops_with_kernels())


@pytest.mark.parametrize("name", CASES)
def test_ops_give_the_same_on_copies(name, monkeypatch):
    arrays, call = CASES[name]
    expected, got = arrays(3), arrays(3)
    call(expected)
    for module, attribute, replacement in on_device.wrapped(_C, "cpu"):
        monkeypatch.setattr(module, attribute, replacement)
    before = on_device.calls[op_of(name)]
    call(got)
    assert on_device.calls[op_of(name)] == before + 1
    for key, value in expected.items():
        assert torch.equal(got[key].view(torch.uint8), value.view(torch.uint8)), key


@pytest.mark.full
def test_op_tests_in_rehearsal():
    """What `--backend cuda` will do with the op tests, up to the device itself."""
    mark = re.compile(r"^(@|pytestmark = .*)pytest\.mark\.op\(", re.M)
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if mark.search(path.read_text())]
    files = sorted(set(marked) - {Path(__file__)})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "gpu.rehearsal", "-m", "not full", *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
