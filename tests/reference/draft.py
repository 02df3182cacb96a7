"""Naive draft heads and dynamic trees, written from the papers (EAGLE-1 to EAGLE-3) and the comments of
draft.h. Works in the dtype it is given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.to(wide.dtype)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [rows, heads, D]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    angle = positions.double()[:, None, None] * frequency
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
    low, high = wide[..., :half], wide[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


@dataclass
class NaiveHead:
    """A head over (config, tensors by official name). `keys` and `values` hold the rows run so far, per
    layer."""

    kind: str
    config: dict
    tensors: dict[str, Tensor]
    dtype: torch.dtype = torch.float64
    target_lm_head: Tensor | None = None
    feedback_post_norm: bool = False
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def t(self, name: str) -> Tensor | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.to(self.dtype)

    def fork(self) -> NaiveHead:
        """The same head with a copy of the rows run so far."""
        return NaiveHead(
            self.kind, self.config, self.tensors, self.dtype, self.target_lm_head, self.feedback_post_norm,
            dict(self.keys), dict(self.values),
        )  # fmt: skip

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.t(name), self.config["rms_norm_eps"])

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [rows, F] -> what the head takes as hidden state."""
        features = features.to(self.dtype)
        if self.kind == "eagle1":
            return features
        if "fc_norm.0.weight" in self.tensors:
            parts = features.chunk(features.shape[-1] // self.t("fc_norm.0.weight").shape[0], -1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        fused = features @ self.t("fc.weight").T
        return fused if self.t("fc.bias") is None else fused + self.t("fc.bias")

    def attention(self, x: Tensor, at: str, layer: int, positions: Tensor, visible: Tensor) -> Tensor:
        config = self.config
        heads, kv_heads, width = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )

        def project(part: str, count: int) -> Tensor:
            y = x @ self.t(f"{at}self_attn.{part}_proj.weight").T
            bias = self.t(f"{at}self_attn.{part}_proj.bias")
            return (y if bias is None else y + bias).view(-1, count, width)

        q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
        if f"{at}self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{at}self_attn.q_norm.weight"), self.norm(k, f"{at}self_attn.k_norm.weight")
        theta = config["rope_theta"]
        q, k = rotate(q, positions, theta), rotate(k, positions, theta)
        if layer in self.keys:
            k, v = torch.cat([self.keys[layer], k]), torch.cat([self.values[layer], v])
        self.keys[layer], self.values[layer] = k, v
        repeat = heads // kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeat, 1)) / width**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (
            torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeat, 1)).flatten(1)
            @ self.t(f"{at}self_attn.o_proj.weight").T
        )

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """tokens [rows], hidden [rows, H], visible bool [rows, rows run so far + rows] -> g [rows, H]."""
        embedding = self.t("embed_tokens.weight")[tokens.long()]
        x = hidden
        for layer in range(self.config["num_hidden_layers"]):
            at = "midlayer." if self.kind == "eagle3" and layer == 0 else f"layers.{layer}."
            if self.kind == "eagle1" and layer == 0:
                x = torch.cat([embedding, hidden], -1) @ self.t("fc.weight").T
                x = x if self.t("fc.bias") is None else x + self.t("fc.bias")
                inner, residual = x, x
            elif layer == 0:
                normed = self.norm(hidden, at + "hidden_norm.weight")
                inner = torch.cat([self.norm(embedding, at + "input_layernorm.weight"), normed], -1)
                residual = normed if self.config.get("norm_before_residual") else hidden
            else:
                inner, residual = self.norm(x, at + "input_layernorm.weight"), x
            x = residual + self.attention(inner, at, layer, positions, visible)
            y = self.norm(x, at + "post_attention_layernorm.weight")
            gate, up = y @ self.t(at + "mlp.gate_proj.weight").T, y @ self.t(at + "mlp.up_proj.weight").T
            x = x + (torch.nn.functional.silu(gate) * up) @ self.t(at + "mlp.down_proj.weight").T
        return x

    def logits(self, g: Tensor) -> Tensor:
        if self.kind == "eagle1":
            return g @ self.target_lm_head.to(self.dtype).T
        return self.norm(g, "norm.weight") @ self.t("lm_head.weight").T

    def extend(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Committed pairs (feature i, token i + 1), behind those run before -> g [rows, H]."""
        before, rows = self.keys[0].shape[0] if self.keys else 0, len(tokens)
        visible = torch.ones(rows, before + rows, dtype=torch.bool).tril(before)
        return self.forward(tokens, self.fuse(features), torch.arange(before, before + rows), visible)

    def to_target(self, ids: Tensor) -> Tensor:
        return ids + self.tensors["d2t"][ids] if "d2t" in self.tensors else ids


def best(scores: Tensor, count: int) -> list[int]:
    """Indices of the largest scores; equal ones in ascending order of index."""
    return sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:count]


def log_probs(logits: Tensor, temperature: float, tau: float, noise: Tensor | None) -> Tensor:
    """Ranking and confidence of a row's draft tokens (docs/coupled_drafting.md)."""
    wide = logits.to(torch.float64)
    if noise is not None and temperature >= 1e-5:
        wide = (wide + temperature * noise) / tau
    return wide.log_softmax(-1)


def draft_tree(
    head: NaiveHead,
    g: Tensor,
    root: int,
    *,
    num_nodes: int,
    top_k: int,
    levels: int,
    temperature: float = 0.0,
    tau: float = 1.0,
    noise=None,
) -> dict[str, list]:
    """The dynamic tree behind the committed rows of `head` (left as they are), in candidate order.

    g: the head's output at the last committed row. noise(position, target ids) -> float64, for coupled
        ranking.
    Returns tokens, parents, depths, scores (root first), mask (rows of 0 / 1) and retrieve_indices.
    """
    head = head.fork()
    committed = head.keys[0].shape[0]

    def children(rows: Tensor, level: int) -> tuple[Tensor, Tensor]:
        logits = head.logits(rows)
        mapped = head.to_target(torch.arange(logits.shape[-1]))
        drawn = noise(committed + level, mapped) if noise else None
        lp = torch.stack([log_probs(row, temperature, tau, drawn) for row in logits])
        chosen = torch.tensor([best(row, top_k) for row in lp])
        return mapped[chosen], lp.gather(1, chosen)

    tokens, lp = children(g[None], 1)
    candidates = [
        (int(t), float(s), -1) for t, s in zip(tokens[0], lp[0], strict=True)
    ]  # token, score, parent
    beam = list(range(top_k))
    hidden = g[None].expand(top_k, -1)
    ancestors = {i: [] for i in beam}  # cache rows of the ancestors that were run
    for level in range(2, levels + 1):
        first_key = head.keys[0].shape[0]
        visible = torch.zeros(top_k, first_key + top_k, dtype=torch.bool)
        for row, candidate in enumerate(beam):
            visible[row, :committed] = True
            visible[row, [*ancestors[candidate], first_key + row]] = True
        if head.feedback_post_norm:
            hidden = head.norm(hidden, "norm.weight")
        beam_tokens = torch.tensor([candidates[i][0] for i in beam])
        out = head.forward(beam_tokens, hidden, torch.full((top_k,), committed + level - 2), visible)
        tokens, lp = children(out, level)
        first = len(candidates)
        for row, candidate in enumerate(beam):
            for t, s in zip(tokens[row], lp[row], strict=True):
                candidates.append((int(t), candidates[candidate][1] + float(s), candidate))
        chosen = best(torch.tensor([c[1] for c in candidates[first:]], dtype=torch.float64), top_k)
        for i in chosen:
            ancestors[first + i] = [*ancestors[beam[i // top_k]], first_key + i // top_k]
        beam, hidden = [first + i for i in chosen], out[[i // top_k for i in chosen]]

    return best_nodes(candidates, root, num_nodes)


def static_tree(
    head: NaiveHead,
    g: Tensor,
    root: int,
    paths,
    *,
    num_nodes: int | None = None,
    levels: int | None = None,
    temperature: float = 0.0,
    tau: float = 1.0,
    noise=None,
) -> dict[str, list]:
    """The tree of given rank paths (EAGLE-1), every node by a run of the head along its own path. As
    `draft_tree`; a node whose token is missing (score -inf) is left out with all below it."""
    order = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    output, heads, place = {(): g}, {(): head}, {(): -1}
    candidates = []  # token, score, parent
    for path in order:
        above = path[:-1]
        if above not in place or (levels is not None and len(path) > levels):
            continue
        if above not in output:
            fork, hidden = heads[above[:-1]].fork(), output[above[:-1]][None]
            if head.feedback_post_norm:
                hidden = head.norm(hidden, "norm.weight")
            at = fork.keys[0].shape[0]
            token = torch.tensor([candidates[place[above]][0]])
            visible = torch.ones(1, at + 1, dtype=torch.bool)
            output[above] = fork.forward(token, hidden, torch.tensor([at]), visible)[0]
            heads[above] = fork
        logits = head.logits(output[above][None])[0].nan_to_num(nan=float("-inf"))
        mapped = head.to_target(torch.arange(len(logits)))
        drawn = noise(head.keys[0].shape[0] + len(path), mapped) if noise else None
        lp = log_probs(logits, temperature, tau, drawn)
        child = best(lp, path[-1] + 1)[-1]
        if not lp[child] > float("-inf"):  # NaN too: no token is usable
            continue
        score = float(lp[child]) + (candidates[place[above]][1] if above else 0.0)
        place[path] = len(candidates)
        candidates.append((int(mapped[child]), score, place[above]))
    return best_nodes(candidates, root, len(candidates) + 1 if num_nodes is None else num_nodes)


def best_nodes(candidates: list[tuple[int, float, int]], root: int, num_nodes: int) -> dict[str, list]:
    """The best candidates (token, score, parent) under the root, in their order."""
    kept = sorted(best(torch.tensor([c[1] for c in candidates], dtype=torch.float64), num_nodes - 1))
    slot = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(kept)}
    parents = [-1] + [slot[candidates[i][2]] for i in kept]
    nodes = len(parents)
    mask = [[0] * nodes for _ in range(nodes)]
    for i in range(nodes):
        j = i
        while j >= 0:
            mask[i][j] = 1
            j = parents[j]
    depths = [sum(row) - 1 for row in mask]
    leaves = [i for i in range(nodes) if i not in parents]
    width = max(depths) + 1
    paths = [[j for j in range(nodes) if mask[leaf][j]] for leaf in leaves]
    return {
        "tokens": [root] + [candidates[i][0] for i in kept],
        "parents": parents,
        "depths": depths,
        "scores": [0.0] + [candidates[i][1] for i in kept],
        "mask": mask,
        "retrieve_indices": [path + [-1] * (width - len(path)) for path in paths],
    }
