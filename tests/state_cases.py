"""Batches for the state of sample_tokens: trees and requests that differ in everything.

`words` of a case is what sampling_cases.py writes for another process to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle_cuda.sampling import Sampled, SamplingState, sample_tokens
from eagle_cuda.tree import DraftTree, empty_draft_tree

NUM_TOP = 5


@dataclass
class StateCase:
    """Arguments of one call, and the same in lists for an oracle."""

    logits: torch.Tensor  # [B, N, V]
    settings: dict[str, torch.Tensor]  # temperature, top_k, top_p, min_p, seeds, positions, num_nodes
    state: SamplingState
    tree: DraftTree
    prompts: list[list[int]]
    outputs: list[list[int]]
    rule: str

    def call(self, **changes: Any) -> Sampled:
        options = {"tree": self.tree, "state": self.state, "top_k_top_p": self.rule, **self.settings}
        return sample_tokens(self.logits, **options | changes)


def random_parents(random: np.random.Generator, nodes: int, kind: str) -> list[int]:
    """parents[i] < i; "chain" is one path, "bad" has what no tree may hold."""
    if kind == "chain":
        return list(range(-1, nodes - 1))
    parents = [-1] + [int(random.integers(0, node)) for node in range(1, nodes)]
    if kind == "bad":
        for node in range(nodes):
            if random.random() < 0.4:
                parents[node] = int(random.choice([node, node + 1, -2, 2**31 - 1, -(2**31)]))
    return parents


def make_state_case(
    vocab: int, nodes: int, seed: int, *, dtype: torch.dtype = torch.float32, batch: int = 4, rounds: int = 9
) -> StateCase:
    """Each request has its own mixture of features; `rounds` tokens of prompt and output.

    From seed 2 on, logits are close to each other, below zero or above, so that it is the penalties that
    decide which token comes out; before, masks and infinite biases have a say."""
    narrow = seed >= 2
    random = np.random.default_rng([vocab, nodes, seed])
    words = (vocab + 31) // 32

    def pick(choices: list[float]) -> torch.Tensor:
        return torch.tensor(random.choice(choices, batch), dtype=torch.float32)

    def tokens(*shape: int, low: int = 0) -> torch.Tensor:
        # Few different ones, so that they meet.
        few = np.minimum(random.geometric(min(0.9, 8 / vocab + 0.1), shape) - 1, vocab - 1)
        return torch.tensor(np.where(random.random(shape) < 0.8, few, random.integers(low, vocab, shape)))

    spread, offset = (0.7, pick([-2.0, 2.0])[:, None, None]) if narrow else (2.0, 0.0)
    logits = torch.tensor(random.normal(0, spread, (batch, nodes, vocab + 3)), dtype=torch.float32) + offset
    logits = logits[..., :vocab]
    logits = (logits * 4).round() / 4 if seed % 2 else logits
    if seed % 3 == 0:
        logits[torch.tensor(random.random((batch, nodes, vocab)) < 0.1)] = float("nan")
        logits[torch.tensor(random.random((batch, nodes, vocab)) < 0.05)] = float("-inf")
    prompts = [tokens(rounds).tolist() for _ in range(batch)]
    outputs = [tokens(int(random.integers(0, rounds))).tolist() for _ in range(batch)]
    counts = torch.zeros(2, batch, vocab, dtype=torch.int32)
    for which, lists in enumerate((prompts, outputs)):
        for row, held in enumerate(lists):
            counts[which, row] += torch.bincount(torch.tensor(held, dtype=torch.int64), minlength=vocab)
    kinds = ["random", "chain", "bad", "random"]
    tree = empty_draft_tree(batch, nodes, like=counts)
    parents = [random_parents(random, nodes, kinds[row % 4]) for row in range(batch)]
    tree.parents.copy_(torch.tensor(parents))
    tree.tokens.copy_(tokens(batch, nodes))
    tree.tokens[random.random((batch, nodes)) < 0.05] = -7  # of no vocabulary
    densities = [1.0, 0.8] if narrow else [1.0, 0.5, 0.05, 0.0]
    density = torch.tensor(random.choice(densities, batch))[:, None, None]
    allowed = torch.tensor(random.random((batch, nodes, 32 * words))) < density
    mask = pack_mask(allowed.numpy())
    values = [0.0, 1.5, -2.25, 40.0, np.inf, -np.inf]
    bias = random.choice(values[:3] if narrow else values, (batch, 6))
    prompt_lens = torch.full((batch,), rounds, dtype=torch.int32)
    depths = torch.tensor(random.integers(0, 4, (batch, nodes)), dtype=torch.int32)
    return StateCase(
        logits.to(dtype),
        {
            "temperature": pick([0.0, 0.7, 1.0, 1.5]),
            "top_k": pick([0, 0, 3, vocab // 2]).int(),
            "top_p": pick([1.0, 1.0, 0.8]),
            "min_p": pick([0.0, 0.0, 0.05]),
            "seeds": torch.tensor(random.integers(-(2**62), 2**62, batch)),
            "positions": prompt_lens[:, None] + depths,
            "num_nodes": torch.tensor(
                random.integers(max(1, nodes - 2), nodes + 1, batch), dtype=torch.int32
            ),
        },
        SamplingState(
            prompt_counts=counts[0],
            output_counts=counts[1],
            repetition_penalty=pick([1.0, 1.3, 0.6, 2.0, np.nan, -1.0]),
            presence_penalty=pick([0.0, 0.5, -1.0, np.nan]),
            frequency_penalty=pick([0.0, 0.3, 2.0, -0.7]),
            bias_tokens=torch.where(
                torch.tensor(random.random((batch, 6)) < 0.3), -(2**20), tokens(batch, 6)
            ).int(),
            bias_values=torch.tensor(bias, dtype=torch.float32),
            min_new_tokens=torch.tensor(random.integers(0, 4, batch), dtype=torch.int32),
            prompt_lens=prompt_lens,
            stop_tokens=torch.where(
                torch.tensor(random.random((batch, 3)) < 0.3), -1, tokens(batch, 3)
            ).int(),
            token_mask=mask,
        ),
        tree,
        prompts,
        outputs,
        "joint" if seed % 2 else "sequential",
    )


def pack_mask(allowed: np.ndarray) -> torch.Tensor:
    """[..., 32 W] of booleans to [..., W] int32."""
    bits = np.packbits(allowed, axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int32).copy())


# vocabulary, nodes, type: rows of both kernels, every way to the boundary, vectors of 4 and of 8.
STATE_CASES = {
    "5": (5, 6, torch.float32),
    "70": (70, 9, torch.bfloat16),
    "248": (248, 3, torch.float16),
    "300": (300, 12, torch.float32),
    "301-bfloat16": (301, 4, torch.bfloat16),
    "9001": (9001, 2, torch.float32),
    "20001-float16": (20001, 1, torch.float16),
}


def state_words(key: str) -> np.ndarray:
    """All outputs of a case as int32, [B, N, 3 + 2 n]."""
    vocab, nodes, dtype = STATE_CASES[key]
    found = []
    for seed in (0, 1, 2, 3):
        out = make_state_case(vocab, nodes, seed, dtype=dtype, rounds=40).call(num_top=min(NUM_TOP, vocab))
        planes = [t.view(torch.int32)[..., None] for t in out[:3]]
        found.append(torch.cat([*planes, *(t.view(torch.int32) for t in out[3:])], -1).numpy())
    return np.stack(found)
