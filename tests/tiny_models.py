"""Random models small enough to decode thousands of tokens in a second: targets, draft heads, a tokenizer of
bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_decode.heads import LoadedHead, head_from_tensors
from eagle_decode.models.checkpoint import Checkpoint
from eagle_decode.models.llama import LlamaTarget
from eagle_decode.models.stored import complete_config
from random_heads import random_head


def tiny_checkpoint(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 97,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    intermediate_size: int = 96,
    max_positions: int = 512,
    eos_token_id: Any = None,
    sliding_window: int | None = None,
    twins: bool = False,
    family: str | None = None,
    rope_scaling: dict[str, Any] | None = None,
    tied: bool = False,
) -> Checkpoint:
    """A model of random weights.

    family: model_type; default llama, or mistral with a sliding window. qwen2 has biases on q, k and v, qwen3
        norms of q and k, either a window in its upper half of layers only.
    tied: the embedding is the LM head too. Not with twins.
    twins: rows 2i and 2i + 1 of the LM head are equal, so that the two best logits tie exactly at every
        position.
    """
    family = family or ("llama" if sliding_window is None else "mistral")
    config = complete_config(
        {
            "model_type": family,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": rope_scaling,
            "max_position_embeddings": max_positions,
            "sliding_window": sliding_window,
            "use_sliding_window": sliding_window is not None,
            "max_window_layers": num_layers // 2,
            "tie_word_embeddings": tied,
            "eos_token_id": None,
        },
        "memory",
    )
    config["eos_token_id"] = eos_token_id  # as given, to see what the engine makes of it
    new = _Random(seed, dtype)
    tensors = {
        "model.embed_tokens.weight": new.matrix(vocab_size, hidden_size, gain=hidden_size**0.5),
        "model.norm.weight": new.norm(hidden_size),
        "lm_head.weight": new.matrix(vocab_size, hidden_size, gain=3.0),
    }
    if twins:
        tensors["lm_head.weight"][1::2] = tensors["lm_head.weight"][: vocab_size - 1 : 2]
    for i in range(num_layers):
        at, sizes = f"model.layers.{i}.", (num_heads, num_kv_heads, head_dim, intermediate_size)
        tensors |= _layer(new, at, hidden_size, hidden_size, *sizes)
        tensors[f"{at}input_layernorm.weight"] = new.norm(hidden_size)
        if family == "qwen2":
            for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
                tensors[f"{at}self_attn.{name}_proj.bias"] = new.norm(heads * head_dim) - 1
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{at}self_attn.{name}.weight"] = new.norm(head_dim)
    if tied:
        del tensors["lm_head.weight"]
        tensors["model.embed_tokens.weight"] *= 3 / hidden_size**0.5
    return Checkpoint(config, tensors, Path("memory"))


def tiny_target(**options: Any) -> LlamaTarget:
    """`tiny_checkpoint` as a target."""
    return LlamaTarget(tiny_checkpoint(**options))


def tiny_head(kind: str, target: LlamaTarget, *, seed: int = 1, **options: Any) -> LoadedHead:
    """A random "eagle1" or "eagle3" head for `target`; options as for `random_heads.random_head`."""
    hidden, vocab = target.config["hidden_size"], target.config["vocab_size"]
    config, tensors = random_head(kind, hidden=hidden, vocab=vocab, dtype=target.dtype, seed=seed, **options)
    if kind == "eagle3":
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    # shorter than what is decoded: the engine must make a longer table
    config["max_position_embeddings"] = 32
    stored = target.checkpoint.tensors
    tensors["embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    return head_from_tensors(config, tensors, target_config=target.config, target_tensors=stored)


def target_and_perfect_head(
    kind: str = "eagle1", seed: int = 0, draft_vocab: int | None = None, **options: Any
) -> tuple[LlamaTarget, LoadedHead]:
    """A target whose logits depend on the last token alone, and a head with the very same logits, up to
    rounding.

    Both are their embedding and LM head; everything between is zero. The embedding's rows have a mean square
    of one, so that the target's final norm, which EAGLE-1 lacks, changes nothing. What an EAGLE-3 head knows
    of a token comes through its attention, so that there a row sees its own token alone.

    draft_vocab: an EAGLE-3 head that knows so many tokens; the target never takes another one.
    """
    checkpoint = tiny_checkpoint(seed=seed, **options)
    tensors = checkpoint.tensors
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1)
    embedding = tensors["model.embed_tokens.weight"]
    if draft_vocab:
        embedding[:, 0] = 2  # for the tokens that no head knows
    embedding /= embedding.square().mean(-1, keepdim=True).sqrt()
    head = tiny_head(kind, LlamaTarget(checkpoint), draft_vocab=draft_vocab)
    if draft_vocab:
        known, lm_head = head.draft_to_target.long(), tensors["lm_head.weight"]
        unknown = torch.ones(len(lm_head), dtype=torch.bool).index_fill_(0, known, False)
        lm_head[unknown] = 0
        lm_head[unknown, 0] = -100
        head.lm_head.copy_(lm_head[known])
    for layer in head.layers:
        layer.o_proj.zero_()
        layer.down_proj.zero_()
    size = head.hidden_size
    head.fc.zero_()
    if kind == "eagle1":
        head.fc[:, :size].fill_diagonal_(1)  # of (embedding, feature) the embedding
    else:
        head = _embedding_alone(head)
    return LlamaTarget(checkpoint), head


def _embedding_alone(head: LoadedHead) -> LoadedHead:
    """An EAGLE-3 head of one layer whose output is the embedding of a row's token, once its fc, o and down
    are zero."""
    (layer,), size = head.layers, head.hidden_size
    for gain in (layer.input_norm, head.norm):
        gain.fill_(1)
    layer.hidden_norm.zero_()  # with `norm_before_residual` the feature ends here
    for weight, value in ((layer.q_proj, 32), (layer.k_proj, 1), (layer.v_proj, 1)):
        weight.zero_()
        for rows in weight.split(head.head_dim):
            rows[:, :size].fill_diagonal_(value)  # scores so far apart that a row attends to its own token
    layer.o_proj[:, : head.head_dim].fill_diagonal_(1)
    return dataclasses.replace(head, norm_before_residual=True)


class ByteTokenizer:
    """Token i is byte i; ids from 256 on are special tokens. Bytes that make no character decode to
    U+FFFD."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        special = "" if skip_special_tokens else "<s>"
        pieces, run = [], bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
            else:
                pieces += [bytes(run).decode(errors="replace"), special]
                run.clear()
        return "".join(pieces) + bytes(run).decode(errors="replace")


