"""The EAGLE-3 draft head in torch: the unrolled pass that trains it and the step-by-step pass that uses it.

A head reads the target's hidden states at three layers and the token that follows, and predicts the token
after that:

    f = fc(cat(low, mid, high))                             position t, entering layers 2, L/2, L-3
    x = cat(norm(embed(token t+1)), norm(f))                -> one decoder layer with 2H-wide q, k, v
    g = layer output;  logits = lm_head(norm(g))            -> token t+2, over the draft vocabulary
    next level: f = g (no fc), token = the one just drafted

Parameter names are the tensor names of the exported file. Method: EAGLE-3 (Li et al., arXiv 2503.01840),
whose training-time test feeds the head its own output during training.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head. `feature_layers` are the target layers whose *input* is read."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    feature_layers: tuple[int, ...]
    max_position_embeddings: int = 2048
    target_model_type: str = "llama"

    @classmethod
    def for_target(cls, config: dict, draft_vocab_size: int, feature_layers: tuple[int, ...] | None = None):
        """A head as wide as the target. Feature layers default to 2, L // 2 and L - 3."""
        layers = config["num_hidden_layers"]
        chosen = tuple(feature_layers or (2, layers // 2, layers - 3))
        if len(set(chosen)) != len(chosen) or min(chosen) < 0 or max(chosen) >= layers:
            raise ValueError(f"feature_layers: expected distinct layers below {layers}, got {list(chosen)}")
        if not 0 < draft_vocab_size <= config["vocab_size"]:
            raise ValueError(
                f"draft_vocab_size: expected 1 to {config['vocab_size']}, got {draft_vocab_size}"
            )
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            feature_layers=chosen,
            max_position_embeddings=config["max_position_embeddings"],
            target_model_type=config["model_type"],
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of the layer; q, k and v read the 2H-wide concatenation of embedding and feature."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        width, hidden = config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The head's one decoder layer."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[..., H], [..., H] -> [..., 2H], the input of q, k and v."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP: [B, R, H], [B, R, heads * head_dim] -> [B, R, H]."""
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """EAGLE-3 draft head.

    Buffers: `feature_scale` [F] multiplies the features before fc while training (folded into fc at export: a
    target's residual stream has dimensions hundreds of times louder than others); `draft_ids` [Vd] int64, the
    target's id of each draft id, ascending.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.feature_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("feature_scale", torch.ones(self.fc.in_features))
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inverse_frequency", config.rope_theta**-exponent, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., F] -> [..., H]."""
        return self.fc(features * self.feature_scale.to(features.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Layer output [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.norm(hidden))

    def _split(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """[B, R, heads * D] -> [B, heads, R, D], rotated to `positions` [B or 1, R] unless None."""
        x = x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)
        if positions is None:
            return x
        angle = positions[:, None, :, None].float() * self.inverse_frequency
        cos, sin = (
            torch.cat([angle, angle], -1).cos().to(x.dtype),
            torch.cat([angle, angle], -1).sin().to(x.dtype),
        )
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def unroll(
        self, embeddings: Tensor, features: Tensor, rows: Tensor, rows_per_step: list[int]
    ) -> list[Tensor]:
        """The training-time test: the head's output at several levels of drafting, for many start positions
        at once.

        embeddings: [B, S + steps, H], of the tokens that follow: entry t belongs to token t + 1.
        features: [B, S, F], of the target at positions 0 to S - 1.
        rows: int64 [B, R], start positions t; level i starts from the first `rows_per_step[i]` of them
        (non-increasing). Returns one [B, rows_per_step[i], H] a level: level i at row t predicts token t + 2
        + i.

        A row at level i attends to the level-0 keys at positions <= t and to its own keys of levels 1 to i,
        which is exactly what drafting sees after the prefix up to t + 1 was committed.
        """
        attention, batch = self.midlayer.self_attn, rows.shape[0]
        kv_heads, width = self.config.num_key_value_heads, self.config.head_dim
        groups = self.config.num_attention_heads // kv_heads
        length = features.shape[1]
        fused = self.fuse(features)
        positions = torch.arange(length, device=rows.device)
        joined = self.midlayer.join(embeddings[:, :length], fused)
        prefix_keys = self._split(attention.k_proj(joined), positions[None])
        prefix_values = self._split(attention.v_proj(joined), None)
        visible = torch.zeros(batch, rows.shape[1], length, device=rows.device)
        visible.masked_fill_(positions > rows[..., None], float("-inf"))

        def at_rows(x: Tensor, index: Tensor) -> Tensor:
            return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))

        outputs, own_keys, own_values = [], [], []
        hidden = at_rows(fused, rows[:, : rows_per_step[0]])
        for level, count in enumerate(rows_per_step):
            hidden, index = hidden[:, :count], rows[:, :count]
            if level == 0:
                joined = at_rows(joined, index)
            else:
                joined = self.midlayer.join(at_rows(embeddings, index + level), hidden)
                own_keys.append(self._split(attention.k_proj(joined), index + level))
                own_values.append(self._split(attention.v_proj(joined), None))
            queries = self._split(attention.q_proj(joined), index + level)
            queries = queries.reshape(batch, kv_heads, groups * count, width)
            scores = torch.matmul(queries, prefix_keys.transpose(-1, -2)).float() / math.sqrt(width)
            scores = scores.view(batch, kv_heads, groups, count, length) + visible[:, None, None, :count]
            grouped = queries.view(batch, kv_heads, groups, count, width)
            own = [(grouped * k[:, :, None, :count]).sum(-1).float() / math.sqrt(width) for k in own_keys]
            weights = torch.cat([scores, torch.stack(own, -1)], -1) if own else scores
            weights = weights.softmax(-1).to(queries.dtype)
            prefix = weights[..., :length].reshape(batch, kv_heads, groups * count, length)
            attended = torch.matmul(prefix, prefix_values).view(batch, kv_heads, groups, count, width)
            for i, values in enumerate(own_values):
                attended = attended + weights[..., length + i, None] * values[:, :, None, :count]
            attended = attended.permute(0, 3, 1, 2, 4).reshape(batch, count, -1)
            hidden = self.midlayer.finish(hidden, attended)
            outputs.append(hidden)
        return outputs

    def step(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, cache: tuple | None, mask: Tensor | None
    ):
        """One pass as drafting does it.

        embeddings, hidden: [B, Q, H]; positions: [B or 1, Q]; cache: (keys, values), each [B, kv heads, T,
        D], or None; mask: bool, broadcastable to [B, 1, Q, T + Q], or None where a single row sees
        everything. Returns (output [B, Q, H], the extended cache).
        """
        attention = self.midlayer.self_attn
        joined = self.midlayer.join(embeddings, hidden)
        queries = self._split(attention.q_proj(joined), positions)
        keys = self._split(attention.k_proj(joined), positions)
        values = self._split(attention.v_proj(joined), None)
        if cache is not None:
            keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(*hidden.shape[:2], -1)
        return self.midlayer.finish(hidden, attended), (keys, values)


def warm_start(
    head: EagleHead, lm_head: Tensor, final_norm: Tensor, draft_ids: Tensor, feature_rms: Tensor
) -> None:
    """Starts a head from its target: output rows and final norm copied, features brought to unit size.

    lm_head: the target's [V, H]; final_norm: [H]; draft_ids: ascending int64 [Vd]; feature_rms: [F].
    The norm is copied at a fifth of its size, so that training starts from soft rather than confidently wrong
    guesses.
    """
    with torch.no_grad():
        head.draft_ids.copy_(draft_ids)
        head.lm_head.weight.copy_(lm_head[draft_ids.to(lm_head.device)])
        head.norm.weight.copy_(0.2 * final_norm)
        head.feature_scale.copy_(1.0 / feature_rms.clamp(min=1e-6))


def rescale_features(head: EagleHead, feature_rms: Tensor) -> None:
    """Splits the scale of the features out of fc again, leaving what the head computes unchanged (for
    `init`).
    """
    with torch.no_grad():
        scale = 1.0 / feature_rms.clamp(min=1e-6)
        head.fc.weight.mul_(head.feature_scale / scale)
        head.feature_scale.copy_(scale)


def change_vocabulary(head: EagleHead, lm_head: Tensor, draft_ids: Tensor) -> EagleHead:
    """A copy of the head for the draft vocabulary `draft_ids`, ascending int64 [Vd].

    lm_head: the target's [V, H]. Tokens that the head knew keep their output rows. Rows of the others are
    those of the target under the linear map that takes the target's rows to the head's best (least squares):
    of tokens that it was not fitted to, it predicts the direction well (cosine 0.94 for the packaged head).
    """
    config = dataclasses.replace(head.config, draft_vocab_size=len(draft_ids))
    changed = EagleHead(config)
    with torch.no_grad():
        known, size = lm_head[head.draft_ids].double(), config.hidden_size
        ridge = torch.eye(size, dtype=torch.float64) * known.square().mean()
        rows = head.lm_head.weight.double()
        linear_map = torch.linalg.solve(known.T @ known + ridge, known.T @ rows)
        everything = lm_head.double() @ linear_map
        everything[head.draft_ids] = rows
        state = {**head.state_dict(), "draft_ids": draft_ids, "lm_head.weight": everything[draft_ids].float()}
        changed.load_state_dict(state)
    return changed
