"""Heads on disk: `model.safetensors` and `config.json` in the layout of SpecForge's EAGLE-3 heads.

Tensors: bf16 weights under the names of `EagleHead`, `d2t` int64 [Vd] (target id = draft id + d2t[draft id])
and `t2d` bool [V] (the target's token is in the draft vocabulary). The embedding is the target's and is not
stored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from eagle_decode.train.head import EagleHead, HeadConfig


def head_tensors(head: EagleHead, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of a head as they are stored; the feature scale is folded into fc."""
    state = {name: tensor.detach().float().cpu() for name, tensor in head.named_parameters()}
    state["fc.weight"] = state["fc.weight"] * head.feature_scale.float().cpu()
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    draft_ids = head.draft_ids.cpu()
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    in_draft = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    in_draft[draft_ids] = True
    tensors["t2d"] = in_draft
    return tensors


def head_config(config: HeadConfig) -> dict:
    """config.json of a head. Layer ids in `eagle_config` name a layer's output, so they are one lower than
    ours.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "target_hidden_size": config.hidden_size,
        "target_model_type": config.target_model_type,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.feature_layers],
            "use_aux_hidden_state": True,
        },
    }


def export_head(head: EagleHead, folder: str | Path, notes: str | None = None) -> Path:
    """Writes a head's folder (file by file, each replaced whole); `notes` becomes its README.md. Returns the
    folder.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"model.safetensors.{os.getpid()}.part"
    save_file(head_tensors(head), partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    _write_text(folder / "config.json", json.dumps(head_config(head.config), indent=2) + "\n")
    if notes is not None:
        _write_text(folder / "README.md", notes)
    return folder


def import_head(folder: str | Path) -> EagleHead:
    """Reads a folder written by `export_head`. Raises ValueError naming tensors that are missing, extra or
    misshapen.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise ValueError(
            f"{folder}: architectures: expected LlamaForCausalLMEagle3, got {raw.get('architectures')}"
        )
    config = HeadConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=raw["rope_theta"],
        feature_layers=tuple(i + 1 for i in raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        max_position_embeddings=raw["max_position_embeddings"],
        target_model_type=raw["target_model_type"],
    )
    head, tensors = EagleHead(config), load_file(folder / "model.safetensors")
    expected = {name: tuple(p.shape) for name, p in head.named_parameters()}
    expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    ):
        details = ", ".join(
            f"{name} (expected {expected.get(name)}, got {found.get(name)})" for name in wrong
        )
        raise ValueError(f"{folder}: {details}")
    draft_ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    if not torch.equal(draft_ids, tensors["t2d"].nonzero()[:, 0]):
        raise ValueError(f"{folder}: d2t and t2d name different tokens")
    with torch.no_grad():
        head.draft_ids.copy_(draft_ids)
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text)
    os.replace(partial, path)
