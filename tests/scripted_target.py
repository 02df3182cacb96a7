"""A target without weights: what it says next is written down. For tests of the loop around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from eagle_decode.models.base import KVCache, TargetOutput


class ScriptedTarget:
    """Implements eagle_decode.models.base.Target. At every position the most likely token is the script's,
    whatever stands before it; the script is chosen by the first token of the prompt.

    Its cache holds token ids, and every pass checks that the rows before the root are exactly the request's
    tokens so far: prompts are checked against nothing, output against the script.
    """

    dtype = torch.float32
    device = torch.device("cpu")
    hidden_size = 8
    num_layers = 1

    def __init__(
        self,
        scripts: Mapping[int, Sequence[int]],
        *,
        vocab_size: int = 300,
        max_positions: int = 512,
        eos: Any = None,
    ):
        self.config = {"eos_token_id": eos}
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self._scripts = scripts
        self._prompt_length: dict[int, int] = {}
        self.spoil_after = 10**9  # logits for positions from here on are NaN
        self.passes = 0

    def feature_size(self, feature_layers: Sequence[int] | None) -> int:
        return 0 if feature_layers is None else self.hidden_size

    def new_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        shape = (batch_size, capacity, 1, 64)
        return [KVCache(torch.full(shape, -1.0), torch.full(shape, -1.0))]

    def forward(
        self,
        tokens: Tensor,
        *,
        seq_lens: Tensor,
        depths: Tensor,
        mask: Tensor,
        num_nodes: Tensor,
        cache: Sequence[KVCache],
        feature_layers: tuple[int, ...] | None = None,
        logits: Literal["all", "last", "none"] = "all",
    ) -> TargetOutput:
        self.passes += 1
        k = cache[0].k
        out = torch.full((*tokens.shape, self.vocab_size), -5.0)
        for row in range(tokens.shape[0]):
            start = int(seq_lens[row])
            rows = k[row, :start, 0, 0].tolist()
            nodes = int(num_nodes[row])
            k[row, start : start + nodes] = tokens[row, :nodes, None, None].float()
            first = int(k[row, 0, 0, 0])
            length = self._prompt_length[first]
            assert rows[length:] == self._scripts[first][: max(start - length, 0)], (
                "the cache is not what was emitted"
            )
            for node in range(nodes):
                position = start + int(depths[row, node]) + 1
                if length <= position < length + len(self._scripts[first]):
                    out[row, node, self._scripts[first][position - length]] = 5.0
                if position >= self.spoil_after:
                    out[row, node] = float("nan")
        features = None if feature_layers is None else torch.zeros(*tokens.shape, self.hidden_size)
        return TargetOutput(out, features)

    def prefill(
        self,
        tokens: Sequence[int] | Tensor,
        *,
        cache: Sequence[KVCache],
        request: int = 0,
        start: int = 0,
        feature_layers: tuple[int, ...] | None = None,
        logits: Literal["last", "none"] = "last",
    ) -> TargetOutput:
        count = len(tokens)
        self._prompt_length[int(tokens[0])] = count
        depths = torch.arange(count)[None]
        rows = [KVCache(k[request : request + 1], v[request : request + 1]) for k, v, *_ in cache]
        output = self.forward(
            torch.as_tensor(tokens)[None], seq_lens=torch.tensor([start]), depths=depths, mask=depths,
            num_nodes=torch.tensor([count]), cache=rows, feature_layers=feature_layers,
        )  # fmt: skip
        return TargetOutput(output.logits[:, -1:].contiguous(), output.features)
