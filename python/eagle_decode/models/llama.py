"""A compact decoder for Llama, Qwen2, Qwen3 and Mistral on eagle_cuda's ops. Implements `models.base.Target`.

    target = load_target("smollm2-135m")                     # or a Hugging Face folder, or a .gguf file
    cache = target.new_cache(batch_size=1, capacity=512)
    prompt = target.prefill(ids, cache=cache)                # prompt.logits [1, 1, V]
    step = target.forward(tokens, seq_lens=..., depths=..., mask=..., num_nodes=..., cache=cache)

torch gathers embedding rows and copies; every sum is an eagle_cuda op, because torch's own change bits with
the number of rows. Feature layers cost nothing: the residual stream lives in the feature rows. It starts in
the first captured layer's slice, and moves to the next slice at the first write after the capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_cuda.attention import append_kv, rope_table, tree_attention
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import PackedWeight, linear, pack_weight, rms_norm
from eagle_decode.models.base import TargetOutput
from eagle_decode.models.checkpoint import Checkpoint, load_checkpoint

PREFILL_ROWS = 256  # prompts are cut where the position is a multiple of this
_MAX_PASSES = 64  # shapes whose views are kept


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedWeight
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    window: int  # 0: none


class _Work(NamedTuple):
    """Views of the buffers that every layer works in."""

    q: Tensor  # [B, N, Hq, D], inside qkv
    k: Tensor  # [B, N, Hkv, D], inside qkv
    v: Tensor  # [B, N, Hkv, D], inside qkv
    qkv: Tensor  # [B N, (Hq + 2 Hkv) D]
    attended: Tensor  # [B, N, Hq, D]
    attended_rows: Tensor  # [B N, Hq D], the same
    activated: Tensor  # [B N, I]


class _Pass(NamedTuple):
    """Views of the work buffers for one shape of pass."""

    embedded: Tensor  # [B N, H] where the residual stream begins
    streams: tuple[tuple[Tensor, Tensor], ...]  # per layer: where the stream is read, and where it is written
    work: _Work
    final: Tensor  # [rows, H] of which logits are wanted, before the final norm
    normed: Tensor | None  # [B N, H] output of the final norm, when it is the feature
    normed_rows: Tensor | None  # [rows, H] of it
    logits: Tensor | None  # [rows, V]
    output: TargetOutput


def load_target(target: str | Path, dtype: torch.dtype = torch.bfloat16) -> LlamaTarget:
    """Loads a target in `dtype` (float32, bfloat16 or float16) from what
    `models.checkpoint.load_checkpoint` accepts."""
    return LlamaTarget(load_checkpoint(target, dtype))


class LlamaTarget:
    """A target model held as packed weights. Not thread-safe: passes share work buffers."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None):
        config = checkpoint.config
        self.checkpoint, self.config = checkpoint, config
        self.vocab_size: int = config["vocab_size"]
        self.hidden_size: int = config["hidden_size"]
        self.num_layers: int = config["num_hidden_layers"]
        self.max_positions: int = config["max_position_embeddings"]
        self._num_heads: int = config["num_attention_heads"]
        self._num_kv_heads: int = config["num_key_value_heads"]
        self._head_dim: int = config["head_dim"]
        self._intermediate_size: int = config["intermediate_size"]
        self._eps: float = config["rms_norm_eps"]
        self._scale = self._head_dim**-0.5
        _refuse_unsupported(config, checkpoint.source)

        self._embedding = checkpoint.embedding
        if dtype is not None:
            self._embedding = self._embedding.to(dtype)
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._layers = [self._load_layer(i) for i in range(self.num_layers)]
        self._norm = self._tensor("model.norm.weight")
        tied = "lm_head.weight" not in checkpoint.tensors and config["tie_word_embeddings"]
        self._lm_head = pack_weight(self._embedding if tied else checkpoint.lm_head.to(self.dtype))

        self._rope = self._rope_table(min(2048, self.max_positions))
        self._buffers: dict[str, Tensor] = {}
        self._passes: dict[tuple, _Pass] = {}
        self._chains: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def feature_size(self, feature_layers: Sequence[int] | None) -> int:
        """F: len(feature_layers) * H, H for (), 0 for None."""
        return 0 if feature_layers is None else max(1, len(feature_layers)) * self.hidden_size

    def new_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """One KVCache per layer, of `capacity` uninitialised rows per request."""
        if batch_size < 0 or capacity < 1:
            raise ValueError(
                f"batch_size, capacity: expected at least 0 and 1, got {batch_size} and {capacity}"
            )
        rows = self._rope[0].shape[0]
        if capacity > rows:  # angles of a position do not depend on the table's length
            self._rope = self._rope_table(max(capacity, min(2 * rows, self.max_positions)))
        shape = (self.num_layers, 2, batch_size, capacity, self._num_kv_heads, self._head_dim)
        memory = torch.empty(shape, dtype=self.dtype, device=self.device)
        return [KVCache(memory[i, 0], memory[i, 1]) for i in range(self.num_layers)]

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
        """See `Target.forward`. Raises ValueError for wrong shapes, dtypes and feature layers, IndexError
        for a token outside the vocabulary."""
        batch_size, max_nodes = tokens.shape
        key = (batch_size, max_nodes, feature_layers, logits)
        p = self._passes.get(key) or self._new_pass(*key)
        eps, scale = self._eps, self._scale
        cos, sin = self._rope
        q, k, v, qkv, attended, attended_rows, activated = p.work

        torch.index_select(self._embedding, 0, tokens.view(-1), out=p.embedded)
        for layer, kv, (x, y) in zip(self._layers, cache, p.streams, strict=True):
            linear(x, layer.qkv, rms_norm=layer.input_norm, eps=eps, bias=layer.qkv_bias, out=qkv)
            append_kv(
                q, k, v, kv, seq_lens=seq_lens, depths=depths, num_nodes=num_nodes, cos=cos, sin=sin,
                q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps, q_out=q,
            )  # fmt: skip
            tree_attention(
                q, kv, seq_lens=seq_lens, num_nodes=num_nodes, mask=mask,
                softmax_scale=scale, window=layer.window, out=attended,
            )  # fmt: skip
            linear(attended_rows, layer.o, bias=layer.o_bias, residual=x, out=y)
            linear(
                y, layer.gate_up, rms_norm=layer.post_norm, eps=eps, bias=layer.gate_up_bias,
                activation="swiglu", out=activated,
            )  # fmt: skip
            linear(activated, layer.down, bias=layer.down_bias, residual=y, out=y)
        if p.normed is not None:
            rms_norm(p.streams[-1][1], self._norm, eps, out=p.normed)
            if p.logits is not None:
                linear(p.normed_rows, self._lm_head, out=p.logits)
        elif p.logits is not None:
            linear(p.final, self._lm_head, rms_norm=self._norm, eps=eps, out=p.logits)
        return p.output

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
        """See `Target.prefill`."""
        tokens = torch.as_tensor(tokens, dtype=torch.int32, device=self.device).view(1, -1)
        total = tokens.shape[1]
        self._check_prompt(tokens, start, request, cache[0].k)
        size = self.feature_size(feature_layers)
        features = (
            None
            if feature_layers is None
            else torch.empty((1, total, size), dtype=self.dtype, device=self.device)
        )
        rows = [KVCache(kv.k[request : request + 1], kv.v[request : request + 1]) for kv in cache]
        seq_lens = torch.empty(1, dtype=torch.int32, device=self.device)
        last = None
        done = 0
        while done < total:
            n = min(total - done, PREFILL_ROWS - (start + done) % PREFILL_ROWS)
            depths, mask, num_nodes = self._chain(n)
            output = self.forward(
                tokens[:, done : done + n],
                seq_lens=seq_lens.fill_(start + done),
                depths=depths,
                mask=mask,
                num_nodes=num_nodes,
                cache=rows,
                feature_layers=feature_layers,
                logits=logits if done + n == total else "none",
            )
            if features is not None:
                features[:, done : done + n] = output.features
            last = output.logits
            done += n
        return TargetOutput(last, features)

    def _check_prompt(self, tokens: Tensor, start: int, request: int, k_cache: Tensor) -> None:
        """A key row outside the cache counts as missing: without this, too long a prompt gives plausible
        nonsense."""
        requests, rows = k_cache.shape[:2]
        if not 0 <= request < requests:
            raise ValueError(f"request: expected 0 to {requests - 1}, a row of the cache, got {request}")
        total = tokens.numel()
        if start < 0 or start + total > rows:
            raise ValueError(
                f"start, tokens: expected rows within the cache's {rows}, got {total} tokens from {start}"
            )
        if total == 0:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"tokens: expected ids of 0 to {self.vocab_size - 1}, got {low if low < 0 else high}"
            )

    # ---- loading

    def _tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensors[name].to(self.dtype).contiguous()

    def _bias(self, *names: str) -> Tensor | None:
        """Biases of matrices that share an input, joined; None where the checkpoint has none."""
        found = [f"{name}.bias" in self.checkpoint.tensors for name in names]
        if not any(found):
            return None
        if not all(found):
            missing = ", ".join(f"{name}.bias" for name, there in zip(names, found, strict=True) if not there)
            raise ValueError(f"{self.checkpoint.source}: missing beside its neighbours: {missing}")
        return torch.cat([self._tensor(f"{name}.bias") for name in names])

    def _rope_table(self, rows: int) -> tuple[Tensor, Tensor]:
        return rope_table(rows, self._head_dim, self.config["rope_theta"], self.config["rope_scaling"])

    def _load_layer(self, index: int) -> _Layer:
        at = f"model.layers.{index}."
        qkv = [at + f"self_attn.{name}_proj" for name in "qkv"]
        gate_up = [at + f"mlp.{name}_proj" for name in ("gate", "up")]
        o, down = at + "self_attn.o_proj", at + "mlp.down_proj"
        norms = at + "self_attn.q_norm.weight" in self.checkpoint.tensors
        sliding = self.config["layer_types"][index] == "sliding_attention"

        def weights(names: Sequence[str]) -> list[Tensor]:
            return [self._tensor(f"{name}.weight") for name in names]

        return _Layer(
            input_norm=self._tensor(at + "input_layernorm.weight"),
            qkv=pack_weight(weights(qkv)),
            qkv_bias=self._bias(*qkv),
            q_norm=self._tensor(at + "self_attn.q_norm.weight") if norms else None,
            k_norm=self._tensor(at + "self_attn.k_norm.weight") if norms else None,
            o=pack_weight(weights([o])),
            o_bias=self._bias(o),
            post_norm=self._tensor(at + "post_attention_layernorm.weight"),
            gate_up=pack_weight(weights(gate_up), paired=True),
            gate_up_bias=self._bias(*gate_up),
            down=pack_weight(weights([down])),
            down_bias=self._bias(down),
            window=self.config["sliding_window"] if sliding else 0,
        )

    # ---- work buffers

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, columns] at the start of the buffer of that name, which grows, and then outdates all
        views."""
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < rows * columns:
            flat = self._buffers[name] = torch.zeros(
                rows * columns, dtype=dtype or self.dtype, device=self.device
            )
            self._passes.clear()
        return flat[: rows * columns].view(rows, columns)

    def _new_pass(
        self, batch_size: int, max_nodes: int, feature_layers: tuple[int, ...] | None, logits: str
    ) -> _Pass:
        self._check_feature_layers(feature_layers)
        if logits not in ("all", "last", "none"):
            raise ValueError(f"logits: expected all, last or none, got {logits!r}")
        if len(self._passes) >= _MAX_PASSES:
            self._passes.clear()
        rows, hidden = batch_size * max_nodes, self.hidden_size
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._head_dim

        # Where the residual stream lives: the slices of the feature rows in turn, then a buffer of its own.
        size = self.feature_size(feature_layers)
        features = self._buffer("features", rows, size) if size else None
        captured = feature_layers or ()
        homes = [features[:, i * hidden : (i + 1) * hidden] for i in range(len(captured))]
        homes.append(self._buffer("hidden", rows, hidden))
        streams, home = [], 0
        for layer in range(self.num_layers):
            read = homes[home]
            home += layer in captured
            streams.append((read, homes[home]))
        stream = homes[home]

        qkv = self._buffer("qkv", rows, (heads + 2 * kv_heads) * dim)
        by_head = qkv.view(batch_size, max_nodes, heads + 2 * kv_heads, dim)
        attended = self._buffer("attended", rows, heads * dim)
        wanted = 1 if logits == "last" else max_nodes  # nodes of a request with logits

        def last_node(x: Tensor) -> Tensor:
            return x.view(batch_size, max_nodes, hidden)[:, -1] if logits == "last" else x

        scores = None
        if logits != "none":
            scores = self._buffer("logits", batch_size * wanted, self.vocab_size, torch.float32)
        normed = features if feature_layers == () else None
        result = TargetOutput(
            None if scores is None else scores.view(batch_size, wanted, self.vocab_size),
            None if features is None else features.view(batch_size, max_nodes, size),
        )
        made = _Pass(
            embedded=homes[0],
            streams=tuple(streams),
            work=_Work(
                q=by_head[:, :, :heads],
                k=by_head[:, :, heads : heads + kv_heads],
                v=by_head[:, :, heads + kv_heads :],
                qkv=qkv,
                attended=attended.view(batch_size, max_nodes, heads, dim),
                attended_rows=attended,
                activated=self._buffer("activated", rows, self._intermediate_size),
            ),
            final=last_node(stream),
            normed=normed,
            normed_rows=None if normed is None else last_node(normed),
            logits=scores,
            output=result,
        )
        self._passes[(batch_size, max_nodes, feature_layers, logits)] = made
        return made

    def _check_feature_layers(self, layers: tuple[int, ...] | None) -> None:
        if layers is None:
            return
        ascending = all(a < b for a, b in itertools.pairwise(layers))
        if not ascending or not all(0 <= layer <= self.num_layers for layer in layers):
            raise ValueError(
                f"feature_layers: expected ascending ids in [0, {self.num_layers}], got {layers}"
            )

    def _chain(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """depths [1, n], mask [1, n, ceil(n/32)] and num_nodes [1] of a chain."""
        if n not in self._chains:
            seen = (
                np.arange(1, n + 1)[:, None] - 32 * np.arange((n + 31) // 32)[None, :]
            )  # bits set in each word
            words = ((np.int64(1) << np.clip(seen, 0, 32)) - 1).astype(np.uint32).view(np.int32)
            depths = torch.arange(n, dtype=torch.int32, device=self.device)[None]
            mask = torch.from_numpy(words).to(self.device)[None]
            self._chains[n] = (depths, mask, torch.tensor([n], dtype=torch.int32, device=self.device))
        return self._chains[n]


def _refuse_unsupported(config: dict[str, Any], source: Path) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"{source}: hidden_act: expected silu, got {activation}")
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            f"{source}: partial_rotary_factor: expected 1, got {config['partial_rotary_factor']}"
        )