class _Random:
    def __init__(self, seed: int, dtype: torch.dtype):
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=self._generator) * (gain / columns**0.5)).to(self._dtype)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(size, generator=self._generator)).to(self._dtype)


def _layer(
    new: _Random, at: str, hidden: int, inputs: int, heads: int, kv_heads: int, head_dim: int, inner: int
) -> dict[str, torch.Tensor]:
    # Gains at which greedy decoding keeps wandering: with all of them near 1 it soon repeats one token.
    return {
        f"{at}self_attn.q_proj.weight": new.matrix(heads * head_dim, inputs, gain=3.0),
        f"{at}self_attn.k_proj.weight": new.matrix(kv_heads * head_dim, inputs, gain=3.0),
        f"{at}self_attn.v_proj.weight": new.matrix(kv_heads * head_dim, inputs),
        f"{at}self_attn.o_proj.weight": new.matrix(hidden, heads * head_dim, gain=3.0),
        f"{at}mlp.gate_proj.weight": new.matrix(inner, hidden, gain=1.5),
        f"{at}mlp.up_proj.weight": new.matrix(inner, hidden),
        f"{at}mlp.down_proj.weight": new.matrix(hidden, inner, gain=3.0),
        f"{at}post_attention_layernorm.weight": new.norm(hidden),
    }
