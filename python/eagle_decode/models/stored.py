"""What target checkpoints of every kind share: a configuration in one spelling, and tensors by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class StoredTensors(Mapping):
    """A read-only mapping from Hugging Face names to tensors, which a subclass reads when they are asked for.
    One that is not there is a ValueError."""

    _stored: dict[str, Any]
    _source: Path

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor:
        """The tensor of a name that is there."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._stored:
            raise ValueError(f"{self._source}: missing tensor {name}")
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def complete_config(raw: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
    """Fills in a Hugging Face configuration so that every key that `Checkpoint` promises is there, in one
    spelling.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{source}: model_type: expected one of {', '.join(FAMILIES)}, got {family}")
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ValueError(
            f"{source}: expected weights that are not quantised, got quantization_config {method}"
        )
    for key in SIZES:
        if not isinstance(value := raw.get(key), int) or value < 1:
            raise ValueError(f"{source}: {key}: expected an integer of at least 1, got {value}")
    config = dict(raw)
    config["architectures"] = raw.get("architectures") or [FAMILIES[family]]
    heads = raw["num_attention_heads"]
    config["num_key_value_heads"] = raw.get("num_key_value_heads") or heads
    fallback = 128 if family == "qwen3" else raw["hidden_size"] // heads
    config["head_dim"] = raw.get("head_dim") or fallback
    config["rms_norm_eps"] = raw.get("rms_norm_eps", 1e-6)
    config["max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    config["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
    config["bos_token_id"] = raw.get("bos_token_id")
    config["generation_config"] = raw.get("generation_config") or {}
    config["eos_token_id"] = sorted(set(as_list(raw.get("eos_token_id"))))

    # Newer transformers write one `rope_parameters`, older ones `rope_theta` beside `rope_scaling`.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    config["rope_theta"] = float(rope.pop("rope_theta", None) or raw.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    config["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rope}
    config.pop("rope_parameters", None)

    # Qwen2 and Qwen3 store a window that `use_sliding_window` turns off, used from `max_window_layers` on.
    window = raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    first = raw.get("max_window_layers", 0) if family in ("qwen2", "qwen3") else 0
    layers = range(raw["num_hidden_layers"])
    types = ["sliding_attention" if window and i >= first else "full_attention" for i in layers]
    config["layer_types"] = (raw.get("layer_types") or types) if window else types
    config["sliding_window"] = window if "sliding_attention" in config["layer_types"] else None
    return config


def as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]
