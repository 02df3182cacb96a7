"""draft: the draft head over committed tokens, and the whole draft phase in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from eagle_cuda._allocate import Workspaces, shape_of
from eagle_cuda._extension import _C
from eagle_cuda.kv_cache import refuse_scales
from eagle_cuda.linear import PackedWeight
from eagle_cuda.tree import DraftTree, TreeShape, empty_draft_tree, levels_of

if TYPE_CHECKING:
    from eagle_cuda.kv_cache import KVCache
    from eagle_cuda.verify import Accepted


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """One decoder layer of a head. Vectors have the head's dtype; a weight has its format or a quantised
    one."""

    qkv: PackedWeight  # [(Hq + 2 Hkv) D, 2H in EAGLE-3's first layer, else H]
    o: PackedWeight  # [H, Hq D]
    gate_up: PackedWeight  # [2I, H], packed with paired=True
    down: PackedWeight  # [H, I]
    post_norm: Tensor  # [H]
    input_norm: Tensor | None = None  # [H], over the embedding in EAGLE-3's first layer; None in EAGLE-1's
    hidden_norm: Tensor | None = None  # [H], EAGLE-3's first layer only
    qkv_bias: Tensor | None = None  # [(Hq + 2 Hkv) D]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]


class DraftHead(_C.DraftHead):
    """A draft head, checked once; keeps its tensors alive. `eagle_decode.heads` builds one from a checkpoint.

    EAGLE-1/2 (arXiv 2401.15077, 2406.16858): x = fc(embedding, feature), layers, logits = lm_head(x).
    EAGLE-3 (arXiv 2503.01840): f = fc(features) or the head's own output; layer 0 reads (norm(embedding),
    norm(f)); logits = lm_head(norm(x)).

    Attributes: kind, dtype, hidden_size (H), feature_size (F), num_heads (Hq), num_kv_heads (Hkv), head_dim
    (D), intermediate_size (I), vocab_size (V), draft_vocab_size (Vd), num_layers, max_positions. Its cache is
    one pair ``[num_pages, page_size, num_kv_heads, head_dim]`` of the head's dtype per layer.
    """

    def __init__(
        self,
        *,
        kind: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm_eps: float,
        embedding: Tensor,
        fc: PackedWeight,
        lm_head: PackedWeight,
        cos: Tensor,
        sin: Tensor,
        layers: Sequence[DraftLayer],
        norm: Tensor | None = None,
        fc_bias: Tensor | None = None,
        fc_norm: Tensor | None = None,
        draft_to_target: Tensor | None = None,
        feedback_post_norm: bool = False,
        norm_before_residual: bool = False,
        softmax_scale: float | None = None,
    ):
        """Checks every size and dtype against the others.

        Args:
            kind: ``"eagle1"`` (EAGLE-1 and EAGLE-2) or ``"eagle3"``.
            embedding: ``[V, H]`` float32, bfloat16 or float16: the head's dtype, which all other tensors,
                the activations and the cache share. A packed weight may be of any quantised format instead.
            fc: ``[H, 2H]`` in EAGLE-1, ``[H, F]`` in EAGLE-3.
            lm_head: ``[Vd, H]``.
            cos, sin: ``[max_positions, D/2]`` float32, from `eagle_cuda.attention.rope_table`; positions
                beyond share the last row.
            norm: ``[H]``, before the LM head; EAGLE-3 only.
            fc_bias: ``[H]``. fc_norm: ``[slices, F / slices]``, a norm per slice of the features (EAGLE-3.1).
            draft_to_target: ``[Vd]`` int32, strictly increasing target ids; None: identity.
            feedback_post_norm: The next level gets norm(x) instead of x (EAGLE-3.1).
            norm_before_residual: The residual of layer 0 is the normalised f.
            softmax_scale: Default ``head_dim ** -0.5``; given where heads are padded with zeros.

        Raises:
            ValueError: a tensor or number does not fit; the message names it.
        """
        tensors = {
            "embedding": embedding,
            "fc": fc,
            "lm_head": lm_head,
            "cos": cos,
            "sin": sin,
            "norm": norm,
            "fc_bias": fc_bias,
            "fc_norm": fc_norm,
            "draft_to_target": draft_to_target,
        }
        parts = [dict(layer.__dict__) for layer in layers]
        scale = 0.0 if softmax_scale is None else softmax_scale
        self._arguments = (
            kind, num_heads, num_kv_heads, head_dim, norm_eps, scale, feedback_post_norm,
            norm_before_residual, parts, tensors,
        )  # fmt: skip
        super().__init__(*self._arguments)


def extend_draft(
    head: DraftHead,
    features: Tensor,
    tokens: Tensor,
    row_offsets: Sequence[int],
    seq_lens: Tensor,
    caches: Sequence[KVCache],
    *,
    hidden: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor | None:
    """Runs the head over committed rows, any number per request, and fills its cache.

    Row i of a request pairs target feature i with the token that follows it, is written at
    row ``seq_lens + i`` and stands at that RoPE position. A prompt of n tokens has n - 1 such rows; the last
    feature and the first token chosen go to `draft`.

    Args:
        features: ``[T, F]`` in the head's dtype. EAGLE-1/2: the target's output after its final norm;
            EAGLE-3: the captured layers side by side.
        tokens: ``[T]`` int32; ids outside the vocabulary are clamped.
        row_offsets: B + 1 host integers; request b owns rows ``row_offsets[b]`` to ``row_offsets[b + 1]``.
        seq_lens: ``[B]`` int32, draft rows that are already in the cache.
        caches: One `KVCache` per layer of the head; all share the page table of the first.
        hidden: ``[T, H]``, receives the head's output before its final norm; without it the last layer stops
            at keys and values.
        workspace: None, or uint8 ``[extend_draft_workspace_bytes]`` on the head's device, used by one call at
            a time. None takes one that is kept for each device and stream and grows as needed: give your own
            where a CUDA graph captures the call, so that its memory lives as long as the graph.

    Returns: `hidden`.
    Raises: ValueError, naming the argument.
    """
    refuse_scales(*caches)
    if workspace is None and _on_cuda(features):
        workspace = _workspaces.of(features, extend_draft_workspace_bytes(head, row_offsets, caches))
    _C.extend_draft(head, features, tokens, row_offsets, seq_lens, *_parts(caches), hidden, workspace)
    return hidden


def draft(
    head: DraftHead,
    features: Tensor,
    target_tokens: Tensor,
    accepted: Accepted,
    seq_lens: Tensor,
    caches: Sequence[KVCache],
    *,
    max_nodes: int | None = None,
    top_k: int | None = None,
    levels: int | None = None,
    shape: TreeShape | None = None,
    node_limit: Tensor | None = None,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    tau: float = 1.0,
    order: str = "path",
    out: DraftTree | None = None,
    workspace: Tensor | None = None,
) -> DraftTree:
    """The draft phase: extends the cache along the accepted path, grows `levels` levels by top-k, or the
    nodes of a static tree, keeps the best nodes.

    EAGLE-2's dynamic tree (arXiv 2406.16858, section 4), or with `shape` EAGLE-1's static one (arXiv
    2401.15077, appendix A), over either kind of head. The root of the new tree is
    ``target_tokens[b, path[num_accepted]]``. With `temperature`, candidates are ranked with the
    target's own noise (docs/coupled_drafting.md): it changes what is proposed, never what comes out.

    Args:
        features: ``[B, Nf, F]`` of the nodes that were verified, in the head's dtype; any strides for B and
            Nf.
        target_tokens: ``[B, Nf]`` int32, the target's token after each of them.
        accepted: ``path [B, P]`` and ``num_accepted [B]`` as from `verify`; num_accepted < 0: the request is
            absent.
        seq_lens: ``[B]`` int32, committed rows *before* the path was accepted.
        caches: One `KVCache` per layer of the head, with room for ``num_accepted + 1 + (levels - 1) * top_k``
            more rows; rows without room are not written.
        max_nodes: Width N of the tree, root included, 1 to 256; taken from `out` when that is given; default
            with a shape: its nodes and the root.
        top_k: Children looked at per node and nodes expanded per level, 1 to 32, at most the draft
            vocabulary. Taken from `shape`.
        levels: Depth of the deepest node, 1 to 31 (more with top_k = 1); at most 8192 candidates
            ``top_k + (levels - 1) * top_k**2``. With a shape: how many of its levels are grown, by default
            all.
        shape: A static tree: all its nodes that the head can give a token are proposed; where `max_nodes` or
            `node_limit` is smaller, the best of them. None: dynamic.
        node_limit: ``[B]`` int32, nodes wanted per request, at most N.
        temperature, seeds: ``[B]`` float32 and int64, the request's sampling parameters; None: uncoupled.
        tau: > 0, softens the confidence of coupled candidates (useful: 1 to 1.5).
        order: ``"path"`` or ``"candidate"``, see `build_tree`.
        out: A `DraftTree` of width N; allocated when omitted.
        workspace: As in `extend_draft`, of `draft_workspace_bytes`.

    Raises: ValueError, naming the argument.
    """
    levels = levels_of(levels, shape)
    if top_k is None:
        if shape is None:
            raise ValueError("top_k: expected a number where no shape is given, got None")
        top_k = shape.top_k
    if out is None:
        if max_nodes is None and shape is not None:
            max_nodes = shape.num_nodes + 1
        if max_nodes is None:
            raise ValueError("max_nodes: expected a number when out is not given, got None")
        out = empty_draft_tree(shape_of("features", features, 3)[0], max_nodes, like=features)
    elif max_nodes is not None and (nodes := shape_of("tree.tokens", out.tokens, 2)[1]) != max_nodes:
        raise ValueError(f"tree.tokens: expected {max_nodes} nodes (max_nodes), got {nodes}")
    refuse_scales(*caches)
    if workspace is None and _on_cuda(features):
        rows = shape_of("path", accepted.path, 2)
        workspace = _workspaces.of(features, draft_workspace_bytes(head, *rows, top_k, levels, caches))
    _C.draft(
        head, features, target_tokens, accepted.path, accepted.num_accepted, seq_lens, node_limit,
        temperature, seeds, tau, top_k, levels, order, *_parts(caches), out.tokens, out.parents, out.depths,
        out.mask, out.scores, out.num_nodes, out.first_child, out.next_sibling, shape, workspace,
    )  # fmt: skip
    return out


def extend_draft_workspace_bytes(
    head: DraftHead, row_offsets: Sequence[int], caches: Sequence[KVCache]
) -> int:
    """Bytes of the workspace of `extend_draft` for these rows on the head's device; 0 on the CPU."""
    return _C.extend_draft_workspace_bytes(head, row_offsets, *_parts(caches))


def draft_workspace_bytes(
    head: DraftHead, batch_size: int, max_path: int, top_k: int, levels: int, caches: Sequence[KVCache]
) -> int:
    """Bytes of the workspace of `draft` on the head's device, for paths ``[batch_size, max_path]``; 0 on the
    CPU."""
    return _C.draft_workspace_bytes(head, batch_size, max_path, top_k, levels, *_parts(caches))


def _parts(caches: Sequence[KVCache]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    table = getattr(caches[0], "page_table", None) if caches else None
    return [c.k for c in caches], [c.v for c in caches], table


_workspaces = Workspaces()


def _on_cuda(features: Tensor) -> bool:
    return isinstance(features, Tensor) and features.is_cuda
