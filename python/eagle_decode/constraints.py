"""What requests ask for beyond temperature and its limits, as the tensors that sample_tokens reads.

Made only for a run in which some request asks for it: without, a cycle costs what it did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_cuda.sampling import SamplingState
from eagle_cuda.tree import DraftTree
from eagle_decode.sampling import LogitsMask, SamplingParams


class Constraints:
    """Rows of SamplingState, one per row of the batch, of the fields that some request of the run uses."""

    @staticmethod
    def needed(params: Sequence[SamplingParams]) -> bool:
        """Whether any of the requests asks for something that only a state can do."""
        return any(
            one.has_penalties or one.logit_bias or one.min_new_tokens or one.has_mask for one in params
        )

    def __init__(
        self, capacity: int, params: Sequence[SamplingParams], *, vocab_size: int, max_nodes: int,
        stop_tokens: Tensor,
    ):  # fmt: skip
        self._device, self._vocab_size = stop_tokens.device, vocab_size
        self.faults: dict[int, dict[int, Exception]] = {}  # by row and node, what its logits_mask raised
        self._whole: dict[str, Tensor] = {}

        def new(name: str, *shape: int, dtype: torch.dtype = torch.int32, value: float = 0) -> None:
            self._whole[name] = torch.full((capacity, *shape), value, dtype=dtype, device=self._device)

        self._counts = any(one.has_penalties for one in params)
        if self._counts:
            new("prompt_counts", vocab_size)
            new("output_counts", vocab_size)
            new("repetition_penalty", dtype=torch.float32, value=1)
            new("presence_penalty", dtype=torch.float32)
            new("frequency_penalty", dtype=torch.float32)
        self._most_bias = max(len(one.logit_bias) for one in params)
        if self._most_bias:
            new("bias_tokens", self._most_bias, value=-1)
            new("bias_values", self._most_bias, dtype=torch.float32)
        if any(one.min_new_tokens for one in params):
            new("min_new_tokens")
            new("prompt_lens")
            self._whole["stop_tokens"] = stop_tokens
        # One mask per row, and where a request has a function, one per node, filled in every cycle.
        words = (vocab_size + 31) // 32
        self._masks = self._node_masks = None
        if any(one.has_mask for one in params):
            self._masks = np.full((capacity, words), -1, np.int32)
            self._masks_on_device = torch.full((capacity, words), -1, dtype=torch.int32, device=self._device)
        if any(one.logits_mask for one in params):
            shape = (capacity * max_nodes, words)
            self._node_masks = torch.empty(shape, dtype=torch.int32, device=self._device)

    def put(self, row: int, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> None:
        """Makes `row` that of a request that has emitted `output` so far."""
        whole = self._whole
        if self._counts:
            for name, tokens in (("prompt_counts", prompt), ("output_counts", output)):
                counts = np.bincount(np.asarray(tokens, np.int64), minlength=self._vocab_size)
                whole[name][row] = torch.from_numpy(counts.astype(np.int32)).to(self._device)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                whole[name][row] = getattr(params, name)
        if self._most_bias:
            whole["bias_tokens"][row] = -1
            for i, (token, value) in enumerate(params.logit_bias):
                whole["bias_tokens"][row, i] = token
                whole["bias_values"][row, i] = value
        if "min_new_tokens" in whole:
            whole["min_new_tokens"][row] = params.min_new_tokens
            whole["prompt_lens"][row] = len(prompt)
        if self._masks is not None:
            self._masks[row] = fixed_mask(params, self._masks.shape[1])
            self._masks_on_device[row] = torch.from_numpy(self._masks[row]).to(self._device)

    def move(self, source: int, row: int) -> None:
        """The request of row `source` now stands in `row`."""
        for tensor in self.tensors().values():
            tensor[row] = tensor[source]
        if self._masks is not None:
            self._masks[row] = self._masks[source]

    def tensors(self) -> dict[str, Tensor]:
        """What holds one entry per row, but for the stop tokens, which are the batch's own."""
        masks = {} if self._masks is None else {"masks": self._masks_on_device}
        return {name: tensor for name, tensor in (self._whole | masks).items() if name != "stop_tokens"}

    def count(self, rows: slice, tokens: Tensor, path: Tensor) -> None:
        """Adds what the rows emitted to their counts: the target's choice at each node of the path."""
        if self._counts:
            emitted = tokens.gather(1, path.clamp(min=0).long()).long()
            self._whole["output_counts"][rows].scatter_add_(1, emitted, (path >= 0).int())

    def state(
        self,
        rows: slice,
        tree: DraftTree,
        requests: Sequence[tuple[list[int], frozenset[int], SamplingParams]],
    ) -> SamplingState:
        """The state of these rows for a pass over `tree`, which has as many. requests: of each row the tokens
        emitted so far, the stop tokens, and the parameters."""
        for row in range(rows.start, rows.stop):
            self.faults.pop(row, None)
        fields = {name: tensor[rows] for name, tensor in self._whole.items()}
        if self._masks is not None:
            width = tree.tokens.shape[1]
            if any(params.logits_mask for _, _, params in requests):
                fields["token_mask"] = self._fill(rows, tree, requests)
            else:
                fields["token_mask"] = self._masks_on_device[rows, None].expand(-1, width, -1)
        return SamplingState(**fields)

    def _fill(self, rows: slice, tree: DraftTree, requests: Sequence) -> Tensor:
        size, width = tree.tokens.shape
        tokens, parents, num_nodes = (t.tolist() for t in (tree.tokens, tree.parents, tree.num_nodes))
        masks = np.repeat(self._masks[rows, None], width, axis=1)
        for i, (output, stops, params) in enumerate(requests):
            if params.logits_mask is not None:
                own = parents[i][: num_nodes[i]]
                faults = fill_masks(params.logits_mask, masks[i], output, tokens[i], own, stops)
                self.faults[rows.start + i] = faults
        words = masks.shape[2]
        target = self._node_masks[rows.start * width : rows.start * width + size * width]
        return target.view(size, width, words).copy_(torch.from_numpy(masks))


