"""Targets in a GGUF file: its fields as a Hugging Face configuration, its tensors dequantised and renamed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from eagle_decode.models.stored import FAMILIES, StoredTensors, complete_config

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _GgufTensors(StoredTensors):
    """Tensors of a GGUF file under Hugging Face names, dequantised when asked for."""

    def __init__(self, reader: Any, config: dict[str, Any], dtype: torch.dtype | None, source: Path):
        self._dtype, self._config, self._source = dtype, config, source
        self._stored = {}
        for tensor in reader.tensors:
            if tensor.name != "rope_freqs.weight":  # already part of the configuration
                self._stored[_hugging_face_name(tensor.name, source)] = tensor

    def _read(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        stored = self._stored[name]
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).astype("float32"))
        if self._config["model_type"] == "llama":
            if ".q_proj." in name:
                tensor = _unpermute(tensor, self._config["num_attention_heads"])
            elif ".k_proj." in name:
                tensor = _unpermute(tensor, self._config["num_key_value_heads"])
        return tensor.to(self._dtype or torch.float32).contiguous()


def _hugging_face_name(name: str, source: Path) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")  # blk.<layer>.<what>.<weight or bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{parts[3]}"
    raise ValueError(f"{source}: tensor {name} belongs to no supported family ({', '.join(FAMILIES)})")


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes GGUF's interleaving of the two rotary halves: rows (head, pair, half) -> (head, half, pair)."""
    rows = tensor.shape[0]
    grouped = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return grouped.transpose(1, 2).reshape(tensor.shape)


def read_gguf(path: Path, dtype: torch.dtype | None) -> tuple[dict[str, Any], StoredTensors]:
    """The configuration and the tensors, of `dtype` (None: float32)."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.ggml.t")
    }
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"{path}: general.architecture: expected one of {', '.join(FAMILIES)}, got {family}")
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def field(key: str, default: Any = None) -> Any:
        return fields.get(f"{family}.{key}", default)

    heads = field("attention.head_count")
    head_dim = field("attention.key_length") or field("embedding_length") // heads
    scaling = _gguf_rope_scaling(
        field, stored.get("rope_freqs.weight"), field("rope.freq_base", 10000.0), head_dim, path
    )
    stops = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    raw = {
        "model_type": family,
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(stored["token_embd.weight"].shape[1]),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": scaling,
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in stored,
        "sliding_window": field("attention.sliding_window"),
        "use_sliding_window": field("attention.sliding_window") is not None,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [stop for stop in stops if stop is not None],
    }
    config = complete_config(raw, path)
    return config, _GgufTensors(reader, config, dtype, path)


def _gguf_rope_scaling(field, freqs, theta: float, head_dim: int, path: Path) -> dict[str, Any] | None:
    """Rope scaling of a GGUF file. Llama 3's is stored as bare factors per frequency, which are recognised by
    value.
    """
    if freqs is None:
        kind = field("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": float(field("rope.scaling.factor"))}
        if field("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
        return scaling
    factors = torch.tensor(freqs.data, dtype=torch.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((8192 / wavelength - 1.0) / 3.0).clamp(0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{path}: rope_freqs.weight is not Llama 3's scaling; use the safetensors checkpoint"
        )
    return scaling
