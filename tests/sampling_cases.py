"""Rows of logits and settings for sample_tokens, chosen to reach every way through its kernels.

Run as a program, it writes what sample_tokens gives for every batch, so that a process with another extension
can compare: python sampling_cases.py OUT.npz
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

import numpy as np
import torch

from eagle_cuda.sampling import Sampled, sample_tokens
from state_cases import STATE_CASES, state_words

INF, NAN = float("inf"), float("nan")


class Corner(NamedTuple):
    """Groups of (tokens, lowest z, width) from the top; all else has z = 800. top-k cuts the last group,
    and top-p ends at the tokens of these ranks."""

    groups: list[tuple[int, float, float]]
    top_k: int
    ranks: list[int]


# Rows in which the bounds of the mass that top-k leaves do not agree in which bucket top-p ends: large z make
# the last bucket wide.
CORNER_VOCAB = 98304
TOP = [(1, 961 + 7 * 2**-14, 0), (11999, 961, 2**-12)]  # keys of one bucket, counted unlike the middle's
MIDDLE, LAST = (12000, 960.1875, 2**-13), (20000, 959.90625, 2**-6)
FEW_LAST = (8000, 959.90625, 2**-5)
SMALL = [(5, z, 2**-12) for z in (960.34, 960.32, 960.3)]
CORNERS = {
    # The keys of two buckets are counted while those of the last are counted, and while they are listed.
    "counted": Corner([*TOP, MIDDLE, LAST], 34000, [11995, 11999, 12000, 12010]),
    "listed": Corner([*TOP, MIDDLE, FEW_LAST], 28000, [11995, 11999, 12000, 12005]),
    # One of the two is the last bucket.
    "in the last": Corner([*TOP, LAST], 22000, [11995, 11999, 12000, 12010]),
    # Small buckets lie between the two.
    "between": Corner(
        [*TOP, *SMALL, MIDDLE, FEW_LAST], 28015, [11995, 11999, 12000, 12005, 12014, 12015, 12020]
    ),
    # A bin is 2048 wide, and what could lie between is not few unless buckets hold only what matters of it.
    "crowd": Corner(
        [(12000, 16998, 0.5), (9000, 16996, 0.1), (60000, 16994, 1.9)], 51000, [11999, 12000, 16000, 21000]
    ),
    # Masses of 2^-32 and 0 share the last bucket.
    "dust": Corner(
        [(1, 1000, 0), (9000, 978, 0.01), (9000, 977.9, 0.01), (30000, 977.81, 0.016)],
        33001,
        [9000, 16000, 18000, 20000],
    ),
}


def make_corner(corner: Corner) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    row = torch.full((CORNER_VOCAB,), 800.0)
    order = torch.randperm(CORNER_VOCAB, generator=generator)
    first = 0
    for count, lowest, width in corner.groups:
        row[order[first : first + count]] = lowest + width * torch.rand(count, generator=generator)
        first += count
    return row


def corner_settings(kind: str) -> list[Setting]:
    corner = CORNERS[kind]
    z = make_corner(corner).sort(descending=True).values[: corner.top_k]
    masses = torch.exp((z - z[0]).double())
    ends = [(masses[:rank].sum() + masses[rank] / 2) / masses.sum() for rank in corner.ranks]
    return [Setting(kind, top_k=corner.top_k, top_p=float(end)) for end in ends]


def make_row(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    if kind in CORNERS:
        return make_corner(CORNERS[kind])
    normal = torch.randn(vocab, generator=generator)
    spread = torch.rand(vocab, generator=generator)
    row = {
        "normal": normal * 3,
        "flat": torch.zeros(vocab),
        "near": 1 + normal * 1e-6,  # few distinct values in fp32, one in 16 bits
        "peak": normal * 0.5,
        "ties": (normal * 2).round(),
        "two": (normal > 0).float(),
        "wide": normal * 300,
        "special": normal * 3,
        "outlier": 5 + normal * 1e-5,
        "clusters": torch.arange(vocab) % 50 * -0.5,
        "huge": normal * 1e30,  # overflows when divided by a small temperature
        "nothing": torch.full((vocab,), -INF),
    }[kind]
    if kind == "peak":
        row[vocab // 3] += 25
    elif kind == "outlier":
        row[-1] = 20
    elif kind == "special":
        row[spread < 0.2], row[spread > 0.8] = NAN, -INF
        row[spread > 0.9] = -0.0
    elif kind == "nothing":
        row[spread < 0.5] = NAN
    return row


KINDS = [
    "normal",
    "flat",
    "near",
    "peak",
    "ties",
    "two",
    "wide",
    "special",
    "outlier",
    "clusters",
    "huge",
    "nothing",
]


class Setting(NamedTuple):
    kind: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Batch(NamedTuple):
    """Requests of one row each. The row of logits begins `skew` elements beyond a boundary of 64 bytes, `gap`
    elements that belong to nobody follow."""

    vocab: int
    dtype: torch.dtype
    settings: list[Setting]
    rule: str = "sequential"
    skew: int = 0
    gap: int = 3


def random_settings(vocab: int, count: int, seed: int) -> list[Setting]:
    chance = random.Random(seed)
    kinds = [KINDS[(seed + i) % len(KINDS)] for i in range(count)]
    return [
        Setting(
            kind,
            chance.choice([0.0, 1e-6, 2e-5, 0.3, 1.0, 1.0, 1.0, 1e4]),
            chance.choice([0, 1, 7, vocab // 3, 2 * vocab // 3, vocab - 1, vocab, 10**6]),
            chance.choice([0.0, 1e-7, 0.3, 0.9, 1 - 2**-24, 1.0, 1.0]),
            chance.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for kind in kinds
    ]


# One request each: what narrows down in three or four reads at V = 262144.
FLATTEST = [
    Setting(kind, 1.0, **limits)
    for kind in ("flat", "near")
    for limits in ({"top_k": 50}, {"top_k": 150000, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.01}, {})
]
LARGE = [
    Setting("two", 1.0, 100000, 0.9),
    Setting("ties", 1.0, 0, 0.9),
    Setting("outlier", 1.0, 50, 0.9),
    Setting("clusters", 1.0, 90000, 0.5),
    Setting("normal", 1.0, 150000, 0.8, 0.001),
]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BATCHES: dict[str, Batch] = {}
FULL: dict[str, Batch] = {}
# 248 and 249: the last row of the small kernel and the first of the large one; 8192 and 8193: the last that
# is listed as a whole and the first that is not.
for number, (vocab, count) in enumerate(
    [
        (1, 9),
        (63, 24),
        (64, 24),
        (65, 24),
        (248, 24),
        (249, 16),
        (4095, 6),
        (4097, 6),
        (8192, 4),
        (8193, 24),
        (32001, 24),
    ]
):
    for dtype, skew, rule in (
        (F32, 0, "sequential"),
        (F32, 1, "joint"),
        (BF16, 5, "joint"),
        (F16, 3, "sequential"),
    ):
        key = f"{vocab}-{str(dtype)[6:]}-{skew}"
        chosen = random_settings(vocab, count if dtype != F16 else count // 2, number * 7 + skew)
        BATCHES[key] = Batch(vocab, dtype, chosen, rule, skew)
        if vocab > 249:
            more = random_settings(vocab, 24, number * 7 + skew + 1000)
            FULL[key] = Batch(vocab, dtype, more, "joint" if rule == "sequential" else "sequential", skew + 2)
BATCHES["128256-bfloat16"] = Batch(128256, BF16, random_settings(128256, 8, 99), "sequential")
BATCHES["262144-float32"] = Batch(262144, F32, FLATTEST[::2] + LARGE[:1], "sequential")
for kind in CORNERS:
    BATCHES[f"corner {kind}"] = Batch(CORNER_VOCAB, F32, corner_settings(kind), "sequential")
BATCHES["262144-bfloat16"] = Batch(262144, BF16, FLATTEST[1::4] + LARGE[1:], "joint", 1)
FULL["128256-float32"] = Batch(128256, F32, random_settings(128256, 12, 98), "joint", 1)
FULL["262144-float32"] = Batch(262144, F32, FLATTEST + LARGE, "joint", 2)
FULL["262144-bfloat16"] = Batch(262144, BF16, FLATTEST[::2] + LARGE, "sequential", 0)
# Longer than what one round of buckets is made for.
FULL["1048576-float32"] = Batch(
    1 << 20,
    F32,
    [
        Setting("clusters", 1.0, 0, 0.9),
        Setting("clusters", 1.0, 300000, 0.9),
        Setting("near", 1.0, 300000, 0.9),
        Setting("normal", 1.0, 30000),
    ],
)


def make_logits(batch: Batch, seed: int = 1) -> torch.Tensor:
    """[B, 1, V] with NaN around every row."""
    stride = batch.vocab + batch.gap
    whole = torch.full((len(batch.settings) * stride + batch.skew + 64,), NAN, dtype=batch.dtype)
    start = -(whole.data_ptr() // whole.element_size()) % (64 // whole.element_size()) + batch.skew
    view = torch.as_strided(whole, (len(batch.settings), 1, batch.vocab), (stride, stride, 1), start)
    generator = torch.Generator().manual_seed(seed)
    for i, setting in enumerate(batch.settings):
        view[i, 0] = make_row(setting.kind, batch.vocab, generator).to(batch.dtype)
    return view


def sample(batch: Batch, out: Sampled | None = None) -> Sampled:
    count = len(batch.settings)

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(setting, name) for setting in batch.settings], dtype=dtype)

    return sample_tokens(
        make_logits(batch),
        temperature=column("temperature"),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        seeds=torch.arange(count) * 7919 - 3,
        positions=torch.arange(count, dtype=torch.int32)[:, None] * 5,
        top_k_top_p=batch.rule,
        out=out,
    )


def words(out: Sampled) -> np.ndarray:
    """[3, B] int32: tokens, bits of the log-probabilities, flags."""
    return torch.stack([t.view(torch.int32)[:, 0] for t in out[:3]]).numpy()


if __name__ == "__main__":
    chosen = (
        BATCHES | {f"full-{key}": batch for key, batch in FULL.items()} if "full" in sys.argv[2:] else BATCHES
    )
    states = {f"state-{key}": state_words(key) for key in STATE_CASES}
    np.savez(sys.argv[1], **states, **{key: words(sample(batch)) for key, batch in chosen.items()})
