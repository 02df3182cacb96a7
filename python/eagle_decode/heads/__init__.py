"""Draft-head checkpoints: EAGLE-1, EAGLE-2 and EAGLE-3 heads read into one form.

head = load_head("path/to/head", target_config=target.config, target_tensors=target.tensors)
for decision in head.report:
    print(decision.what, decision.decision, decision.why)
draft_head = head.to_draft_head(torch.bfloat16)       # an eagle_cuda.DraftHead
"""

from __future__ import annotations

from eagle_decode.heads.load import head_from_tensors, inspect_head, load_head
from eagle_decode.heads.loaded import Decision, HeadLayer, LoadedHead

__all__ = ["Decision", "HeadLayer", "LoadedHead", "head_from_tensors", "inspect_head", "load_head"]
