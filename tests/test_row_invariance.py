"""Every op, every backend: any choice of rows, in any order, with padding between them, gives each row the
bits that it has among all of them; with one thread and with two.

A row is what an op treats by itself: a request, or a row of activations. The ops with a CUDA kernel come from
tests/gpu/op_cases.py, whose last request is padding; more sizes and formats, and the drafts, are below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compare import assert_same_bits
from draft_rig import HEADS, Rig
from eagle_cuda.linear import linear, lm_head_topk, pack_weight, rms_norm
from gpu.op_cases import BATCH, CASES, Make
from linear_inputs import case, head_case, normal
from on_device import op_of

PADDING = -1
Outputs = list[list[torch.Tensor]]  # of each place


class Family(NamedTuple):
    """run(seed, order): the outputs of these rows when they are computed together."""

    name: str
    rows: int  # that are not padding
    run: Callable[[int, list[int]], Outputs]

    def __str__(self) -> str:
        return self.name


def of_case(name: str) -> Family:
    """Arrays with one entry a request are gathered in order; of a cache, every request has its own pages."""
    arrays, call = CASES[name]

    def run(seed: int, order: list[int]) -> Outputs:
        order = [BATCH - 1 if row == PADDING else row for row in order]
        everything = arrays(seed)
        if name == "tree_attention":  # queries of zero would hide the order of the sums
            everything["q"] = Make(seed).normal(*everything["q"].shape).bfloat16()
        tables = everything.get("page_table", torch.zeros(BATCH, 0)).long()
        own = [key for key, t in everything.items() if t.shape[0] == BATCH]
        caches = [key for key, t in everything.items() if t.shape[0] == tables.numel() and key not in own]

        before = {key: t[order] if key in own else t for key, t in everything.items()}
        after = {key: t.clone() for key, t in before.items()}
        call(after)
        if set(order) >= set(range(BATCH - 1)):
            assert not all(same(after[key], before[key]) for key in own + caches), (
                f"{name}: expected outputs with an entry for each of {BATCH} requests, or in a cache"
            )
        others = tables[[row for row in range(BATCH) if row not in order]].flatten()
        assert all(same(after[key][others], before[key][others]) for key in caches)
        return [
            [after[key][place] for key in own] + [after[key][tables[row]] for key in caches]
            for place, row in enumerate(order)
        ]

    return Family(name, BATCH - 1, run)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- beside op_cases ------------------------------------------------------------------------------


def gather(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Padding rows are full of NaN, or zero."""
    padding = torch.full_like(rows[:1], float("nan") if rows.is_floating_point() else 0)
    return torch.cat([rows, padding])[order]


def by_rows(call: Callable[..., list[torch.Tensor]]) -> Callable[[int, list[int]], Outputs]:
    """call(seed, take): `take` gathers the rows of one array."""

    def run(seed: int, order: list[int]) -> Outputs:
        outputs = call(seed, lambda rows: gather(rows, order))
        return [[t[place] for t in outputs] for place in range(len(order))]

    return run


def linear_rows(dtype: torch.dtype, n: int, k: int, format: str | None = None) -> Family:
    def call(seed, take):
        x, weight = case(70, n, k, dtype, seed)
        residual, gamma = normal(70, n, seed=seed + 3), normal(k, dtype=dtype, seed=seed + 4)
        packed, paired = pack_weight(weight, format), pack_weight(weight, format, paired=True)
        return [
            linear(take(x), packed, residual=take(residual), out_dtype=torch.float32),
            linear(take(x), paired, rms_norm=gamma, activation="swiglu"),
            rms_norm(take(x), gamma),
        ]

    kind = format or str(dtype).removeprefix("torch.")
    return Family(f"linear and rms_norm {kind} {n}x{k}", 70, by_rows(call))


def head_rows(dtype: torch.dtype) -> Family:
    def call(seed, take):
        x, weight, options = head_case(40, 1100, dtype, coupled=True, mapped=True, seed=seed)
        ids = options.pop("draft_to_target")
        options = {name: take(value) for name, value in options.items()}
        return list(lm_head_topk(take(x), pack_weight(weight), 9, draft_to_target=ids, tau=1.3, **options))

    return Family(f"lm_head_topk {dtype}".replace("torch.", ""), 40, by_rows(call))


