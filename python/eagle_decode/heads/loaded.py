"""A draft head in memory: plain tensors, sizes, and how each decision about them was made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eagle_cuda.draft import DraftHead
    from eagle_cuda.linear import PackedWeight

# Head sizes that attention has kernels for; a smaller one is padded with zeros.
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_QUANTIZED_FORMATS = ("fp8", "int8", "int4", "int8_dynamic")  # of eagle_cuda.pack_weight


class Decision(NamedTuple):
    """One line of the loader's report."""

    what: str
    decision: str
    why: str


@dataclass(frozen=True)
class HeadLayer:
    """Tensors of one decoder layer, as stored: [outputs, inputs]."""

    q_proj: Tensor  # [Hq D, 2H in EAGLE-3's first layer, else H]
    k_proj: Tensor  # [Hkv D, ...]
    v_proj: Tensor  # [Hkv D, ...]
    o_proj: Tensor  # [H, Hq D]
    gate_proj: Tensor  # [I, H]
    up_proj: Tensor  # [I, H]
    down_proj: Tensor  # [H, I]
    post_norm: Tensor  # [H]
    input_norm: Tensor | None = None  # [H], over the embedding in EAGLE-3's first layer; None in EAGLE-1's
    hidden_norm: Tensor | None = None  # [H], EAGLE-3's first layer only
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]