def fixed_mask(params: SamplingParams, words: int) -> np.ndarray:
    """[words] int32, the bits of what allowed_tokens and banned_tokens leave."""
    allowed = np.full(32 * words, params.allowed_tokens is None)
    if params.allowed_tokens is not None:
        allowed[list(params.allowed_tokens)] = True
    allowed[list(params.banned_tokens)] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


def fill_masks(
    function: LogitsMask, masks: np.ndarray, output: list[int], tokens: Sequence[int],
    parents: Sequence[int], stop_tokens: frozenset[int],
) -> dict[int, Exception]:  # fmt: skip
    """Narrows masks [N, words] to what `function` allows after each node's path.

    A node below a token that is not allowed, or that ends the request, cannot be reached: the function is not
    asked about it. Where it raises, nothing is allowed; returns what it raised, by node. It ends the request
    only if the node is reached, as in plain decoding."""
    paths: dict[int, list[int]] = {}
    faults: dict[int, Exception] = {}
    for node, parent in enumerate(parents):
        if node == 0:
            path = list(output)
        else:
            token = tokens[node]
            if parent not in paths or token in stop_tokens or not 0 <= token < 32 * masks.shape[1]:
                continue
            if not int(masks[parent, token // 32]) >> token % 32 & 1:
                continue
            path = [*paths[parent], token]
        mask = np.full(masks.shape[1], -1, np.int32)
        try:
            # A view: whatever form the function gives to its array, the bits stay where they are.
            if (returned := function(list(path), mask[:])) is not None:
                raise ValueError(f"expected the mask filled and None returned, got {returned!r:.80}")
        except Exception as fault:
            masks[node], faults[node] = 0, fault
            continue
        masks[node] &= mask
        paths[node] = path
    return faults
