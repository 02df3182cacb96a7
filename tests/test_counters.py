"""What each CUDA kernel does in one typical case, as the emulator counts it: global traffic to the byte
whatever the compiler, shared memory and synchronisation to the wavefront under the compiler that the figures
are of.

A change of a kernel that moves a figure is meant to fail here: read the new figures in the message, and
change the line if they are the better ones.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import eagle_cuda
from eagle_cuda.kv_cache import KVCache, compact_kv
from eagle_cuda.sampling import sample_tokens
from eagle_cuda.tree import build_tree, empty_candidates, expand_tree, retrieve_indices, tree_from_parents
from eagle_cuda.verify import verify

COMPILER = "GNU 12.2.0"  # of SHARED: what it keeps in registers does not show as a shared access


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def grown(levels: int = 8, top_k: int = 10):
    """Candidates and beam of EAGLE's default tree, before the last level is grown, and that level."""
    generator = torch.Generator().manual_seed(1)
    candidates, beam = empty_candidates(2, top_k, levels)
    for level in range(1, levels + 1):
        shape = (2, 1 if level == 1 else top_k, top_k)
        tokens = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
        log_probs = -torch.rand(shape, generator=generator)
        last = lambda tokens=tokens, log_probs=log_probs, level=level: expand_tree(  # noqa: E731
            tokens, log_probs, candidates, beam, level=level, levels=levels
        )
        if level < levels:
            last()
    return candidates, last


def expand():
    return grown()[1]


def build():
    candidates, last = grown()
    last()
    return lambda: build_tree(int32([7, 8]), candidates, max_nodes=60)


def retrieve():
    tree = build()()
    return lambda: retrieve_indices(tree, max_leaves=60, max_path=9)


def walk():
    parents = [-1] + [i // 2 for i in range(63)]
    tree = tree_from_parents([list(range(64))] * 4, [parents] * 4, [64] * 4)
    targets = int32([[2 * i + 2 for i in range(64)]] * 4)
    stop, budget = int32([[-1, 500]] * 4), int32([100] * 4)
    return lambda: verify(tree, targets, int32([9] * 4), stop_tokens=stop, budget=budget, max_path=9)


def compact():
    pages = int32([[5, 1, 7]])
    caches = [KVCache(*torch.zeros(2, 8, 16, 8, 128, dtype=torch.bfloat16), pages) for _ in range(2)]
    path = int32([[0, 1, 2, 5, 9, 11, 30, -1]])
    return lambda: compact_kv(caches, path, int32([6]), int32([12]), max_nodes=60)


def greedy():
    logits = torch.randn(1, 1, 32001, generator=torch.Generator().manual_seed(1)).bfloat16()
    settings = {
        "temperature": torch.zeros(1),
        "seeds": torch.zeros(1, dtype=torch.int64),
        "positions": int32([[3]]),
    }
    return lambda: sample_tokens(logits, **settings)


CASES = {
    "expand_tree": expand,
    "build_tree": build,
    "retrieve_indices": retrieve,
    "verify": walk,
    "compact_kv": compact,
    "sample_tokens": greedy,
}
GLOBAL = ("global_load_bytes", "global_store_bytes", "barriers")
SECTORS = ("global_load_sectors", "global_store_sectors")
SHARED = (
    "shared_load_waves",
    "shared_load_ideal",
    "shared_store_waves",
    "shared_store_ideal",
    "collectives",
    "atomics",
)
# GLOBAL; SECTORS, at most; SHARED
EXPECTED = {
    "expand_tree": [(2000, 2960, 8), (75, 112), (50, 44, 38, 38, 150, 0)],
    "build_tree": [(11840, 3848, 53), (473, 175), (1093, 1022, 770, 754, 524, 2038)],
    "retrieve_indices": [(480, 4328, 17), (19, 154), (328, 312, 104, 104, 16, 118)],
    "verify": [(5168, 208, 0), (144, 24), (176, 176, 32, 32, 24, 0)],
    "compact_kv": [(34032, 32768, 4), (1044, 1024), (272, 272, 8, 8, 8, 0)],
    "sample_tokens": [(64020, 12, 7), (2005, 3), (240, 240, 37, 37, 288, 0)],
}


def measure(name: str, simulator) -> list[tuple[int, ...]]:
    call = CASES[name]()
    with simulator.counting() as counters:
        call()
    figures = dataclasses.asdict(counters)
    return [tuple(figures[key] for key in keys) for keys in (GLOBAL, SECTORS, SHARED)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.op(name)) for name in CASES])
def test_a_typical_case_costs_what_it_did(name, simulator):
    expected, measured = EXPECTED[name], measure(name, simulator)
    assert measured[0] == expected[0], f"{name}: {dict(zip(GLOBAL, measured[0]))}"
    assert all(m <= e for m, e in zip(measured[1], expected[1])), f"{name}: {dict(zip(SECTORS, measured[1]))}"
    if simulator.checked and eagle_cuda.build_info()["compiler"] == COMPILER:
        assert measured[2] == expected[2], f"{name}: {dict(zip(SHARED, measured[2]))}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.op(name)) for name in CASES])
def test_shared_memory_has_few_bank_conflicts(name, simulator):
    if not simulator.checked:
        pytest.skip("shared memory is counted in checked builds")
    load, load_ideal, store, store_ideal, *_ = measure(name, simulator)[2]
    assert load <= 1.25 * load_ideal
    assert store <= 1.25 * store_ideal
