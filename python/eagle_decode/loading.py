"""An engine from what a command line names: target, head, tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from eagle_cuda.tree import TreeShape


def head_folder(head: str) -> Path:
    """The folder that `head` means: `demo` is the head shipped with the package."""
    from eagle_decode.demo import HEAD

    return HEAD if head == "demo" else Path(head)


def named_shape(text: str) -> TreeShape:
    """The static tree that `text` means: `mc_sim_7b_63` (EAGLE-1's), `chain:5`, or a JSON file that lists the
    rank paths of its nodes: [[0], [1], [0, 0]]."""
    from eagle_cuda.tree import MC_SIM_7B_63, TreeShape

    if text == "mc_sim_7b_63":
        return MC_SIM_7B_63
    kind, _, length = text.partition(":")
    if kind == "chain" and length.isdecimal():
        return TreeShape.chain(int(length))
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tree_shape: expected mc_sim_7b_63, chain:N or a JSON file of paths, got {text:.80}: {error}"
        ) from None
    try:
        return TreeShape(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tree_shape: {text}: {error}") from None


class TreeOptions(NamedTuple):
    """What a command line says of the draft tree; None is not given. Dynamic trees have 6 nodes, 3 levels and
    a top-k of 3 by default."""

    nodes: int | None = None
    levels: int | None = None
    top_k: int | None = None
    shape: str | None = None

    def dynamic(self) -> tuple[int, int, int]:
        """nodes, levels, top-k."""
        given = zip(self[:3], (6, 3, 3), strict=True)
        nodes, levels, top_k = (default if value is None else value for value, default in given)
        return nodes, levels, top_k

    def of_engine(self) -> dict[str, Any]:
        """The Engine's arguments. Raises ValueError for a shape beside any of the others."""
        if self.shape is None:
            nodes, levels, top_k = self.dynamic()
            return {"levels": levels, "draft_top_k": top_k, "max_nodes": nodes}
        for name, value in (("nodes", self.nodes), ("levels", self.levels), ("top-k-draft", self.top_k)):
            if value is not None:
                raise ValueError(f"tree_shape: expected no --{name} beside it, got {value}")
        return {"tree_shape": named_shape(self.shape)}

    def __str__(self) -> str:
        if self.shape is not None:
            return f"trees of the shape {self.shape}"
        nodes, levels, top_k = self.dynamic()
        return f"trees of {nodes} nodes (levels {levels}, top-k {top_k})"


def open_engine(
    console: Console,
    target: str,
    head: str | None,
    *,
    head_format: str | None,
    dtype: str,
    tree: TreeOptions,
    max_batch: int,
) -> Any:
    """An engine over a target, its tokenizer and, if given, a head; the console shows what is being
    loaded."""
    of_tree = tree.of_engine()
    nodes, levels, _ = tree.dynamic()
    if head is not None and tree.shape is None and nodes <= levels:
        console.print(
            f"note: a tree of {nodes} nodes is at most {nodes - 1} levels deep; "
            f"--levels {levels} asks for more",
            style="dim",
            highlight=False,
        )
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
    with console.status(escape(f"loading {target}")) as status:
        import torch

        from eagle_decode.engine import Engine
        from eagle_decode.models.llama import load_target
        from eagle_decode.models.tokenizer import load_tokenizer

        loaded = load_target(target, getattr(torch, dtype))
        status.update(escape(f"loading the tokenizer of {target}"))
        tokenizer = load_tokenizer(target)
        status.update("preparing the engine")
        return Engine(
            loaded,
            None if head is None else head_folder(head),
            tokenizer,
            head_format=head_format,
            **of_tree,
            max_batch=max_batch,
        )
