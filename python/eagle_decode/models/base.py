"""What the loop asks of a target model: one forward pass over tree nodes, and a prefill built on it.

Plain decoding is the pass over a one-node tree, verification the pass over a draft tree, a prompt a few
passes over chains. All three run the same instructions per row, so a row's logits are bitwise the same
whichever pass made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, device, dtype

from eagle_cuda.kv_cache import KVCache

__all__ = ["KVCache", "Target", "TargetOutput"]


class TargetOutput(NamedTuple):
    """Result of a pass. Both tensors are the target's own buffers: valid until its next `forward` or
    `prefill`."""

    logits: Tensor | None  # [B, N, V] float32, or [B, 1, V] for logits="last"
    features: Tensor | None  # [B, N, F] in the target's dtype, last dimension contiguous


class Target(Protocol):
    """A target model. Not thread-safe: it works in buffers of its own."""

    config: Mapping[str, Any]  # Hugging Face key names, as of `models.checkpoint.Checkpoint.config`
    dtype: dtype
    device: device
    vocab_size: int  # V
    hidden_size: int  # H
    num_layers: int
    max_positions: int  # positions the model was made for

    def feature_size(self, feature_layers: Sequence[int] | None) -> int:
        """F: len(feature_layers) * H, H for (), 0 for None."""

    def new_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """One contiguous KVCache per layer: k, v [B, capacity, Hkv, D], uninitialised; position t of request
        b is row t of page b. `capacity` must hold prompt, output, and the nodes of the widest tree."""

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
        """Runs every node of a batch of trees, writing node i's keys and values at cache row seq_lens + i.

        tokens [B, N], depths [B, N], mask [B, N, ceil(N/32)], seq_lens [B], num_nodes [B]: int32,
        contiguous, as in a DraftTree. Slots at and beyond num_nodes give unspecified rows and write nothing
        to the cache.
        feature_layers: layers whose *input* (residual stream, no norm) makes the feature row, ascending, in
        [0, num_layers]; `()` asks for the hidden state after the final norm (EAGLE-1 and 2); None for no
        features.
        logits: of "all" nodes, of the "last" slot N-1 only, or "none".
        """

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
        """Runs T tokens of one request as chains, from position `start` on, filling rows start .. start+T
        of its cache.

        Chains end at multiples of 256 positions, so that a prompt is cut in the same places however it
        arrives. Returns logits [1, 1, V] of the last token (valid until the next pass) and features [1, T,
        F] (a tensor of the caller's own). T = 0 gives logits None and empty features.
        """
