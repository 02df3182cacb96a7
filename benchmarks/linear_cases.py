"""What the linear benchmark runs on a GPU, free of any device: matrices and their order, floors.

A floor is what no kernel can do without, at stated rates. Bytes of memory: codes and scales of the weight,
activations and results once. Operations: two for every multiply-add, at the rate of bf16 products;
int8_dynamic multiplies integers, at twice that rate. The floor is the longer of the two. Activations that
blocks load again, and sums that they leave for each other, stay in the cache on the chip and are listed
beside the floor (linear_plan.py), not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ceilings import Ceilings
from head_shapes import HEADS, Matrix, weight_bytes
from linear_plan import plan

ROWS = (1, 8, 16, 32, 64, 256)
TOP_K = TOPK_ROWS = 10  # lm_head_topk: the beam of EAGLE's default tree
LARGE = 100e6  # bytes of weights from which on a kernel should come close to the read ceiling
AIM_SHARE = 0.9  # of it


def matrices() -> dict[str, Matrix]:
    """Those of all heads, each size once, and the LM head of a whole vocabulary: 100 MB in any format."""
    found: dict[str, Matrix] = {}
    for head, shape in HEADS.items():
        for matrix in shape.matrices.values():
            known = {(m.n, m.k, m.paired) for m in found.values()}
            if (matrix.n, matrix.k, matrix.paired) not in known:
                name = f"{head.split('-')[0]} {matrix.name}"
                found[name] = matrix._replace(name=name)
    whole = HEADS["llama8b-eagle3"]
    name = "llama8b lm_head, whole"
    return found | {name: Matrix(name, whole.vocab, whole.hidden)}


MATRICES = matrices()


class Case(NamedTuple):
    op: str
    matrix: str
    format: str
    rows: int

    def __str__(self) -> str:
        return f"{self.op} {self.matrix} {self.format} M={self.rows}"

    @property
    def shape(self) -> Matrix:
        return MATRICES[self.matrix]


AIMS = {Case("lm_head_topk", "llama8b lm_head", "bf16", TOPK_ROWS): 66.0}  # microseconds on an H200


class Floor(NamedTuple):
    weight_bytes: int
    x_bytes: int
    out_bytes: int
    operations: int  # int8_dynamic: half of them, at the rate of bf16 products

    @property
    def bytes(self) -> int:
        return sum(self[:3])

    def seconds(self, ceilings: Ceilings) -> tuple[float, str]:
        """(the floor, what sets it)."""
        return ceilings.seconds(self.bytes, self.operations)


def floor(case: Case) -> Floor:
    matrix, topk = case.shape, case.op == "lm_head_topk"
    columns = matrix.n // 2 if matrix.paired else matrix.n
    operations = 2 * case.rows * matrix.elements
    return Floor(
        weight_bytes=weight_bytes(matrix.n, matrix.k, case.format),
        x_bytes=2 * case.rows * matrix.k,
        out_bytes=case.rows * (8 * TOP_K + 4 if topk else 2 * columns),
        operations=operations // 2 if case.format == "int8_dynamic" else operations,
    )


def chosen(
    names: Sequence[str] | None, formats: Sequence[str], rows: Sequence[int], topk_rows: Sequence[int]
) -> list[Case]:
    """Cases of the matrices (default: all) by importance: those with an aim, then bf16, fp8 and int4 before
    others, then the matrices in turn, each with all its numbers of rows."""
    cases = [
        Case("linear", name, form, m) for name, form, m in itertools.product(names or MATRICES, formats, rows)
    ]
    cases += [
        Case("lm_head_topk", name, form, m)
        for name, form, m in itertools.product(names or MATRICES, formats, topk_rows)
        if "lm_head" in name
    ]
    order = ["bf16", "fp8", "int4", "int8", "int8_dynamic"]
    return sorted(cases, key=lambda case: (case not in AIMS, order.index(case.format)))


def row_of(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    """What is known of a case before it runs: sizes, the floor, the launches on an H200."""
    matrix, needed = case.shape, floor(case)
    seconds, limit = needed.seconds(ceilings)
    made = {
        **case._asdict(), "n": matrix.n, "k": matrix.k, "paired": matrix.paired,
        **needed._asdict(), "bytes": needed.bytes, "floor_microseconds": seconds * 1e6, "floor": limit,
        "plan": plan(case.op, matrix, case.format, case.rows, TOP_K)._asdict(),
    }  # fmt: skip
    if case in AIMS:
        made["aim_microseconds"] = AIMS[case]
    return made
