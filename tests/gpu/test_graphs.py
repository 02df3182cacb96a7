"""Every op captured in a CUDA graph and replayed with other inputs and padding rows: the same bits as a plain
call on the CPU backend. Without a GPU the replay is the call itself, which tests the cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import on_device
from compare import assert_same_bits
from gpu.op_cases import CASES, Arrays
from gpu.run_cases import same


def graph_of(call: Callable[[], object], device: str) -> Callable[[], object]:
    """A function that does what `call` does, from a captured graph where there are graphs."""
    if device == "cpu":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what loads lazily is loaded before the capture
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@pytest.fixture
def device(backend) -> str:
    return "cuda" if backend == "cuda" else "cpu"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.op(on_device.op_of(name))) for name in CASES]
)
def test_a_replay_sees_the_inputs_of_now(name, device):
    arrays, call = CASES[name]
    static: Arrays = {key: value.to(device) for key, value in arrays(0).items()}
    with on_device.on_cpu():
        replay = graph_of(lambda: call(static), device)
    results = []
    for seed in (1, 2, 1):
        given = arrays(seed)
        for key, value in given.items():
            static[key].copy_(value)
        replay()
        expected = {key: value.clone() for key, value in given.items()}
        with on_device.on_cpu():
            call(expected)
        for key, value in expected.items():
            assert_same_bits(static[key].cpu(), value)
        assert any(not same(value, given[key]) for key, value in expected.items())
        results.append(expected)
    assert any(not same(results[0][key], results[1][key]) for key in expected)
    assert all(same(results[0][key], results[2][key]) for key in expected)


def test_every_op_with_a_kernel_has_a_case():
    assert {on_device.op_of(name) for name in CASES} == set(on_device.ops_with_kernels())


@pytest.mark.parametrize("name", [name for name in CASES if name != on_device.op_of(name)])
def test_a_further_case_is_another_call(name):
    first, further = CASES[on_device.op_of(name)], CASES[name]
    ours, others = first.arrays(1), further.arrays(1)
    first.call(ours)
    further.call(others)
    assert any(not same(value, ours[key]) for key, value in others.items())
