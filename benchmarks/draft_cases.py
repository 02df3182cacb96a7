"""What the draft benchmark runs on a GPU, free of any device: one request's cycle, and floors.

A cycle extends the head along the accepted path and grows LEVELS levels: as many passes over the layer, the
first over the path's rows, and as many over the LM head. Bytes of memory: the weights of a level once a
level, an EAGLE-3 head's fusion matrix once, the committed keys and values once a level. Activations, and
keys and values of the levels themselves, stay in the cache on the chip. Beside the floor stand the barriers
of a kernel that runs through all levels, at what one costs on an H100 (as published; not measured here).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ceilings import Ceilings
from head_shapes import HEADS, weight_bytes

LEVELS, TOP_K, NODES = 8, 10, 60
CONTEXT = 1024  # committed rows
ACCEPTED = 4  # draft tokens of the cycle before
FORMATS = ("bf16", "fp8", "int4")
BARRIERS = {"eagle3": 6, "eagle1": 7}  # of a level, at most, of a head of one layer
BARRIER_SECONDS = 1.1e-6
# Microseconds per level that we aim at on an H200.
AIMS = {
    ("llama8b-eagle3", "bf16"): 190.0,
    ("llama8b-eagle3", "fp8"): 100.0,
    ("llama8b-eagle3", "int4"): 58.0,
}


class Cycle(NamedTuple):
    levels: int = LEVELS
    top_k: int = TOP_K
    nodes: int = NODES
    context: int = CONTEXT
    accepted: int = ACCEPTED

    @property
    def committed(self) -> int:
        """Rows behind the extend."""
        return self.context + self.accepted + 1

    @property
    def rows(self) -> int:
        """Of the cache: a multiple of 16, so that torch need not copy a mask over them."""
        return -(-(self.committed + (self.levels - 1) * self.top_k) // 16) * 16


class Floor(NamedTuple):
    level_bytes: int  # weights, each level
    once_bytes: int
    kv_bytes: int  # each level
    levels: int
    barriers: int

    @property
    def bytes(self) -> int:
        return self.levels * (self.level_bytes + self.kv_bytes) + self.once_bytes

    def seconds(self, ceilings: Ceilings) -> float:
        return self.bytes / ceilings.bytes_per_second


def floor(head: str, form: str, cycle: Cycle) -> Floor:
    shape = HEADS[head]
    return Floor(
        level_bytes=sum(weight_bytes(m.n, m.k, form) for m in shape.every_level),
        once_bytes=sum(weight_bytes(m.n, m.k, form) for m in shape.once),
        kv_bytes=cycle.committed * shape.kv_row_bytes,
        levels=cycle.levels,
        barriers=cycle.levels * BARRIERS[shape.kind],
    )


def row_of(head: str, form: str, cycle: Cycle, ceilings: Ceilings) -> dict[str, Any]:
    """What is known of a case before it runs."""
    needed = floor(head, form, cycle)
    seconds = needed.seconds(ceilings)
    made = {
        "head": head, "format": form, **cycle._asdict(), **needed._asdict(), "bytes": needed.bytes,
        "floor_microseconds": seconds * 1e6,
        "floor_microseconds_per_level": seconds * 1e6 / cycle.levels,
        "barriers_microseconds_per_level": needed.barriers * BARRIER_SECONDS * 1e6 / cycle.levels,
    }  # fmt: skip
    if (head, form) in AIMS and cycle == Cycle():
        made["aim_microseconds_per_level"] = AIMS[head, form]
    return made
