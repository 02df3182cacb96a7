"""Reads a draft head: detects its format from the tensors first and the configuration second, and checks
every one.

Supported: the official EAGLE-1/2 and EAGLE-3 layouts and SpecForge's EAGLE-3 with
its 3.1 norms. A missing, unexpected or misshapen tensor is a ValueError that names it; nothing is ever filled
in at random.
Methods: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_decode.heads import settings
from eagle_decode.heads.detect import Detection
from eagle_decode.heads.files import read_files, strip_prefixes
from eagle_decode.heads.loaded import HeadLayer, LoadedHead
from eagle_decode.heads.target import Target, borrowed_shapes
from eagle_decode.heads.vocabulary import draft_to_target


def load_head(
    path: str | Path,
    *,
    target_config: Mapping[str, Any] | None = None,
    target_tensors: Mapping[str, Tensor] | None = None,
    feedback: str = "auto",
    rope_theta: float | None = None,
    feature_layers: Sequence[int] | None = None,
    weight_format: str | None = None,
) -> LoadedHead:
    """Reads the head in folder `path` (config.json beside model.safetensors or pytorch_model.bin, sharded or
    not).

    target_config, target_tensors: the target's configuration (Hugging Face keys) and tensors by name. They
        supply what the checkpoint leaves out: embedding, LM head, number of layers, vocabulary size, context
            length.
    feedback: "pre" or "post" overrides what the next level is given, the layer's output or its norm
    (EAGLE-3.1). rope_theta, feature_layers (ids of target layers whose input is captured): override the
    configuration.
    weight_format: "fp8", "int8", "int4" or "int8_dynamic" quantises the weights when the head is packed
        (`LoadedHead.with_weights`).

    Raises FileNotFoundError, or ValueError for another format or a damaged checkpoint.
    """
    config, tensors, source = read_files(path)
    return head_from_tensors(
        config,
        tensors,
        target_config=target_config,
        target_tensors=target_tensors,
        feedback=feedback,
        rope_theta=rope_theta,
        feature_layers=feature_layers,
        source=source,
        weight_format=weight_format,
    )


def inspect_head(
    path: str | Path,
    *,
    target_config: Mapping[str, Any] | None = None,
    target_tensors: Mapping[str, Tensor] | None = None,
) -> LoadedHead:
    """As `load_head`, for its sizes and `report`: without target_tensors, what the head would borrow from its
    target has shapes and no values."""
    config, tensors, source = read_files(path)
    return head_from_tensors(
        config,
        tensors,
        target_config=target_config,
        target_tensors=borrowed_shapes(config) if target_tensors is None else target_tensors,
        source=source,
    )


def head_from_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    target_config: Mapping[str, Any] | None = None,
    target_tensors: Mapping[str, Tensor] | None = None,
    feedback: str = "auto",
    rope_theta: float | None = None,
    feature_layers: Sequence[int] | None = None,
    source: str = "memory",
    weight_format: str | None = None,
) -> LoadedHead:
    """The same for a configuration and tensors that are already in memory, under the names of a
    checkpoint."""
    reading = _Reading(config, strip_prefixes(dict(tensors)), Target(target_config, target_tensors))
    reading.note("files", source, "safetensors are preferred to pytorch_model.bin")
    reading.detect(list(tensors))
    return reading.head(feedback, rope_theta, feature_layers).with_weights(weight_format)


class _Reading(Detection):
    """Takes every tensor of a detected checkpoint."""

    def layer(self, i: int) -> HeadLayer:
        H, inner, D = self.hidden, self.intermediate, self.head_dim
        q, kv = self.num_heads * D, self.num_kv_heads * D
        joined = self.kind == "eagle3" and i == 0
        width = 2 * H if joined else H
        at = f"layers.{i}."
        attention = at + "self_attn."
        # A bias or a norm that is stored is applied; one that the config promises must be stored.
        stored = {part for part in "qkv" if f"{attention}{part}_proj.bias" in self.tensors}
        promised = any(settings.option(self.config, key) for key in ("qkv_bias", "attention_bias"))
        normed = {part for part in "qk" if f"{attention}{part}_norm.weight" in self.tensors}
        return HeadLayer(
            q_proj=self.take(attention + "q_proj.weight", q, width),
            k_proj=self.take(attention + "k_proj.weight", kv, width),
            v_proj=self.take(attention + "v_proj.weight", kv, width),
            o_proj=self.take(attention + "o_proj.weight", H, q),
            gate_proj=self.take(at + "mlp.gate_proj.weight", inner, H),
            up_proj=self.take(at + "mlp.up_proj.weight", inner, H),
            down_proj=self.take(at + "mlp.down_proj.weight", H, inner),
            post_norm=self.take(at + "post_attention_layernorm.weight", H),
            input_norm=None
            if self.kind == "eagle1" and i == 0
            else self.take(at + "input_layernorm.weight", H),
            hidden_norm=self.take(at + "hidden_norm.weight", H) if joined else None,
            q_bias=self.take(attention + "q_proj.bias", q, optional=not (stored or promised)),
            k_bias=self.take(attention + "k_proj.bias", kv, optional=not (stored or promised)),
            v_bias=self.take(attention + "v_proj.bias", kv, optional=not (stored or promised)),
            q_norm=self.take(attention + "q_norm.weight", D, optional=not normed),
            k_norm=self.take(attention + "k_norm.weight", D, optional=not normed),
        )

    def embedding(self) -> Tensor:
        tensor = self.take("embed_tokens.weight", -1, self.hidden, optional=True)
        if tensor is not None:
            self.note("embedding", "the head's own", "embed_tokens.weight is stored")
        elif not self.misshapen:
            name, tensor = self.target.embedding()
            if tensor.shape[1] != self.hidden:
                raise ValueError(
                    f"head: missing tensor embed_tokens.weight: the head is {self.hidden} wide and the "
                    f"target's {name} {tensor.shape[1]}, so it cannot be shared"
                )
            self.note("embedding", f"the target's {name}", "embed_tokens.weight is not stored")
        else:
            self.finish()
        wanted = {"head's config": self.number("vocab_size"), "target": self.target.get("vocab_size")}
        for whose, size in wanted.items():
            if size and tensor.shape[0] < size:
                raise ValueError(
                    f"head: the embedding has {tensor.shape[0]} rows, but the {whose} has vocab_size {size}"
                )
        # Ids that may be proposed; embedding rows beyond are padding.
        self.vocab = min(size for size in (*wanted.values(), tensor.shape[0]) if size)
        if tensor.shape[0] != self.vocab:
            self.note(
                "vocabulary", str(self.vocab), f"the embedding's {tensor.shape[0]} rows include padding"
            )
        return tensor

    def lm_head(self) -> tuple[Tensor, Tensor | None]:
        """(LM head [Vd, H], absolute target ids [Vd] or None)."""
        d2t, t2d = self.tensors.get("d2t"), self.tensors.get("t2d")
        self.unread -= {"d2t", "t2d"} if self.kind == "eagle3" else set()
        own = self.take("lm_head.weight", -1, self.hidden, optional=True)
        self.finish()  # before the target is asked for what may merely be misshapen
        if self.kind == "eagle1":
            d2t = t2d = None
        declared = settings.option(self.config, "draft_vocab_size") if self.kind == "eagle3" else None
        size = int(declared or (len(d2t) if d2t is not None and d2t.dim() == 1 else 0)) or None
        if own is not None:
            tensor, name, why = own, "the head's own", "lm_head.weight is stored"
        else:
            name, tensor = self.target.lm_head()
            name, why = f"the target's {name}", "lm_head.weight is not stored"
            if tensor.shape[1] != self.hidden:
                raise ValueError(
                    f"head: missing tensor lm_head.weight: the head is {self.hidden} wide and {name} "
                    f"{tensor.shape[1]}"
                )
            size = size if d2t is not None else self.vocab
        size = size or min(tensor.shape[0], self.vocab)
        if tensor.shape[0] < size and (own is not None or d2t is None):
            raise ValueError(f"head: lm_head has {tensor.shape[0]} rows, but the draft vocabulary is {size}")
        ids, decision, reason = draft_to_target(d2t, t2d, size, self.vocab)
        if own is None and ids is not None:
            if int(ids[-1]) >= tensor.shape[0]:
                raise ValueError(
                    f"head: {name} has {tensor.shape[0]} rows, but d2t reaches id {int(ids[-1])}"
                )
            tensor, why = tensor[ids.long()], why + "; its rows of the draft vocabulary"
        elif tensor.shape[0] > size:
            why += f"; its last {tensor.shape[0] - size} rows are padding"
            tensor = tensor[:size]
        self.note("LM head", name, why)
        self.note_stop_tokens(ids)
        told = "" if declared else "; the config has no draft_vocab_size"
        self.note("draft vocabulary", f"{size} of {self.vocab}, map: {decision}", reason + told)
        return tensor, ids

    def note_stop_tokens(self, ids: Tensor | None) -> None:
        """A stop token outside the draft vocabulary is never proposed: harmless, but it costs a cycle."""
        stop = self.target.get("eos_token_id")
        stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
        absent = [token for token in stop if ids is not None and not bool((ids == token).any())]
        if absent:
            self.note("stop tokens", f"{absent} never proposed", "they are not in the draft vocabulary")

    def fc_bias(self) -> Tensor | None:
        """Bias of fc. EAGLE-1's code adds one unless the config says no; what counts is whether it is
        stored."""
        bias = self.take(
            "fc.bias", self.hidden, optional=self.config.get("bias") is not True or self.kind != "eagle1"
        )
        told = f"config's bias: {self.config.get('bias')}"
        self.note(
            "fc bias",
            "none" if bias is None else "applied",
            f"fc.bias is {'not ' if bias is None else ''}stored; {told}",
        )
        return bias

    def fc_norm(self) -> Tensor | None:
        """EAGLE-3.1's norm of each captured layer, [num_aux, Ht]."""
        names = [f"fc_norm.{i}.weight" for i in range(self.num_aux)]
        promised = any(settings.option(self.config, key) for key in ("fc_norm", "use_aux_norm"))
        stored = any(name.startswith("fc_norm.") for name in self.tensors)
        if self.kind == "eagle1" or not (stored or promised):
            return None
        norms = [self.take(name, self.target_hidden) for name in names]
        self.note("fc_norm", "applied", "fc_norm.* are stored: EAGLE-3.1")
        return (
            None
            if any(norm is None for norm in norms)
            else torch.stack([norm.to(norms[0].dtype) for norm in norms])
        )

    def head(self, feedback: str, theta: float | None, layer_ids: Sequence[int] | None) -> LoadedHead:
        """Takes every tensor, then builds the head."""
        fc = self.take(
            "fc.weight", self.hidden, 2 * self.hidden if self.kind == "eagle1" else self.feature_size
        )
        fc_bias, fc_norm = self.fc_bias(), self.fc_norm()
        norm = self.take("norm.weight", self.hidden) if self.kind == "eagle3" else None
        layers = tuple(self.layer(i) for i in range(self.num_layers))
        biases = {name.split(".")[-2] for name in self.tensors if name.endswith("_proj.bias")}
        norms = any(layer.q_norm is not None for layer in layers)
        self.note(
            "attention",
            f"bias on: {', '.join(sorted(biases)) or 'none'}; qk-norm: {norms}",
            "what is stored is applied",
        )
        embedding = self.embedding()
        lm_head, ids = self.lm_head()

        residual = bool(settings.option(self.config, "norm_before_residual")) and self.kind == "eagle3"
        self.note(
            "residual",
            "normalised" if residual else "plain",
            f"norm_before_residual in the config: {residual}",
        )
        post = self.kind == "eagle3" and settings.feedback_post_norm(self.config, feedback, self.note)
        if self.kind == "eagle1" and feedback == "post":
            raise ValueError("head: feedback='post': an EAGLE-1/2 head has no norm before the LM head")
        rope_theta, scaling, positions = settings.rope(self.config, self.target, theta, self.note)
        captured: tuple[int, ...] | None = ()
        if self.kind == "eagle3":
            captured = settings.feature_layers(self.config, self.target, self.num_aux, layer_ids, self.note)
        eps = float(self.config.get("rms_norm_eps", 1e-6))
        self.note(
            "norm eps",
            f"{eps:g}",
            "the config" if "rms_norm_eps" in self.config else "not in the config: Llama's default",
        )
        dtypes = sorted(
            {str(t.dtype).removeprefix("torch.") for t in self.tensors.values() if t.is_floating_point()}
        )
        self.note(
            "dtype",
            ", ".join(dtypes),
            f"as stored; torch_dtype in the config: {self.config.get('torch_dtype')}",
        )
        return LoadedHead(
            kind=self.kind,
            hidden_size=self.hidden,
            target_hidden_size=self.target_hidden,
            feature_size=self.feature_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=embedding.shape[0],
            draft_vocab_size=lm_head.shape[0],
            norm_eps=eps,
            rope_theta=rope_theta,
            rope_scaling=scaling,
            max_positions=positions,
            feature_layers=captured,
            feedback_post_norm=post,
            norm_before_residual=residual,
            dtype=fc.dtype,
            embedding=embedding,
            fc=fc,
            fc_bias=fc_bias,
            fc_norm=fc_norm,
            norm=norm,
            lm_head=lm_head,
            draft_to_target=ids,
            layers=layers,
            report=self.report,
        )
