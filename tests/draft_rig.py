"""A random head beside its naive twin, with caches that play the part of a running batch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from eagle_cuda.draft import DraftHead, draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.tree import DraftTree
from eagle_decode.heads import head_from_tensors
from random_heads import random_head, random_target
from reference.draft import NaiveHead
from reference.linear import dequantize

# kind, random_head's options, then settings of the configuration and of the loader; "weights": their format
HEADS = [
    ("eagle1", {"fc_bias": True, "qkv_bias": True}),
    ("eagle3", {"draft_vocab": 40}),
    ("eagle3", {"draft_vocab": 40, "fc_norm": True, "target_hidden": 24, "feedback": "post"}),
    ("eagle3", {"qk_norm": True, "layers": 2, "fc_bias": True, "norm_before_residual": True}),
    ("eagle3", {"heads": 3, "kv_heads": 1, "head_dim": 80, "hidden": 40, "inner": 56, "qkv_bias": True}),
    ("eagle1", {"heads": 6, "kv_heads": 6, "head_dim": 16, "layers": 2, "hidden": 46}),
]


def trees_of(tree: DraftTree) -> list[dict]:
    """Each request's tree as plain lists; checks what tree.h says of the slots that are not used."""
    trees = []
    for b in range(tree.tokens.shape[0]):
        n = int(tree.num_nodes[b])
        unused = {
            "tokens": 0,
            "parents": -2,
            "depths": 0,
            "mask": 0,
            "scores": 0.0,
            "first_child": -1,
            "next_sibling": -1,
        }
        for name, value in unused.items():
            assert bool((getattr(tree, name)[b, n:] == value).all()), name
        columns = torch.arange(n)
        mask = (tree.mask[b, :n].long()[:, columns // 32] >> columns % 32 & 1).tolist()
        plain = {
            name: getattr(tree, name)[b, :n].tolist() for name in ("tokens", "parents", "depths", "scores")
        }
        trees.append(plain | {"mask": mask})
    return trees


def accepted(counts: Tensor) -> SimpleNamespace:
    """Acceptance of the root alone (count 0), or absence (-1)."""
    return SimpleNamespace(path=torch.zeros(len(counts), 1, dtype=torch.int32), num_accepted=counts)


class Rig:
    """`history[b]`: (features, tokens) of all pairs that request b has committed. `lengths`: rows in its
    cache.
    """

    def __init__(self, head: DraftHead, batch: int = 1, capacity: int = 128, paged: int = 0, spare: int = 0):
        self.head, self.batch, self.capacity = head, batch, capacity
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            head.dtype
        ]
        self.random = torch.Generator().manual_seed(1)
        page = paged or capacity
        pages = batch * -(-capacity // page) + spare
        shape = (pages, page, head.num_kv_heads, head.head_dim)
        table = None
        if paged:  # pages in no order, the spare ones anywhere among them
            order = torch.randperm(pages, generator=self.random)[: pages - spare]
            table = order.int().view(batch, -1).contiguous()

        def new() -> Tensor:
            return torch.randn(shape, generator=self.random).to(self.dtype)

        self.caches = [KVCache(new(), new(), table) for _ in range(head.num_layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int32)
        self.history: list[tuple[Tensor, Tensor]] = [
            (torch.zeros(0, head.feature_size, dtype=self.dtype), torch.zeros(0, dtype=torch.int32))
        ] * batch

    @classmethod
    def random(cls, case, dtype: torch.dtype, *, seed: int = 0, peaked: bool = False, **options) -> Rig:
        kind, settings = case
        settings = dict(settings)
        feedback = settings.pop("feedback", "auto")
        extra = {"norm_before_residual": settings.pop("norm_before_residual", False)}
        flat = settings.pop("flat", False)
        weights = settings.pop("weights", None)
        config, tensors = random_head(kind, dtype=dtype, seed=seed, **settings)
        config |= extra
        if flat:
            tensors["lm_head.weight"].zero_()
        if peaked and "lm_head.weight" in tensors:
            tensors["lm_head.weight"] *= 4
        hidden = settings.get("target_hidden", config["hidden_size"])
        target_config, target_tensors = random_target(hidden=hidden, vocab=config["vocab_size"], dtype=dtype)
        loaded = head_from_tensors(
            config, tensors, target_config=target_config, target_tensors=target_tensors, feedback=feedback
        )
        rig = cls(loaded.with_weights(weights).to_draft_head(dtype), **options)
        if weights:  # what the naive head multiplies with
            tensors |= {
                name: dequantize(tensor, weights)
                for name, tensor in tensors.items()
                if name in ("fc.weight", "lm_head.weight") or name.endswith("_proj.weight")
            }
            target_tensors = {"lm_head.weight": dequantize(target_tensors["lm_head.weight"], weights)}
        rig.kind, rig.config, rig.tensors, rig.feedback = kind, config, tensors, feedback == "post"
        rig.target_lm_head = target_tensors["lm_head.weight"]
        return rig

    def naive(self, dtype: torch.dtype) -> NaiveHead:
        return NaiveHead(self.kind, self.config, self.tensors, dtype, self.target_lm_head, self.feedback)

    def rows_of(self, request: int) -> Tensor:
        """[rows, 2]: page and place in it of a request's cache rows."""
        table = self.caches[0].page_table
        page = self.caches[0].k.shape[1]
        pages = [request] if table is None else table[request].tolist()
        return torch.tensor([(p, i) for p in pages for i in range(page)])

    # ---- inputs

    def features(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.head.feature_size, generator=self.random).to(self.dtype)

    def pairs(self, count: int) -> tuple[Tensor, Tensor]:
        return self.features(count), torch.randint(0, 96, (count,), generator=self.random).int()

    def fill(self, lengths, seeds=None) -> tuple[Tensor, Tensor]:
        """Prompts of so many pairs; the last pair of each is returned, [B, F] and [B], for `draft_rows`."""
        last = []
        for b, length in enumerate(lengths):
            if seeds is not None:
                self.random.manual_seed(100 + seeds[b])
            features, tokens = self.pairs(length)
            self.prompt(b, features[:-1], tokens[:-1])
            last.append((features[-1], tokens[-1]))
        return torch.stack([f for f, _ in last]), torch.stack([t for _, t in last])

    def next_rows(self) -> tuple[Tensor, Tensor]:
        return self.pairs(self.batch)

    # ---- ops

    def prompt(self, request: int, features: Tensor, tokens: Tensor) -> Tensor:
        """Extends one request's cache; returns the head's output."""
        offsets = [0] * (request + 1) + [len(tokens)] * (self.batch - request)
        hidden = self.extend(features, tokens, offsets)
        known, follow = self.history[request]
        self.history[request] = torch.cat([known, features]), torch.cat([follow, tokens])
        self.lengths[request] += len(tokens)
        return hidden

    def extend(self, features: Tensor, tokens: Tensor, offsets: list[int]) -> Tensor:
        hidden = torch.empty(len(tokens), self.head.hidden_size, dtype=self.dtype)
        return extend_draft(self.head, features, tokens, offsets, self.lengths, self.caches, hidden=hidden)

    def draft(self, features: Tensor, targets: Tensor, where, *, again: bool = False, **options) -> DraftTree:
        """One cycle; `again`: the same one as before, so nothing is committed."""
        if again:
            return draft(self.head, features, targets, where, self.before, self.caches, **options)
        self.before = self.lengths.clone()
        tree = draft(self.head, features, targets, where, self.before, self.caches, **options)
        for b, count in enumerate(where.num_accepted.tolist()):
            nodes = where.path[b, : count + 1].long()
            known, follow = self.history[b]
            self.history[b] = torch.cat([known, features[b, nodes]]), torch.cat([follow, targets[b, nodes]])
            self.lengths[b] += count + 1
        return tree

    def draft_rows(self, features: Tensor, tokens: Tensor, **options) -> DraftTree:
        """A cycle in which every request accepts its root alone: one more pair each."""
        counts = torch.zeros(self.batch, dtype=torch.int32)
        return self.draft(features[:, None], tokens[:, None], accepted(counts), **options)

    def draft_last(self, feature: Tensor, token: Tensor, **options) -> DraftTree:
        return self.draft_rows(feature[None], token[None], **options)
