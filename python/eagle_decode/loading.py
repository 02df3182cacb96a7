"""An engine from what a command line names: target, head, tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console


def head_folder(head: str) -> Path:
    """The folder that `head` means: `demo` is the head shipped with the package."""
    from eagle_decode.demo import HEAD

    return HEAD if head == "demo" else Path(head)


def open_engine(
    console: Console,
    target: str,
    head: str | None,
    *,
    head_format: str | None,
    dtype: str,
    nodes: int,
    levels: int,
    top_k_draft: int,
    max_batch: int,
) -> Any:
    """An engine over a target, its tokenizer and, if given, a head; the console shows what is being
    loaded."""
    if head is not None and nodes <= levels:
        console.print(
            f"note: a tree of {nodes} nodes is at most {nodes - 1} levels deep; "
            f"--levels {levels} asks for more",
            style="dim",
            highlight=False,
        )
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
    with console.status(f"loading {target}") as status:
        import torch

        from eagle_decode.engine import Engine
        from eagle_decode.models.llama import load_target
        from eagle_decode.models.tokenizer import load_tokenizer

        loaded = load_target(target, getattr(torch, dtype))
        status.update(f"loading the tokenizer of {target}")
        tokenizer = load_tokenizer(target)
        status.update("preparing the engine")
        return Engine(
            loaded,
            None if head is None else head_folder(head),
            tokenizer,
            head_format=head_format,
            levels=levels,
            draft_top_k=top_k_draft,
            max_nodes=nodes,
            max_batch=max_batch,
        )
