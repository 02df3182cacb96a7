"""Settings that the tensors do not show: RoPE, feature layers, what is fed back. Each comes with its
decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle_decode.heads.target import Target

Note = Callable[[str, str, str], None]  # what, decision, why

SUPPORTED_SCALING = ("linear", "llama3", "yarn")


def option(config: Mapping[str, Any], key: str) -> Any:
    """A setting of the head, at the top level or inside `eagle_config`."""
    nested = config.get("eagle_config")
    if key not in config and isinstance(nested, Mapping):
        return nested.get(key)
    return config.get(key)


def refuse_foreign(config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError for formats that are known and not supported here."""
    foreign = None
    if config.get("speculators_model_type"):
        foreign = f"a speculators checkpoint ({config['speculators_model_type']})"
    elif any("kv_a_proj" in name or "kv_b_proj" in name for name in names):
        foreign = "a head with multi-head latent attention"
    elif config.get("quantization_config") or any(name.endswith((".qweight", ".scales")) for name in names):
        foreign = "a quantised head"
    elif any(".experts." in name for name in names):
        foreign = "a head with experts"
    elif any("medusa" in name.lower() for name in names):
        foreign = "a Medusa head"
    elif int(option(config, "parallel_draft_step") or 1) > 1:
        foreign = "a parallel-drafting head"
    elif option(config, "use_aux_hidden_state") is False and config.get("eagle_config"):
        foreign = "an EAGLE-3 head over the final hidden state (use_aux_hidden_state is false)"
    if foreign:
        raise ValueError(
            f"head: {foreign} is not supported; supported: EAGLE-1/2 and EAGLE-3 in the official layout, "
            "SpecForge EAGLE-3"
        )


def rope(
    config: Mapping[str, Any], target: Target, override: float | None, note: Note
) -> tuple[float, dict[str, Any] | None, int]:
    """(theta, scaling or None, positions). From the head's own configuration: a head may differ from its
    target."""
    nested = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    inner, outer = nested.pop("rope_theta", None), config.get("rope_theta")
    if override is not None:
        theta, why = override, "rope_theta= was given"
    elif inner is not None:
        theta, why = (
            inner,
            "nested beside the scaling" + (f"; top level says {outer}" if outer not in (None, inner) else ""),
        )
    elif outer is not None:
        theta, why = outer, "rope_theta of the head's config"
    else:
        theta, why = 10000.0, "the head's config has no rope_theta"
        if target.get("rope_theta") not in (None, 10000.0):
            why += f"; the target's {target.get('rope_theta')} is not used: override with rope_theta="
    note("rope theta", f"{float(theta):g}", why)

    kind = nested.pop("rope_type", None) or nested.get("type") or "default"
    nested.pop("type", None)
    scaling = None
    if kind == "mrope" or (kind == "default" and "mrope_section" in nested):
        note("rope scaling", "none", "mrope equals plain RoPE for text")
    elif kind == "default":
        note("rope scaling", "none", "the head's config has none")
    elif kind in SUPPORTED_SCALING:
        scaling = {"rope_type": kind, **nested}
        if kind == "yarn":
            scaling.setdefault(
                "original_max_position_embeddings", config.get("max_position_embeddings", 2048)
            )
        note("rope scaling", kind, f"the head's config: {scaling}")
    else:
        raise ValueError(f"head: rope_scaling: expected one of {', '.join(SUPPORTED_SCALING)}, got {kind}")

    own, theirs = (
        int(config.get("max_position_embeddings") or 0),
        int(target.get("max_position_embeddings") or 0),
    )
    positions = max(own, theirs) or 2048
    note(
        "positions",
        str(positions),
        f"the larger of the head's {own or 'none'} and the target's {theirs or 'none'}",
    )
    return float(theta), scaling, positions


def feature_layers(
    config: Mapping[str, Any], target: Target, num_aux: int, override: Sequence[int] | None, note: Note
) -> tuple[int, ...] | None:
    """Target layers whose input is captured. Files name them by two conventions, told apart by where the ids
    stand."""
    key, layers = "eagle_aux_hidden_state_layer_ids", target.get("num_hidden_layers")
    nested = (config.get("eagle_config") or {}).get(key)
    top = config.get(key)
    if override is not None:
        ids, why = list(override), "feature_layers= was given"
    elif nested is not None and top is not None and [i + 1 for i in nested] != list(top):
        raise ValueError(
            f"head: {key}: eagle_config has {nested} (outputs of layers), the top level {top} (inputs): "
            "they disagree; pass feature_layers="
        )
    elif nested is not None:
        ids, why = [i + 1 for i in nested], f"eagle_config names the outputs of layers {nested}"
    elif top is not None:
        ids, why = list(top), "the top level of the config names the inputs of layers"
    elif layers is None:
        note(
            "feature layers",
            "unknown",
            "the config names none, and the target's number of layers was not given",
        )
        return None
    elif num_aux != 3:
        raise ValueError(
            f"head: fc reads {num_aux} feature layers, which the config does not name; pass feature_layers="
        )
    else:
        ids, why = [2, layers // 2, layers - 3], f"default for {layers} target layers: the config names none"
    if len(ids) != num_aux:
        raise ValueError(f"head: feature layers: fc reads {num_aux}, got {ids}")
    last = layers if layers is not None else max(ids)
    if len(set(ids)) != len(ids) or sorted(ids) != ids or min(ids) < 0 or max(ids) > last:
        raise ValueError(
            f"head: feature layers: expected {num_aux} ascending ids of layer inputs in [0, {last}], "
            f"got {ids} ({why})"
        )
    note("feature layers", f"inputs of {ids}", why)
    return tuple(ids)


def feedback_post_norm(config: Mapping[str, Any], feedback: str, note: Note) -> bool:
    """Whether the next level gets norm(g) instead of g. Code bases read `norm_output` differently."""
    if feedback not in ("auto", "pre", "post"):
        raise ValueError(f"head: feedback: expected auto, pre or post, got {feedback!r}")
    stored = option(config, "norm_output")
    if feedback != "auto":
        post, why = (
            feedback == "post",
            f"feedback={feedback!r} was given; norm_output in the config: {stored}",
        )
    elif stored:
        post, why = (
            True,
            "norm_output is true; serving engines read it so, SpecForge trains otherwise: feedback=",
        )
    else:
        post, why = False, f"norm_output in the config: {stored}"
    note("feedback", "post-norm" if post else "pre-norm", why)
    return post
