"""A tiny random model and a head for it, saved as a user's would be."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from random_heads import random_head

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folders(folder: Path) -> tuple[str, str]:
    """A Llama with a tokenizer of bytes, and an EAGLE-3 head for it."""
    target, head = folder / "target", folder / "head"
    target.mkdir()
    head.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    wrapped.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    wrapped.save_pretrained(target)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=wrapped.eos_token_id,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)

    settings, tensors = random_head(hidden=64, heads=2, kv_heads=1, vocab=258)
    settings |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (head / "config.json").write_text(json.dumps(settings))
    save_file(tensors, head / "model.safetensors")
    return str(target), str(head)
