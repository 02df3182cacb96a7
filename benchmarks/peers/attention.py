"""What tree_attention is compared with: torch's SDPA and FlexAttention, and FlashInfer, on the same inputs.

Every peer offers variants; the benchmark checks each, and lets the fastest stand for the peer. SDPA and
FlexAttention read no pages: they get keys and values gathered beforehand into [B, Hkv, keys, D], which costs
them nothing here. FlashInfer (written against 0.6.18) reads the same pages as we do. Masks, plans and
compilation are made beforehand.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from attention_cases import SHAPES, Case, additive, mask_mod, packed_bits, visible
from gpu_arms import Variant, Variants
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from eagle_cuda.kv_cache import KVCache
from eagle_cuda.tree import DraftTree

FLASHINFER_WORKSPACE = 512 * 2**20
FLEX_BLOCK = 128


class Inputs(NamedTuple):
    case: Case
    tree: DraftTree
    q: torch.Tensor  # [B, N, Hq, D]
    seq_lens: torch.Tensor
    caches: list[KVCache]  # paged, one a tensor set; all share one page table
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # the same keys and values, [B, Hkv, context + N, D]


def sdpa(inputs: Inputs) -> Variants:
    """scaled_dot_product_attention, the query heads of a KV head folded into rows, so that each key need be
    read once only; the mask as an additive one of the queries' type."""
    shape, (batch, nodes, _, dim) = SHAPES[inputs.case.shape], inputs.q.shape
    grouped = (batch, shape.kv_heads, shape.group * nodes, dim)
    folded = inputs.q.view(batch, nodes, shape.kv_heads, shape.group, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(grouped).contiguous()

    def view(out: torch.Tensor) -> torch.Tensor:
        parts = out.view(batch, shape.kv_heads, shape.group, nodes, dim).permute(0, 3, 1, 2, 4)
        return parts.reshape(inputs.q.shape)

    def variant(backend: SDPBackend | None, masked: bool) -> Variant:
        seen = visible(inputs.tree.mask, inputs.case.context)
        bias = additive(seen, shape.group, inputs.q.dtype) if masked else None

        def call(i: int) -> torch.Tensor:
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                k, v = inputs.dense[i]
                return torch.nn.functional.scaled_dot_product_attention(folded, k, v, attn_mask=bias)

        return Variant(call, view)

    if inputs.q.device.type != "cuda":
        return {"as torch chooses": lambda: variant(None, True)}
    found: Variants = {
        "efficient": lambda: variant(SDPBackend.EFFICIENT_ATTENTION, True),
        "cuDNN": lambda: variant(SDPBackend.CUDNN_ATTENTION, True),
    }
    if nodes == 1:  # sees every key
        found["flash, no mask"] = lambda: variant(SDPBackend.FLASH_ATTENTION, False)
        found["cuDNN, no mask"] = lambda: variant(SDPBackend.CUDNN_ATTENTION, False)
    return found


def prefix_blocks(mask: torch.Tensor, context: int) -> BlockMask:
    """Which blocks of keys FlexAttention visits, and that those of the prefix alone need no mask.

    create_block_mask would call every block of fewer than 128 queries a partial one, to be masked."""
    batch, nodes, _ = mask.shape
    total, full = -(-(context + nodes) // FLEX_BLOCK), context // FLEX_BLOCK
    order = torch.arange(total, dtype=torch.int32, device=mask.device).expand(batch, 1, 1, total)

    def count(blocks: int) -> torch.Tensor:
        return torch.full((batch, 1, 1), blocks, dtype=torch.int32, device=mask.device)

    return BlockMask.from_kv_blocks(
        count(total - full), order.roll(-full, -1).contiguous(), count(full), order.contiguous(),
        BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod(mask, context), seq_lengths=(nodes, context + nodes),
    )  # fmt: skip


def flex(inputs: Inputs) -> Variants:
    """FlexAttention, compiled for the shape with autotuning."""
    q = inputs.q.transpose(1, 2).contiguous()
    _, heads, nodes, _ = q.shape
    on_gpu = q.device.type == "cuda"

    def variant(options: dict[str, bool] | None) -> Variant:
        blocks = prefix_blocks(inputs.tree.mask, inputs.case.context)
        attend = flex_attention
        if on_gpu:
            # Every shape is compiled for itself, none given up on; graphs of shapes before it keep theirs.
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
            attend = torch.compile(
                flex_attention, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs"
            )
        grouped = heads != inputs.dense[0][0].shape[1]

        def call(i: int) -> torch.Tensor:
            k, v = inputs.dense[i]
            return attend(q, k, v, block_mask=blocks, enable_gqa=grouped, kernel_options=options)

        return Variant(call, lambda out: out.transpose(1, 2))

    if not on_gpu:
        return {"eager": lambda: variant(None)}
    found: Variants = {"compiled": lambda: variant(None)}
    if nodes >= 32:  # where the kernel for few queries, which "compiled" may be, need not be the best
        found["compiled, prefill"] = lambda: variant({"FORCE_USE_FLEX_ATTENTION": True})
    return found


def flashinfer(inputs: Inputs) -> Variants:
    """Paged prefill with the tree as a packed custom mask; for one query also without a mask, and decode."""
    module = importlib.import_module("flashinfer")
    shape, (batch, nodes, heads, dim) = SHAPES[inputs.case.shape], inputs.q.shape
    device, page_size = inputs.q.device, inputs.caches[0].k.shape[1]
    keys = inputs.case.context + nodes
    pages = -(-keys // page_size)
    rows = inputs.q.view(batch * nodes, heads, dim)

    def steps(size: int) -> torch.Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * size

    page_indices = inputs.caches[0].page_table[:, :pages].contiguous().view(-1)
    last_page = torch.full((batch,), keys - (pages - 1) * page_size, dtype=torch.int32, device=device)
    types = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.q.dtype}

    def workspace() -> torch.Tensor:
        return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)

    def variant(wrapper) -> Variant:
        out = torch.empty_like(rows)
        return Variant(
            lambda i: wrapper.run(rows, (inputs.caches[i].k, inputs.caches[i].v), out=out),
            lambda result: result.view(inputs.q.shape),
        )

    def prefill(masked: bool) -> Variant:
        mask = None
        if masked:
            # As bools: given packed bits, 0.6.18 takes the offsets of the requests behind the first one in
            # bits, but uses them as bytes. It packs by itself in `plan`.
            seen = visible(inputs.tree.mask, inputs.case.context)
            mask = seen.flatten()
            bits, _ = module.segment_packbits(mask, steps(nodes * keys), bitorder="little")
            if not torch.equal(bits, packed_bits(seen)):
                raise ValueError("FlashInfer packs the mask in another way than this benchmark expects")
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
        wrapper.plan(
            steps(nodes), steps(pages), page_indices, last_page, heads, shape.kv_heads, dim, page_size,
            custom_mask=mask, causal=False, **types,
        )  # fmt: skip
        return variant(wrapper)

    def decode() -> Variant:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
        wrapper.plan(
            steps(pages), page_indices, last_page, heads, shape.kv_heads, dim, page_size, **types
        )  # fmt: skip
        return variant(wrapper)

    found: Variants = {"prefill, custom mask": lambda: prefill(True)}
    if nodes == 1:
        found["prefill, no mask"] = lambda: prefill(False)
        found["decode"] = decode
    return found


PEERS: dict[str, Callable[[Inputs], Variants]] = {
    "SDPA": sdpa,
    "FlexAttention": flex,
    "FlashInfer": flashinfer,
}


def versions() -> dict[str, str]:
    """Each peer's version, or why it is absent."""
    found = {"SDPA": f"torch {torch.__version__}", "FlexAttention": f"torch {torch.__version__}"}
    if torch.cuda.is_available():  # what FlashInfer compiles for
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    try:
        found["FlashInfer"] = importlib.import_module("flashinfer").__version__
    except Exception as error:  # an installed package may fail in many ways to load
        found["FlashInfer"] = f"absent: {type(error).__name__}: {error}"
    try:
        found["Triton"] = importlib.import_module("triton").__version__
    except ImportError as error:
        found["FlexAttention"] = f"absent: it needs Triton to be compiled: {error}"
    return found
