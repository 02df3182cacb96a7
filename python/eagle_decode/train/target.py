"""The target in plain torch: writes training text and yields the features and teacher distributions of a
head.

Serves Llama, Mistral, Qwen2 and Qwen3 checkpoints. It is made for batches (training text by the hundred,
features by the thousand tokens); generation for users goes through the engine.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_decode.models.checkpoint import Checkpoint


def product_dtype(device: str | torch.device) -> torch.dtype:
    """What matrices are multiplied in: bfloat16, but float32 on CPUs that lack AVX-512, where torch computes
    bfloat16 at a seventh of float32's speed.
    """
    slow = torch.device(device).type == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return torch.float32 if slow else torch.bfloat16


class TorchTarget:
    """A decoder held as plain tensors, q/k/v and gate/up each joined into one matrix.

    Attributes: config (see `Checkpoint`), embedding [V, H], lm_head [V, H], final_norm [H], dtype, device.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ):
        """dtype: of weights and products; None chooses (`product_dtype`)."""
        dtype = dtype or product_dtype(device)
        self.config, self.device, self.dtype = checkpoint.config, torch.device(device), dtype
        tensors = checkpoint.tensors

        def take(name: str) -> Tensor:
            return tensors[name].to(self.device, dtype)

        def joined(prefix: str, parts: tuple[str, ...], kind: str) -> Tensor | None:
            if f"{prefix}{parts[0]}.{kind}" not in tensors:
                return None
            return torch.cat([take(f"{prefix}{part}.{kind}") for part in parts]).contiguous()

        def optional(name: str) -> Tensor | None:
            return take(name) if name in tensors else None

        self.embedding = checkpoint.embedding.to(self.device, dtype)
        tied = "lm_head.weight" not in tensors
        self.lm_head = self.embedding if tied else checkpoint.lm_head.to(self.device, dtype)
        self.final_norm = take("model.norm.weight")
        self.layers = []
        for i in range(self.config["num_hidden_layers"]):
            layer, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
            self.layers.append(
                {
                    "input_norm": take(layer + "input_layernorm.weight"),
                    "qkv": joined(attention, ("q_proj", "k_proj", "v_proj"), "weight"),
                    "qkv_bias": joined(attention, ("q_proj", "k_proj", "v_proj"), "bias"),
                    "q_norm": optional(attention + "q_norm.weight"),
                    "k_norm": optional(attention + "k_norm.weight"),
                    "o": take(attention + "o_proj.weight"),
                    "o_bias": optional(attention + "o_proj.bias"),
                    "post_norm": take(layer + "post_attention_layernorm.weight"),
                    "gate_up": joined(layer + "mlp.", ("gate_proj", "up_proj"), "weight"),
                    "gate_up_bias": joined(layer + "mlp.", ("gate_proj", "up_proj"), "bias"),
                    "down": take(layer + "mlp.down_proj.weight"),
                    "down_bias": optional(layer + "mlp.down_proj.bias"),
                    "sliding": self.config["layer_types"][i] == "sliding_attention",
                }
            )
        self._inverse_frequency, self._rope_scale = rope_frequencies(self.config)
        self._inverse_frequency = self._inverse_frequency.to(self.device)

    def fingerprint(self) -> str:
        """A hash of a part of every layer's weights, the same on every device and in every dtype."""
        parts = [self.final_norm, self.lm_head[::61], *(layer["down"][::61] for layer in self.layers)]
        words = torch.cat([part.to("cpu", torch.bfloat16).view(torch.int16).flatten() for part in parts])
        return hashlib.sha256(words.numpy().tobytes()).hexdigest()

    def new_cache(self, batch: int, length: int) -> Tensor:
        """Zeroed keys and values [layers, 2, batch, kv heads, length, head_dim]."""
        heads, width = self.config["num_key_value_heads"], self.config["head_dim"]
        return torch.zeros(
            len(self.layers), 2, batch, heads, length, width, dtype=self.dtype, device=self.device
        )

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        cache: Tensor | None = None,
        start: int = 0,
        mask: Tensor | None = None,
        capture: tuple[int, ...] = (),
        entering: tuple[int, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the decoder over Q new tokens of each request.

        ids, positions: int64 [B or 1, Q]. cache: from `new_cache`; rows start to start + Q are written, and
        all rows before are seen. mask: bool [B, 1, Q, start + Q], true where a query sees a key; None is
        causal (start 0 only).
        capture: layers whose input is returned. entering: a layer and its input [B, Q, H], as captured
        before, to begin with instead of the embeddings of `ids`. Returns (hidden after the final norm
        [B, Q, H], captured, each [B, Q, H], in the order of `capture`).
        """
        config = self.config
        heads, kv_heads, width = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        eps, (batch, count) = config["rms_norm_eps"], ids.shape
        angle = positions.to(self.device)[:, None, :, None].float() * self._inverse_frequency
        angle = torch.cat([angle, angle], -1)
        cos, sin = ((f(angle) * self._rope_scale).to(self.dtype) for f in (torch.cos, torch.sin))
        first, hidden = entering or (0, F.embedding(ids.to(self.device), self.embedding))
        captured, hidden = {}, hidden.to(self.dtype)
        for i, layer in enumerate(self.layers[first:], first):
            if i in capture:
                captured[i] = hidden
            x = F.rms_norm(hidden, hidden.shape[-1:], layer["input_norm"], eps)
            x = F.linear(x, layer["qkv"], layer["qkv_bias"]).view(batch, count, -1, width).transpose(1, 2)
            q, k, v = x.split([heads, kv_heads, kv_heads], 1)
            if layer["q_norm"] is not None:
                q = F.rms_norm(q, (width,), layer["q_norm"], eps)
                k = F.rms_norm(k, (width,), layer["k_norm"], eps)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            if cache is not None:
                cache[i, 0, :, :, start : start + count] = k
                cache[i, 1, :, :, start : start + count] = v
                k, v = cache[i, 0, :, :, : start + count], cache[i, 1, :, :, : start + count]
            attended = self._attend(q, k, v, self._layer_mask(layer, mask, count, start, k))
            hidden = hidden + F.linear(
                attended.transpose(1, 2).reshape(batch, count, -1), layer["o"], layer["o_bias"]
            )
            x = F.rms_norm(hidden, hidden.shape[-1:], layer["post_norm"], eps)
            gate, up = F.linear(x, layer["gate_up"], layer["gate_up_bias"]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer["down"], layer["down_bias"])
        return F.rms_norm(hidden, hidden.shape[-1:], self.final_norm, eps), [captured[i] for i in capture]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] after the final norm -> [..., V] in the target's dtype."""
        return F.linear(hidden, self.lm_head)

    def _layer_mask(
        self, layer: dict, mask: Tensor | None, count: int, start: int, keys: Tensor
    ) -> Tensor | None:
        window = self.config["sliding_window"]
        if not layer["sliding"] or keys.shape[2] <= window:
            return mask
        rows = torch.arange(start, start + count, device=self.device)[:, None]
        columns = torch.arange(keys.shape[2], device=self.device)
        near = (columns <= rows) & (columns > rows - window)
        return near if mask is None else mask & near

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, count, width = q.shape
        if count > 1:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        # One query: fold the heads of a group into the row dimension, so that keys are not expanded.
        grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], width)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rope_frequencies(config: dict) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cos and sin, for a checkpoint's
    configuration.

    Knows plain, linear, llama3 and yarn scaling; raises ValueError for others.
    """
    width, theta, scaling = config["head_dim"], config["rope_theta"], config["rope_scaling"]
    inverse = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is None:
        return inverse.float(), 1.0
    kind, factor = scaling["rope_type"], scaling.get("factor", 1.0)
    if kind == "linear":
        return (inverse / factor).float(), 1.0
    trained = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((trained * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (inverse * (keep + (1 - keep) / factor)).float(), 1.0
    if kind == "yarn":

        def dimension(rotations: float) -> float:
            return width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(dimension(scaling.get("beta_fast") or 32)), 0)
        last = min(math.ceil(dimension(scaling.get("beta_slow") or 1)), width - 1)
        ramp = (torch.arange(width // 2, dtype=torch.float64) - first) / max(last - first, 0.001)
        keep = 1 - ramp.clamp(0, 1)
        scale = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
        return (inverse * (keep + (1 - keep) / factor)).float(), scale
    raise ValueError(f"rope_scaling: expected linear, llama3 or yarn, got {kind}")
