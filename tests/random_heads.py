"""Random draft heads in the layouts of public checkpoints: (config, tensors by stored name)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _layer(
    at: str, hidden: int, width: int, heads: int, kv_heads: int, head_dim: int, inner: int, make
) -> dict[str, Tensor]:
    return {
        f"{at}self_attn.q_proj.weight": make(heads * head_dim, width),
        f"{at}self_attn.k_proj.weight": make(kv_heads * head_dim, width),
        f"{at}self_attn.v_proj.weight": make(kv_heads * head_dim, width),
        f"{at}self_attn.o_proj.weight": make(hidden, heads * head_dim),
        f"{at}mlp.gate_proj.weight": make(inner, hidden),
        f"{at}mlp.up_proj.weight": make(inner, hidden),
        f"{at}mlp.down_proj.weight": make(hidden, inner),
    }


def random_head(
    kind: str = "eagle3",
    *,
    hidden: int = 32,
    target_hidden: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    inner: int = 48,
    vocab: int = 96,
    draft_vocab: int | None = None,
    num_aux: int = 3,
    layers: int = 1,
    fc_norm: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    fc_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 0.5,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head of official EAGLE-1/2 ("eagle1") or EAGLE-3 ("eagle3") layout. draft_vocab: None for the full
    vocabulary."""
    random = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * scale / shape[-1] ** 0.5 * 2).to(dtype)

    def gain(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=random)).to(dtype)

    def bias(size: int) -> Tensor:
        return (0.5 * torch.randn(size, generator=random)).to(dtype)

    target_hidden = target_hidden or hidden
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
    }
    tensors = {"embed_tokens.weight": torch.randn(vocab, hidden, generator=random).to(dtype)}
    for i in range(layers):
        at = "midlayer." if kind == "eagle3" and i == 0 else f"layers.{i}."
        width = 2 * hidden if kind == "eagle3" and i == 0 else hidden
        tensors |= _layer(at, hidden, width, heads, kv_heads, head_dim, inner, make)
        tensors[f"{at}post_attention_layernorm.weight"] = gain(hidden)
        if kind == "eagle3" or i > 0:
            tensors[f"{at}input_layernorm.weight"] = gain(hidden)
        if kind == "eagle3" and i == 0:
            tensors[f"{at}hidden_norm.weight"] = gain(hidden)
        if qk_norm:
            tensors[f"{at}self_attn.q_norm.weight"] = gain(head_dim)
            tensors[f"{at}self_attn.k_norm.weight"] = gain(head_dim)
        if qkv_bias:
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                tensors[f"{at}self_attn.{part}_proj.bias"] = bias(count * head_dim)
    if kind == "eagle1":
        tensors["fc.weight"] = make(hidden, 2 * hidden)
    else:
        tensors["fc.weight"] = make(hidden, num_aux * target_hidden)
        tensors["norm.weight"] = gain(hidden)
        tensors["lm_head.weight"] = 2 * make(draft_vocab or vocab, hidden)
        if target_hidden != hidden:
            config["target_hidden_size"] = target_hidden
        if fc_norm:
            tensors |= {f"fc_norm.{i}.weight": gain(target_hidden) for i in range(num_aux)}
        if draft_vocab:
            ids = torch.randperm(vocab, generator=random)[:draft_vocab].sort().values
            config["draft_vocab_size"] = draft_vocab
            tensors["d2t"] = ids - torch.arange(draft_vocab)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
            tensors["t2d"][ids] = True
    if fc_bias:
        tensors["fc.bias"] = bias(hidden)
    return config, tensors


def random_target(
    hidden: int = 32, vocab: int = 96, layers: int = 12, dtype: torch.dtype = torch.float32, seed: int = 1
):
    """(config, tensors) of a target, as far as a head's loader looks at it."""
    random = torch.Generator().manual_seed(seed)
    config = {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_theta": 5000.0,
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=random).to(dtype),
        "lm_head.weight": (torch.randn(vocab, hidden, generator=random) / hidden**0.5 * 2).to(dtype),
    }
    return config, tensors


def decision(head, what: str):
    """The one line about `what` in a loaded head's report."""
    found = [d for d in head.report if d.what == what]
    assert len(found) == 1, f"{what}: {found}"
    return found[0]