def drafts(head, dtype: torch.dtype) -> Family:
    """A padding request is one without room for nodes; its prompt is extended like the others."""

    def run(seed: int, order: list[int]) -> Outputs:
        batch = len(order)
        rig = Rig.random(head, dtype, batch=batch)
        features, tokens = rig.fill([3 + 5 * (row % 4) for row in order], seeds=[seed + row for row in order])
        heat = torch.tensor([0.0, 0.7, 1.0, 1.4, 0.5])[order]
        limit = torch.tensor([16, 3, 9, 1, 0], dtype=torch.int32)[order]
        tree = rig.draft_rows(
            features, tokens, max_nodes=16, top_k=4, levels=3, temperature=heat, node_limit=limit,
            seeds=torch.tensor(order) + seed,
        )  # fmt: skip
        hidden = rig.extend(features, tokens, list(range(batch + 1)))
        return [[field[b] for field in tree] + [hidden[b]] for b in range(batch)]

    return Family(f"extend_draft and draft {head[0]} {dtype}".replace("torch.", ""), 4, run)


OF_ROWS = [
    linear_rows(torch.float32, 200, 97),
    linear_rows(torch.bfloat16, 576, 576),
    *(linear_rows(torch.bfloat16, 200, 161, f) for f in ("fp8", "int8", "int4", "int8_dynamic")),
    head_rows(torch.bfloat16),
    drafts(HEADS[0], torch.float32),
    drafts(HEADS[2], torch.bfloat16),
]
OF_MATRICES = ("pack_weight", "unpack_weight")  # no rows that could be chosen
OF_REQUESTS = [of_case(name) for name in CASES if name not in OF_MATRICES]


# ---- the property --------------------------------------------------------------------------------


@st.composite
def orders(draw, rows: int):
    """Some of the rows in any order, and padding anywhere between them."""
    some = draw(st.permutations(range(rows)))[: draw(st.integers(1, rows))]
    for _ in range(draw(st.integers(0, 3))):
        some.insert(draw(st.integers(0, len(some))), PADDING)
    return some


def check(family: Family, examples: int, *, phases=tuple(Phase)) -> None:
    together = cache(lambda seed: family.run(seed, list(range(family.rows))))

    @settings(max_examples=examples, phases=phases)
    @given(st.integers(1, 2), orders(family.rows))
    def any_order(seed, order):
        for row, outputs in zip(order, family.run(seed, order)):
            if row != PADDING:
                for got, expected in zip(outputs, together(seed)[row], strict=True):
                    assert_same_bits(got, expected)

    any_order()


@pytest.mark.parametrize("family", OF_ROWS, ids=str)
def test_any_choice_of_rows(family):
    check(family, examples=15)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.op(op_of(f.name))) for f in OF_REQUESTS], ids=str
)
def test_any_choice_of_requests(family, backend):
    check(family, examples=30 if backend == "cpu" else 6)


@pytest.mark.parametrize("family", [*OF_ROWS, *OF_REQUESTS], ids=str)
def test_one_and_two_threads(family, one_and_two_threads):
    one, two = one_and_two_threads(lambda: family.run(1, list(range(family.rows))))
    for a, b in zip(one, two, strict=True):
        for got, expected in zip(a, b, strict=True):
            assert_same_bits(got, expected)


# ---- that it can fail ----------------------------------------------------------------------------


def sums(width: Callable[[int], int]) -> Family:
    """Sums of rows, each taken in pieces whose width the number of rows decides, or does not."""

    def call(seed, take):
        x = take(normal(9, 1000, seed=seed))
        pieces = x.split(width(len(x)), dim=1)
        total = torch.zeros(len(x))
        for piece in pieces:
            inner = torch.zeros(len(x))
            for column in piece.unbind(1):
                inner = inner + column
            total = total + inner
        return [total]

    return Family("sums", 9, by_rows(call))


def test_sums_that_depend_on_the_number_of_rows_are_seen():
    check(sums(lambda rows: 16), examples=15)
    with pytest.raises(AssertionError):
        check(sums(lambda rows: 8 * rows), examples=15, phases=[Phase.generate])


def test_a_row_that_sees_its_neighbour_is_seen():
    def call(seed, take):
        x = take(normal(9, 4, seed=seed))
        return [torch.maximum(x, x.roll(1, 0))]

    with pytest.raises(AssertionError):
        check(Family("neighbour", 9, by_rows(call)), examples=15, phases=[Phase.generate])
