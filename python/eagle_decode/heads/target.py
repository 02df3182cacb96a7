"""What a head borrows from its target: embedding and LM head, found by name in the target's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def borrowed_shapes(config: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Embedding and LM head of an unknown target as a head's configuration implies them: shapes without
    values (meta tensors), to inspect a head whose target is not at hand. None if it does not say."""
    rows, width = config.get("vocab_size"), config.get("target_hidden_size") or config.get("hidden_size")
    if not (isinstance(rows, int) and isinstance(width, int) and rows > 0 and width > 0):
        return None
    names = ("embed_tokens.weight", "lm_head.weight")
    return {name: torch.empty(rows, width, dtype=torch.bfloat16, device="meta") for name in names}


class Target:
    """The target's configuration and tensors, both optional until something is needed."""

    def __init__(self, config: Mapping[str, Any] | None, tensors: Mapping[str, Tensor] | None):
        self.config = dict(config or {})
        for nested in (
            "text_config",
            "llm_config",
        ):  # multimodal wrappers keep the language model's numbers inside
            if isinstance(self.config.get(nested), Mapping):
                self.config = {**self.config, **self.config[nested]}
        self._tensors = tensors

    def get(self, key: str) -> Any:
        """A number of the target's configuration, or None."""
        return self.config.get(key)

    def embedding(self) -> tuple[str, Tensor]:
        """(name, [V, Ht])."""
        return self._find("embed_tokens.weight", "embedding")

    def lm_head(self) -> tuple[str, Tensor]:
        """(name, [V, Ht]); the embedding where the target ties the two."""
        tied = self._tensors is not None and not self._names("lm_head.weight")
        if tied and self.get("tie_word_embeddings"):
            return self.embedding()
        return self._find("lm_head.weight", "LM head")

    def _names(self, suffix: str) -> list[str]:
        return [name for name in self._tensors or () if name == suffix or name.endswith("." + suffix)]

    def _find(self, suffix: str, what: str) -> tuple[str, Tensor]:
        if self._tensors is None:
            raise ValueError(
                f"head: {suffix} is not in the checkpoint and must come from the target: pass target_tensors"
            )
        names = self._names(suffix)
        if len(names) != 1:
            raise ValueError(
                f"head: target's {what}: expected one tensor named *{suffix}, found {names or 'none'}"
            )
        tensor = self._tensors[names[0]]
        if str(tensor.dtype) not in FLOAT_DTYPES or tensor.dim() != 2:
            raise ValueError(
                f"head: target's {names[0]}: expected an unquantised float matrix, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        return names[0], tensor
