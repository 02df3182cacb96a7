"""The GPU part of the linear benchmark: linear and lm_head_topk and their peers, case by case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from ceilings import Ceilings
from gpu_arms import Variant, Variants, right, run_cases, time_arms
from gpu_timing import Budget, Clock
from head_shapes import weight_bytes
from linear_cases import MATRICES, TOP_K, Case, floor, row_of
from peers.linear import PEERS, Inputs, by_rows, offered, swiglu

from eagle_cuda.linear import (
    PackedWeight,
    TopK,
    linear,
    linear_workspace_bytes,
    lm_head_topk,
    lm_head_topk_workspace_bytes,
    pack_weight,
    unpack_weight,
)

OURS = "eagle_cuda"
TOLERANCE = 0.01  # of the largest value: bf16 rounds it
CODES_TOLERANCE = 0.1  # of a peer that quantises in another way: whether it multiplies the right matrices
MAX_SETS = 64
COMPILED = [name for name in MATRICES if name.startswith("llama8b")]


class Group(NamedTuple):
    """Cases that share their weights."""

    matrix: str
    format: str
    cases: tuple[Case, ...]
    compiled: bool = False  # beside torch.compile, which tunes itself for every case

    def __str__(self) -> str:
        return f"{self.matrix} {self.format}" + self.compiled * ", torch.compile"


@dataclass
class Settings:
    rounds: int
    cold_bytes: int  # of distinct weights that calls go round
    compiled_rows: Sequence[int] = ()  # numbers of rows for which torch.compile tunes COMPILED
    peers: Sequence[str] = tuple(PEERS)
    absent: dict[str, str] = field(default_factory=dict)  # peer -> why
    ceilings: Ceilings | None = None


class Weights(NamedTuple):
    packed: list[PackedWeight]  # as many sets as come to cold_bytes
    dense: list[torch.Tensor]


def grouped(cases: Sequence[Case], compiled_rows: Sequence[int]) -> list[Group]:
    """In the order of the cases. torch.compile needs long: it comes before the formats that matter least."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        found.setdefault((case.matrix, case.format), []).append(case)
    groups = [Group(*key, tuple(each)) for key, each in found.items()]
    slow = []
    for group in groups:
        tuned = tuple(c for c in group.cases if c.rows in compiled_rows or c.op == "lm_head_topk")
        if compiled_rows and tuned and group.format == "bf16" and group.matrix in COMPILED:
            slow.append(group._replace(cases=tuned, compiled=True))
    later = [group for group in groups if group.format.startswith("int8")]
    return [group for group in groups if group not in later] + slow + later


def make_weights(group: Group, cold_bytes: int, device: torch.device) -> Weights:
    matrix = MATRICES[group.matrix]
    size = weight_bytes(matrix.n, matrix.k, group.format)
    sets = min(max(math.ceil(cold_bytes / size), 1), MAX_SETS)
    generator = torch.Generator(device).manual_seed(1)
    dense = []
    for _ in range(sets):
        noise = torch.randn(matrix.n, matrix.k, generator=generator, device=device, dtype=torch.bfloat16)
        dense.append(noise.mul_(matrix.k**-0.5))
    return Weights([pack_weight(w, group.format, paired=matrix.paired) for w in dense], dense)


def ours(case: Case, x: torch.Tensor, packed: Sequence[PackedWeight]) -> Variants:
    """Our kernel; its workspace is its own, as in a captured cycle."""
    topk, rows = case.op == "lm_head_topk", case.rows

    def variant() -> Variant:
        sizes = lm_head_topk_workspace_bytes(packed[0], rows, TOP_K), linear_workspace_bytes(packed[0], rows)
        size = sizes[0] if topk else sizes[1]
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
        if topk:
            best = TopK(
                torch.empty(rows, TOP_K, dtype=torch.int32, device=x.device),
                torch.empty(rows, TOP_K, device=x.device),
                torch.empty(rows, device=x.device),
            )
            return Variant(
                lambda i: lm_head_topk(x, packed[i], TOP_K, out=best, workspace=workspace).log_probs
            )
        activation = "swiglu" if case.shape.paired else None
        out = torch.empty(rows, case.shape.n // (1 + case.shape.paired), dtype=x.dtype, device=x.device)
        return Variant(lambda i: linear(x, packed[i], activation=activation, out=out, workspace=workspace))

    return {case.op: variant}


def expected(case: Case, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the op gives for [N, K] weights, in float64."""
    y = x.double() @ weight.double().T
    if case.op == "lm_head_topk":
        return torch.log_softmax(y, dim=1).topk(TOP_K).values
    return swiglu(y) if case.shape.paired else y


def as_codes(x: torch.Tensor) -> torch.Tensor:
    """Rows of x as int8_dynamic multiplies them."""
    codes, scale = by_rows(x, 127)
    return codes.round() * scale


def measure(group: Group, settings: Settings, clock: Clock, device: torch.device) -> list[dict[str, Any]]:
    """The figures of a group's cases. A wrong result of ours ends the run; a peer's failure is noted."""
    weights = make_weights(group, settings.cold_bytes, device)
    worth = unpack_weight(weights.packed[0])
    return [measure_case(case, group.compiled, weights, worth, settings, clock) for case in group.cases]


def measure_case(
    case: Case, compiled: bool, weights: Weights, worth: torch.Tensor, settings: Settings, clock: Clock
) -> dict[str, Any]:
    device = worth.device
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(case.rows, case.shape.k, generator=generator, device=device, dtype=torch.bfloat16)
    inputs = Inputs(case, x, weights.dense)
    want = {OURS: expected(case, as_codes(x) if case.format == "int8_dynamic" else x, worth)}
    want["peer"] = expected(case, x, weights.dense[0]) if case.format != "bf16" else want[OURS]

    def check(name: str, got: torch.Tensor) -> float:
        tolerance = CODES_TOLERANCE if name == "cuBLAS, codes" else TOLERANCE
        return right(got, want[OURS if name == OURS else "peer"], tolerance)

    arms = {OURS: lambda: ours(case, x, weights.packed)}
    arms |= {
        name: lambda make=PEERS[name]: make(inputs)
        for name in offered(case, compiled)
        if name in settings.peers
    }
    records, samples = time_arms(
        case, arms, OURS, check, clock=clock, sets=len(weights.packed), rounds=settings.rounds,
        absent=settings.absent,
    )  # fmt: skip
    made = row_of(case, settings.ceilings) | {"sets": len(weights.packed)}
    if OURS in samples:
        seconds, needed = samples[OURS].median, floor(case)
        made |= {
            "gigabytes_per_second": needed.bytes / seconds / 1e9,
            "share_of_read": needed.bytes / seconds / settings.ceilings.bytes_per_second,
            "share_of_floor": made["floor_microseconds"] / seconds / 1e6,
        }
    return made | {"arms": records}


def run(
    cases: Sequence[Case], settings: Settings, clock: Clock, device: torch.device, budget: Budget,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of the cases, weights in turn, until the time is up."""
    yield from run_cases(
        grouped(cases, settings.compiled_rows), lambda group: measure(group, settings, clock, device),
        lambda group: {"matrix": group.matrix, "format": group.format}, clock, budget, progress,
    )  # fmt: skip
