"""A compact EAGLE-3 training recipe in plain torch. `train(target, out, minutes=...)` is the whole of it."""

from __future__ import annotations

from eagle_decode.train.recipe import train
from eagle_decode.train.trainer import Settings

__all__ = ["Settings", "train"]