@dataclass(frozen=True)
class LoadedHead:
    """A draft head. `draft_to_target` [Vd] int32 holds absolute target ids, None for the identity.

    feature_layers: target layers whose *input* (residual stream, no norm) makes a feature row, low to high;
    empty for EAGLE-1 and 2, whose feature is the target's hidden state after its final norm; None where the
    number of target layers was not known.
    """

    kind: str  # "eagle1" (EAGLE-1 and 2) or "eagle3"
    hidden_size: int
    target_hidden_size: int
    feature_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding
    draft_vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int  # the default length of the RoPE table
    feature_layers: tuple[int, ...] | None
    feedback_post_norm: bool
    norm_before_residual: bool
    dtype: torch.dtype  # of the stored fc
    embedding: Tensor  # [V, H]
    fc: Tensor  # [H, 2H] in EAGLE-1, [H, F] in EAGLE-3
    fc_bias: Tensor | None
    fc_norm: Tensor | None  # [num_aux, Ht]
    norm: Tensor | None  # [H] before lm_head; None in EAGLE-1
    lm_head: Tensor  # [Vd, H]
    draft_to_target: Tensor | None
    layers: tuple[HeadLayer, ...]
    report: list[Decision] = field(default_factory=list)
    weight_format: str | None = None  # of every matrix that is multiplied, where it is quantised

    @property
    def num_aux(self) -> int:
        """Target layers in a feature row."""
        return self.feature_size // self.target_hidden_size

    def with_weights(self, weight_format: str | None) -> LoadedHead:
        """The same head, its weights to be quantised to "fp8", "int8", "int4" or "int8_dynamic" when they are
        packed; None: as it is."""
        if weight_format is None:
            return self
        if weight_format not in _QUANTIZED_FORMATS:
            raise ValueError(
                f"weight_format: expected one of {', '.join(_QUANTIZED_FORMATS)}, got {weight_format!r}"
            )
        decision = Decision("weights", weight_format, "asked for; embedding, norms and biases stay as stored")
        return replace(self, weight_format=weight_format, report=[*self.report, decision])

    def to_draft_head(
        self, dtype: torch.dtype | None = None, *, max_positions: int | None = None
    ) -> DraftHead:
        """The head for eagle_cuda's ops: weights packed and everything else converted to `dtype` (default: as
        stored).

        With a `weight_format` fc, all projections and the LM head are quantised from what is stored;
        embedding, norms and biases, the activations and the cache stay in `dtype`.
        max_positions: rows of the RoPE table; positions beyond share the last row's angle.
        A head size that attention has no kernel for is padded with zeros: the result's `head_dim`, which is
        the cache's, can be larger than this head's.
        """
        from eagle_cuda.attention import rope_table
        from eagle_cuda.draft import DraftHead, DraftLayer
        from eagle_cuda.linear import pack_weight

        dtype = dtype or self.dtype
        padded = _Padding(self)

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(dtype).contiguous()

        def pack(*weights: Tensor, paired: bool = False) -> PackedWeight:
            if self.weight_format is None:
                weights = tuple(cast(w) for w in weights)
            return pack_weight(weights, self.weight_format, paired=paired)

        layers = []
        for layer in self.layers:
            qkv = [padded.rows(w) for w in (layer.q_proj, layer.k_proj, layer.v_proj)]
            biased = layer.q_bias is not None
            biases = [padded.rows(b) for b in (layer.q_bias, layer.k_bias, layer.v_bias)] if biased else []
            layers.append(
                DraftLayer(
                    input_norm=cast(layer.input_norm),
                    hidden_norm=cast(layer.hidden_norm),
                    qkv=pack(*qkv),
                    qkv_bias=torch.cat([cast(b) for b in biases]) if biased else None,
                    q_norm=cast(layer.q_norm),
                    k_norm=cast(layer.k_norm),
                    o=pack(padded.rows(layer.o_proj.T).T),
                    post_norm=cast(layer.post_norm),
                    gate_up=pack(layer.gate_proj, layer.up_proj, paired=True),
                    down=pack(layer.down_proj),
                )
            )
        cos, sin = rope_table(
            max_positions or self.max_positions, self.head_dim, self.rope_theta, self.rope_scaling
        )
        return DraftHead(
            kind=self.kind,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=padded.head_dim,
            norm_eps=self.norm_eps,
            softmax_scale=self.head_dim**-0.5,
            feedback_post_norm=self.feedback_post_norm,
            norm_before_residual=self.norm_before_residual,
            embedding=cast(self.embedding),
            fc=pack(self.fc),
            fc_bias=cast(self.fc_bias),
            fc_norm=cast(self.fc_norm),
            norm=cast(self.norm),
            lm_head=pack(self.lm_head),
            draft_to_target=self._explicit_map(),
            cos=padded.table(cos),
            sin=padded.table(sin),
            layers=layers,
        )

    def _explicit_map(self) -> Tensor | None:
        """The map, spelt out where the embedding has padding rows beyond the draft vocabulary."""
        if self.draft_to_target is None and self.draft_vocab_size != self.vocab_size:
            return torch.arange(self.draft_vocab_size, dtype=torch.int32)
        return self.draft_to_target


class _Padding:
    """Widens heads of size D to a size that attention supports: each rotary half gets zeros behind it."""

    def __init__(self, head: LoadedHead):
        self._half = head.head_dim // 2
        self.head_dim = next((size for size in _HEAD_DIMS if size >= head.head_dim), None)
        if self.head_dim is None or head.head_dim % 2:
            raise ValueError(
                f"head: head_dim: expected an even number up to {_HEAD_DIMS[-1]}, got {head.head_dim}"
            )
        if self.head_dim != head.head_dim and any(layer.q_norm is not None for layer in head.layers):
            raise ValueError(
                f"head: head_dim with qk-norm: expected one of {_HEAD_DIMS}, got {head.head_dim}"
            )

    def rows(self, weight: Tensor) -> Tensor:
        """[heads D, ...] -> [heads padded D, ...]."""
        halves = weight.reshape(-1, self._half, *weight.shape[1:])
        out = halves.new_zeros(halves.shape[0], self.head_dim // 2, *weight.shape[1:])
        out[:, : self._half] = halves
        return out.flatten(0, 1)

    def table(self, angles: Tensor) -> Tensor:
        """[positions, D/2] -> [positions, padded D/2]."""
        return torch.nn.functional.pad(angles, (0, self.head_dim // 2 - self._half)).contiguous()
