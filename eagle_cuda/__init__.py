"""EAGLE speculative-decoding kernels: one typed function per op, tensors of any DLPack framework.

Frameworks other than torch and numpy pass `out=`. A wrong type is a TypeError, a wrong value a ValueError.

The ops are here by name (`eagle_cuda.linear(...)`); the module of a noun is reached by import
(`from eagle_cuda.linear import ...`).
"""

from __future__ import annotations

from typing import Any

from eagle_cuda._extension import _C
from eagle_cuda.attention import RopeTable, append_kv, rope_table, tree_attention
from eagle_cuda.draft import DraftHead, DraftLayer, draft, extend_draft
from eagle_cuda.kv_cache import KVCache, compact_kv
from eagle_cuda.linear import (
    PackedWeight,
    TopK,
    linear,
    lm_head_topk,
    pack_weight,
    rms_norm,
    unpack_weight,
)
from eagle_cuda.sampling import Sampled, SamplingState, gumbel_noise, sample_tokens
from eagle_cuda.tree import (
    MC_SIM_7B_63,
    Beam,
    Candidates,
    DraftTree,
    RetrieveIndices,
    TreeShape,
    build_tree,
    empty_candidates,
    empty_draft_tree,
    expand_tree,
    retrieve_indices,
    tree_from_parents,
)
from eagle_cuda.verify import Accepted, AcceptedByRejection, verify, verify_rejection

__version__ = "0.1.0"

__all__ = [
    "MC_SIM_7B_63",
    "Accepted",
    "AcceptedByRejection",
    "Beam",
    "Candidates",
    "DraftHead",
    "DraftLayer",
    "DraftTree",
    "KVCache",
    "PackedWeight",
    "RetrieveIndices",
    "RopeTable",
    "Sampled",
    "SamplingState",
    "TopK",
    "TreeShape",
    "append_kv",
    "build_info",
    "build_tree",
    "compact_kv",
    "cuda_available",
    "cuda_error",
    "draft",
    "empty_candidates",
    "empty_draft_tree",
    "expand_tree",
    "extend_draft",
    "gumbel_noise",
    "linear",
    "lm_head_topk",
    "num_threads",
    "pack_weight",
    "retrieve_indices",
    "rms_norm",
    "rope_table",
    "sample_tokens",
    "set_num_threads",
    "tree_attention",
    "tree_from_parents",
    "unpack_weight",
    "verify",
    "verify_rejection",
]


def build_info() -> dict[str, Any]:
    """What is in this build: version, compiler, CUDA backend or not, its toolkit and GPU architectures, CPU
    instruction set, threads. Asks no driver."""
    return _C.build_info()


def cuda_available() -> bool:
    """Whether ops on CUDA tensors can run on this machine. Starts the CUDA driver, as `cuda_error` does."""
    return cuda_error() == ""


def cuda_error() -> str:
    """Why no CUDA device can be used, in one line; empty where one can."""
    return _C.cuda_error()


def num_threads() -> int:
    """Threads that a CPU op may use. Results never depend on it."""
    return _C.num_threads()


def set_num_threads(n: int) -> None:
    """Sets the threads of the CPU backend: 1 to 256; default EAGLE_NUM_THREADS, else the process's cores."""
    _C.set_num_threads(n)
