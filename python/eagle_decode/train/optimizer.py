"""Optimiser, schedule and weight averaging of the recipe."""

from __future__ import annotations

import math

import torch
from torch import nn

from eagle_decode.train.head import EagleHead


class Optimizer:
    """Muon on the layer's matrices, AdamW on the output projection and the norms; or AdamW on all.

    Muon (Jordan et al. 2024) orthogonalises the update of each matrix; with its update rescaled to AdamW's
    size, one learning rate serves both.
    """

    def __init__(self, head: EagleHead, learning_rate: float, muon: bool):
        matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
        norms = [p for p in head.parameters() if p.ndim == 1]
        adam = [
            {
                "params": [head.lm_head.weight] if muon else [head.lm_head.weight, *matrices],
                "weight_decay": 0.01,
            },
            {"params": norms, "weight_decay": 0.0},
        ]
        self.parameters = list(head.parameters())
        self.learning_rate = learning_rate
        self.parts = [torch.optim.AdamW(adam, lr=learning_rate, betas=(0.9, 0.95), fused=True)]
        if muon:
            settings = {"lr": learning_rate, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
            self.parts.append(torch.optim.Muon(matrices, **settings))

    def step(self, factor: float) -> None:
        """One update at `factor` times the learning rate, gradients clipped to norm 1 and then cleared."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def learning_rate_factor(progress: float, step: int, warmup_steps: int = 50) -> float:
    """Linear warm-up, then a cosine from 1 to 0.01 over `progress` 0 to 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return min(1.0, (step + 1) / warmup_steps) * (0.01 + 0.99 * cosine)


class WeightAverage:
    """Exponential moving average of a head's parameters, updated every `every` steps.

    It is what gets evaluated and exported: with the learning rate still high it is far better than the last
    weights, and at the end of the schedule as good.
    """

    def __init__(self, head: EagleHead, decay: float = 0.97, every: int = 8):
        self.decay, self.every = decay, every
        self.values = [p.detach().clone() for p in head.parameters()]
        self.updates = 0

    @torch.no_grad()
    def update(self, head: EagleHead, step: int) -> None:
        if step % self.every:
            return
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 9))  # forget the start quickly
        torch._foreach_lerp_(self.values, [p.detach() for p in head.parameters()], 1 - decay)

    @torch.no_grad()
    def copy_to(self, head: EagleHead) -> None:
        for parameter, value in zip(head.parameters(), self.values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.values, self.updates = list(state["values"]), state["updates"]
