"""A random target in a few kilobytes, and heads for it: what the tests of the training recipe train on."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle_decode.models.checkpoint import Checkpoint
from eagle_decode.models.stored import complete_config
from eagle_decode.train.head import EagleHead, HeadConfig

VOCAB, STOP = 48, 2


def tiny_checkpoint(
    family: str = "llama", seed: int = 0, vocab_size: int = VOCAB, head_dim: int = 8
) -> Checkpoint:
    """A random target of 7 layers, the fewest with three distinct feature layers."""
    config = complete_config(
        {
            "model_type": family,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "vocab_size": vocab_size,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": STOP,
            "sliding_window": 6 if family == "mistral" else None,
        },
        "tiny",
    )
    generator = torch.Generator().manual_seed(seed)
    queries, keys = 4 * head_dim, 2 * head_dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"model.embed_tokens.weight": 6 * draw(vocab_size, 32), "model.norm.weight": 1 + 0.1 * draw(32)}
    for i in range(7):
        layer, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        tensors |= {
            layer + f"{name}.weight": 1 + draw(32) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {
            attention + "q_proj.weight": draw(queries, 32),
            attention + "k_proj.weight": draw(keys, 32),
            attention + "v_proj.weight": draw(keys, 32),
            attention + "o_proj.weight": draw(32, queries),
            layer + "mlp.gate_proj.weight": draw(40, 32),
            layer + "mlp.up_proj.weight": draw(40, 32),
            layer + "mlp.down_proj.weight": draw(32, 40),
        }
        if family == "qwen2":
            tensors |= {
                attention + f"{name}_proj.bias": draw(rows)
                for name, rows in (("q", queries), ("k", keys), ("v", keys))
            }
        if family == "qwen3":
            tensors |= {attention + f"{name}_norm.weight": 1 + draw(head_dim) for name in ("q", "k")}
    return Checkpoint(config, tensors, Path("tiny"))


def random_head(draft_vocab_size: int = 32, seed: int = 1, head_dim: int = 8) -> EagleHead:
    """A head with random weights, norms and draft ids, so that no term of the pass is trivial."""
    torch.manual_seed(seed)
    head = EagleHead(HeadConfig.for_target(tiny_checkpoint(head_dim=head_dim).config, draft_vocab_size))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
        head.draft_ids.copy_(torch.randperm(VOCAB)[:draft_vocab_size].sort().values)
        head.feature_scale.uniform_(0.5, 2.0)
    return head
