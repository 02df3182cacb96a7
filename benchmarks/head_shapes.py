"""The draft heads of the GPU parts: sizes of published heads, and what a weight takes in each format."""

from __future__ import annotations

from typing import NamedTuple


class Matrix(NamedTuple):
    name: str
    n: int
    k: int
    paired: bool = False  # gate and up, for SwiGLU

    @property
    def elements(self) -> int:
        return self.n * self.k


class HeadShape(NamedTuple):
    kind: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int

    @property
    def features(self) -> int:
        """Width of what the target gives: three of its layers, or its output."""
        return 3 * self.hidden if self.kind == "eagle3" else self.hidden

    @property
    def matrices(self) -> dict[str, Matrix]:
        eagle3 = self.kind == "eagle3"
        found = [
            Matrix("qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden * (1 + eagle3)),
            Matrix("o", self.hidden, self.heads * self.head_dim),
            Matrix("gate_up", 2 * self.inner, self.hidden, paired=True),
            Matrix("down", self.hidden, self.inner),
            Matrix("fc", self.hidden, self.features if eagle3 else 2 * self.hidden),
            Matrix("lm_head", self.draft_vocab, self.hidden),
        ]
        return {matrix.name: matrix for matrix in found}

    @property
    def every_level(self) -> list[Matrix]:
        """What a level reads; an EAGLE-3 head fuses the target's features once a cycle."""
        return [m for m in self.matrices.values() if not (m.name == "fc" and self.kind == "eagle3")]

    @property
    def once(self) -> list[Matrix]:
        return [self.matrices["fc"]] if self.kind == "eagle3" else []

    @property
    def kv_row_bytes(self) -> int:
        """Keys and values of one position, bf16."""
        return 2 * self.kv_heads * self.head_dim * 2


HEADS = {
    "llama8b-eagle3": HeadShape("eagle3", 4096, 14336, 32, 8, 128, 128256, 32000),
    "vicuna13b-eagle2": HeadShape("eagle1", 5120, 13824, 40, 40, 128, 32000, 32000),
    "qwen8b-eagle3": HeadShape("eagle3", 4096, 12288, 32, 8, 128, 151936, 32000),
    "qwen32b-eagle3": HeadShape("eagle3", 5120, 25600, 64, 8, 128, 151936, 32000),
}
FORMATS = ("bf16", "fp8", "int8", "int4", "int8_dynamic")


def weight_bytes(n: int, k: int, form: str) -> int:
    """Codes and scales of an [n, k] matrix, without padding."""
    if form == "bf16":
        return 2 * n * k
    if form == "int4":
        return n * -(-k // 2) + 2 * n * -(-k // 64)
    return n * k + 4 * n
