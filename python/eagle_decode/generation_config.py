"""How a checkpoint wants to be sampled: its generation_config.json, as SamplingParams."""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Any

from eagle_decode.sampling import SamplingParams

# transformers' name -> ours. Those of sampling count only beside do_sample, as they do there.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "suppress_tokens": "banned_tokens",
    "stop_strings": "stop",
}
# Settings that change tokens and are not implemented, with the values at which they change nothing. None,
# false and empty lists never do.
_UNKNOWN = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0, "typical_p": 1,
    "top_h": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "min_length": 0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "guidance_scale": 1,
    "bad_words_ids": None, "begin_suppress_tokens": None, "constraints": None, "dola_layers": None,
    "exponential_decay_length_penalty": None, "force_words_ids": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "sequence_bias": None, "watermarking_config": None,
}  # fmt: skip


def default_sampling(config: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams() with what `config`, a generation_config.json, sets. End ids are the model's own and
    no part of it; max_length, which counts the prompt too, is not taken.

    Warns of settings that would change tokens and are not implemented. Raises ValueError for values out of
    range.
    """
    given = {ours: config[name] for name, ours in _ALWAYS.items() if config.get(name) is not None}
    if config.get("do_sample"):
        given["temperature"] = 1.0
        given |= {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    least = given.get("min_new_tokens")
    if isinstance(least, int) and "max_new_tokens" not in given:  # our own default gives way
        given["max_new_tokens"] = max(SamplingParams().max_new_tokens, least)
    unknown = [
        f"{name} = {config[name]!r}"
        for name, neutral in _UNKNOWN.items()
        if config.get(name) and config[name] != neutral
    ]
    if unknown:
        warnings.warn(
            f"generation_config.json: {', '.join(unknown)}: not implemented, without effect",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None


def set_fields(params: SamplingParams, but: Container[str] = ()) -> str:
    """The fields that are not SamplingParams() own, but for some: "temperature 0.6, top_p 0.9"."""
    changed = [
        f"{field.name} {value}"
        for field in fields(params)
        if (value := getattr(params, field.name)) != field.default and field.name not in but
    ]
    return ", ".join(changed)
