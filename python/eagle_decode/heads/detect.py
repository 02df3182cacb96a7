"""What a checkpoint is: kind and sizes, from the tensors first and the configuration second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from eagle_decode.heads import settings
from eagle_decode.heads.loaded import Decision
from eagle_decode.heads.target import FLOAT_DTYPES, Target

_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class Detection:
    """One checkpoint while it is read: its kind and sizes, what was taken, wrong and decided."""

    def __init__(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target):
        self.config, self.tensors, self.target = config, tensors, target
        self.report: list[Decision] = []
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self.unread = {name for name in tensors if not name.endswith(_IGNORED)}

    def note(self, what: str, decision: str, why: str) -> None:
        self.report.append(Decision(what, decision, why))

    # ---- tensors

    def take(self, name: str, *shape: int, optional: bool = False) -> Tensor | None:
        """The tensor `name`, expected to be of `shape` (-1: any size). Faults are collected, so that all are
        named."""
        self.unread.discard(name)
        tensor = self.tensors.get(name)
        if tensor is None:
            if not optional:
                self.missing.append(name)
            return None
        fits = tensor.dim() == len(shape) and all(
            want in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits or str(tensor.dtype) not in FLOAT_DTYPES:
            wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
            self.misshapen.append(
                f"{name} (expected float [{wanted}], got {tensor.dtype} {list(tensor.shape)})"
            )
            return None
        return tensor

    def number(self, key: str) -> int | None:
        value = self.config.get(key)
        return None if value is None else int(value)

    def finish(self) -> None:
        """Raises ValueError that names every missing, unexpected and misshapen tensor."""
        faults = [
            ("missing", self.missing),
            ("misshapen", self.misshapen),
            ("unexpected", sorted(self.unread)),
        ]
        text = "; ".join(f"{what} tensors: {', '.join(names)}" for what, names in faults if names)
        if text:
            raise ValueError(f"head: {text} (read as {self.kind})")

    # ---- detection

    def detect(self, stored_names: Sequence[str]) -> None:
        """Sets `kind` and the sizes, from names and shapes."""
        names = self.tensors
        settings.refuse_foreign(self.config, list(names))
        fc = names.get("fc.weight")
        columns = fc.shape[1] / fc.shape[0] if fc is not None and fc.dim() == 2 and fc.shape[0] else 0
        official = any("midlayer." in name for name in stored_names)
        if official or "layers.0.hidden_norm.weight" in names:
            self.kind, why = "eagle3", "midlayer.*" if official else "layers.0.hidden_norm.weight"
        elif "d2t" in names and "norm.weight" in names:
            self.kind, why = "eagle3", "d2t beside norm.weight"
        elif columns == 2 and "layers.0.input_layernorm.weight" not in names:
            self.kind, why = "eagle1", "fc.weight is [H, 2H] and layer 0 has no input norm"
        else:
            first = ", ".join(list(stored_names)[:6]) or "none"
            raise ValueError(
                f"head: unknown layout: neither EAGLE-3 (midlayer.* or layers.0.hidden_norm) nor EAGLE-1/2 "
                f"(fc.weight [H, 2H], layers.0 without input norm); first tensors: {first}"
            )
        self.note("kind", "EAGLE-3" if self.kind == "eagle3" else "EAGLE-1/2", why)
        spec_forge = bool(self.config.get("eagle_config")) or any("fc_norm" in name for name in names)
        form = (
            "A (official EAGLE-1/2)"
            if self.kind == "eagle1"
            else "C (SpecForge)"
            if spec_forge
            else "B (official EAGLE-3)"
        )
        self.note("format", form, f"architectures: {self.config.get('architectures')}")
        if self.config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(f"head: hidden_act: expected silu, got {self.config['hidden_act']}")

        # Sizes, from shapes; the configuration must agree where it speaks.
        first = "layers.0."
        shaping = ["fc.weight", first + "self_attn.q_proj.weight", first + "self_attn.k_proj.weight"]
        shaping.append(first + "mlp.gate_proj.weight")
        for name in shaping:
            self.take(name, -1, -1)
        if self.missing or self.misshapen:
            self.unread.clear()  # what else belongs here is not known yet
            self.finish()
        fc, q, k, gate = (names[name] for name in shaping)
        self.hidden, self.intermediate = fc.shape[0], gate.shape[0]
        self.agree("hidden_size", self.hidden, "rows of fc.weight")
        self.agree("intermediate_size", self.intermediate, "rows of gate_proj")
        self.detect_heads(q.shape[0], k.shape[0])
        self.detect_features(fc.shape[1])
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("layers."))
        self.note("layers", str(self.num_layers), "layers among the tensors")

    def agree(self, key: str, got: int, why: str) -> None:
        if self.number(key) not in (None, got):
            raise ValueError(f"head: {key}: the config says {self.number(key)}, the tensors {got}: {why}")
        self.note(key, str(got), why)

    def detect_heads(self, q_rows: int, k_rows: int) -> None:
        heads, width = self.number("num_attention_heads"), self.number("head_dim")
        if width:
            why = "head_dim of the config"
        elif heads:
            width, why = (
                q_rows // heads,
                f"q_proj has {q_rows} rows for {heads} heads; the config has no head_dim",
            )
        else:
            raise ValueError("head: the config has neither head_dim nor num_attention_heads")
        if q_rows % width or k_rows % width or (q_rows // width) % (k_rows // width or 1):
            raise ValueError(
                f"head: head_dim {width} ({why}) does not divide q_proj's {q_rows} and k_proj's {k_rows} rows"
            )
        self.head_dim, self.num_heads, self.num_kv_heads = width, q_rows // width, k_rows // width
        self.note("head_dim", str(width), why)
        self.agree("num_attention_heads", self.num_heads, f"q_proj has {q_rows} rows and head_dim is {width}")
        if self.number("num_key_value_heads") not in (None, self.num_kv_heads):
            stored = self.number("num_key_value_heads")
            raise ValueError(
                f"head: num_key_value_heads: the config says {stored}, but k_proj has {self.num_kv_heads}"
            )

    def detect_features(self, columns: int) -> None:
        own, theirs = self.number("target_hidden_size"), self.target.get("hidden_size")
        if None not in (own, theirs) and own != theirs:
            raise ValueError(
                f"head: target_hidden_size: the config says {own}, but the target's hidden_size is {theirs}"
            )
        self.target_hidden = own or theirs or self.hidden
        if self.kind == "eagle1":
            if self.target_hidden != self.hidden:
                raise ValueError(
                    f"head: EAGLE-1/2 head of width {self.hidden} for a target of width {self.target_hidden}"
                )
            self.feature_size, self.num_aux = self.hidden, 1
            if columns != 2 * self.hidden:
                raise ValueError(
                    f"head: fc.weight: expected [{self.hidden}, {2 * self.hidden}], got {columns} columns"
                )
            self.note(
                "features", f"{self.hidden} wide", "EAGLE-1/2: the target's output after its final norm"
            )
            return
        if columns == 0 or columns % self.target_hidden:
            raise ValueError(
                f"head: fc.weight has {columns} columns, not a multiple of the target's hidden size "
                f"{self.target_hidden}"
            )
        self.feature_size, self.num_aux = columns, columns // self.target_hidden
        self.note(
            "features", f"{self.num_aux} x {self.target_hidden} wide", f"fc.weight has {columns} columns"
        )
