"""The decoding loop: draft, target pass, sample, verify, compact. Models, heads and training live in
subpackages.

    engine = Engine(target, head, tokenizer)
    for result in engine.generate(["What is a tree?"], SamplingParams(temperature=0.7, seed=1)):
        print(result.text, result.metrics.tokens_per_cycle)
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "Engine": "engine",
    "SamplingParams": "sampling",
    "Result": "sequence",
    "Chunk": "sequence",
    "Stream": "stream",
    "Metrics": "metrics",
    "HeadDrafter": "drafting",
}

__all__ = ["Chunk", "Engine", "HeadDrafter", "Metrics", "Result", "SamplingParams", "Stream"]


def __getattr__(name: str) -> Any:
    # Imported when first used, so that training and checkpoint tools need neither the native module nor the
    # engine.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
