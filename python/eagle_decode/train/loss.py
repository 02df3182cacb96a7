"""Batches for the unrolled pass and the loss on its levels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_decode.train.features import TEACHER_BEST, Example
from eagle_decode.train.head import EagleHead


class Columns(NamedTuple):
    """The draft ids whose logits a batch computes, and the natural logarithm of how many each stands for."""

    ids: Tensor  # [S] int64, ascending
    log_counts: Tensor  # [S]

    @classmethod
    def choose(cls, needed: Tensor, vocabulary: int, size: int, generator: torch.Generator) -> Columns:
        """All of `needed`, and of the other draft ids as many, by chance, as make `size`: one at least, all
        at most.

        Those drawn stand for those left out, so that the softmax's denominator is right on average
        (importance sampling of a large vocabulary's softmax: Bengio and Senecal 2003, 2008).
        """
        counts = torch.zeros(vocabulary)
        counts[needed.reshape(-1)] = 1
        others = (counts == 0).nonzero()[:, 0]
        drawn = max(1, size - (vocabulary - len(others)))
        if drawn < len(others):
            counts[others[torch.randperm(len(others), generator=generator)[:drawn]]] = len(others) / drawn
        else:
            counts[others] = 1
        ids = counts.nonzero()[:, 0]
        return cls(ids, counts[ids].log())

    def find(self, ids: Tensor) -> Tensor:
        """The columns of draft ids that are among them; -1 stays."""
        return torch.where(ids < 0, ids, torch.searchsorted(self.ids, ids.clamp(min=0)))


@dataclass
class Batch:
    """Dialogues padded to one length S, with R start rows each.

    tokens [B, S + steps] int64; features [B, S, F]; rows [B, R] int64 start positions in random order;
    targets [B, R + steps] int64: for start row r and level i, `target_rows[b, r] + i` indexes the flat
    teacher tensors, whose ids are columns.
    """

    tokens: Tensor
    features: Tensor
    rows: Tensor
    target_rows: (
        Tensor  # [B, R]: flat teacher row of level 0, or beyond the dialogue's own where r is padding
    )
    target_ends: Tensor  # [B]: first flat teacher row that is no longer this dialogue's
    teacher_ids: Tensor  # [A, k]: columns
    teacher_probs: Tensor  # [A, k]
    target_best: Tensor  # [A]: a column, or -1
    columns: Columns
    num_tokens: int


def make_batches(
    examples: list[Example], batch_tokens: int, chooser: random.Random
) -> Iterator[list[Example]]:
    """Groups examples of similar length into batches of about `batch_tokens`, in random order."""
    order = sorted(examples, key=lambda example: len(example) * chooser.uniform(0.95, 1.05))
    groups: list[list[Example]] = []
    longest = 0
    for example in order:
        longest = max(longest, len(example))
        if not groups or (len(groups[-1]) + 1) * longest > batch_tokens:
            groups.append([])
            longest = len(example)
        groups[-1].append(example)
    chooser.shuffle(groups)
    yield from groups


def collate(
    group: list[Example],
    steps: int,
    generator: torch.Generator,
    device: torch.device,
    vocabulary: int,
    num_columns: int,
) -> Batch:
    """Pads a group. A start row t needs the features of t and the distribution after token t + 1.

    vocabulary: the draft vocabulary's size, of which the batch computes `num_columns` (more where the
    teachers speak of more).
    """
    longest = max(map(len, group))
    counts = [len(example) - example.prompt_length - 1 for example in group]
    tokens = torch.zeros(len(group), longest + steps, dtype=torch.int64)
    features = torch.zeros(len(group), longest - 1, group[0].features.shape[1], dtype=torch.bfloat16)
    rows = torch.zeros(len(group), max(counts), dtype=torch.int64)
    target_rows = torch.full((len(group), max(counts)), 1 << 40)
    target_ends = torch.zeros(len(group), dtype=torch.int64)
    start = 0
    for b, (example, count) in enumerate(zip(group, counts, strict=True)):
        length, first = len(example), example.prompt_length - 1
        tokens[b, :length] = example.tokens
        features[b, : length - 1] = example.features[: length - 1]
        shuffled = torch.randperm(count, generator=generator)
        rows[b, :count] = first + shuffled
        target_rows[b, :count] = start + 1 + shuffled
        start += count + 1
        target_ends[b] = start
    teacher_ids = torch.cat([example.teacher_ids for example in group]).to(torch.int64)
    target_best = torch.cat([example.target_best for example in group]).to(torch.int64)
    columns = Columns.choose(teacher_ids, vocabulary, num_columns, generator)
    return Batch(
        tokens=tokens.to(device),
        features=features.to(device),
        rows=rows.to(device),
        target_rows=target_rows.to(device),
        target_ends=target_ends.to(device),
        teacher_ids=columns.find(teacher_ids).to(device),
        teacher_probs=torch.cat([example.teacher_probs for example in group]).to(device, torch.float32),
        target_best=columns.find(target_best).to(device),
        columns=Columns(*(part.to(device) for part in columns)),
        num_tokens=sum(map(len, group)),
    )


class TeacherLoss(torch.autograd.Function):
    """Mean over rows of cross-entropy - weight * log(acceptance), for logits [N, S]; also the argmax [N].

    log_counts [S]: see `Columns`. teacher_ids, teacher_probs [N, k + n], ids as columns: the teacher's
    `num_best` = k likeliest tokens and n that stand for all others (`features.py`).

    acceptance = sum over tokens of p * (1 - (1 - min(1, q / p)) ** candidates), p the teacher's and q the
    head's probability, the others than the best counted as one token. With one candidate that is the sum of
    min(p, q), the share of drafts that speculative sampling keeps; its logarithm as a loss: Samarin et al.
    2026, "LK Losses". With more it is how often a token drawn from p is among so many that coupled drafting
    proposes, where no token is likely by itself (a race of exponential clocks, of which q / p slows the
    winner's): what a head says of a token matters less once some candidate will hold it. Beside the
    cross-entropy it spends a small head's capacity where drafts are decided.

    Forward and gradient share one softmax, and the gradient is kept in the logits' dtype: in bfloat16 this
    halves the time that the loss takes beside the output projection on a CPU.
    """

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        log_counts: Tensor,
        teacher_ids: Tensor,
        teacher_probs: Tensor,
        num_best: int,
        weight: float,
        candidates: int,
    ):
        best = logits.max(-1)
        at_teacher = logits.gather(1, teacher_ids)
        weighted, chosen = logits + log_counts, best.indices[:, None]
        probs = torch.softmax(weighted, -1, dtype=torch.float32)
        log_sum = (weighted.gather(1, chosen).float() - probs.gather(1, chosen).log())[:, 0]
        mass = teacher_probs.sum(-1)
        losses = log_sum * mass - (teacher_probs * at_teacher).sum(-1)
        ids, wanted = teacher_ids[:, :num_best], teacher_probs[:, :num_best]
        given = probs.gather(1, ids)
        rest_wanted = teacher_probs[:, num_best:].sum(-1, keepdim=True)
        rest_given = (1 - given.sum(-1, keepdim=True)).clamp(min=0)
        found, slope = _found(given, wanted, candidates)
        rest_found, rest_slope = _found(rest_given, rest_wanted, candidates)
        acceptance = (found.sum(-1) + rest_found[:, 0]).clamp(min=1e-4)
        # d acceptance / d logit of token i = q_i (slope_i - share), share = sum of q_i slope_i
        scale = weight / acceptance[:, None]
        share = (given * slope).sum(-1, keepdim=True) + rest_given * rest_slope
        losses = losses - weight * acceptance.log()
        gradient = probs.mul_(mass[:, None] + scale * (share - rest_slope))
        gradient.scatter_add_(1, ids, given * scale * (rest_slope - slope))
        gradient.scatter_add_(1, teacher_ids, -teacher_probs)
        ctx.save_for_backward(gradient.to(logits.dtype))
        ctx.mark_non_differentiable(best.indices)
        return losses.mean(), best.indices

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        (gradient,) = ctx.saved_tensors  # of the sum; ours alone, so it is scaled in place
        return (gradient.mul_(grad_loss / len(gradient)), *[None] * 6)


def _found(given: Tensor, wanted: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Of probabilities q and p: p * (1 - (1 - min(1, q / p)) ** candidates) and its derivative by q."""
    lack = (1 - given / wanted.clamp(min=1e-8)).clamp(min=0)
    power = lack ** (candidates - 1)
    return wanted * (1 - power * lack), candidates * power * (given < wanted)


def unrolled_loss(
    head: EagleHead,
    embedding: Tensor,
    batch: Batch,
    keep: tuple[float, ...],
    decay: float = 0.8,
    acceptance_weight: float = 1.0,
    candidates: int = 1,
) -> tuple[Tensor, list[float]]:
    """Loss summed over levels with weights decay ** level, and the share of rows guessed right at each level.

    embedding: the target's [V, H]; products run in its dtype.
    keep: share of start rows that each level keeps, non-increasing. Later levels matter as seldom as drafts
    get that far, so that thinning them spends the time where the acceptance is decided.
    """
    count = batch.rows.shape[1]
    rows_per_level = [max(1, round(count * share)) for share in keep]
    dtype = embedding.dtype
    with torch.autocast(batch.features.device.type, dtype, enabled=dtype != torch.float32):
        embedded = F.embedding(batch.tokens[:, 1:], embedding)
        lm_head = head.lm_head.weight[batch.columns.ids].to(dtype)
        num_best = min(TEACHER_BEST, head.config.draft_vocab_size)
        outputs = head.unroll(embedded, batch.features.to(dtype), batch.rows, rows_per_level)
        total, correct = torch.zeros((), device=batch.features.device), []
        for level, (hidden, kept) in enumerate(zip(outputs, rows_per_level, strict=True)):
            index = batch.target_rows[:, :kept] + level
            known = index < batch.target_ends[:, None]
            index = torch.where(known, index, 0)
            best = batch.target_best[index]
            learnt = known & (
                best >= 0
            )  # a token outside the draft vocabulary cannot be drafted: nothing to learn
            at = index[learnt]
            if not len(at):
                correct.append(0.0)
                continue
            logits = F.linear(head.norm(hidden[learnt]), lm_head)
            teacher = (batch.teacher_ids[at], batch.teacher_probs[at], num_best)
            columns = batch.columns.log_counts
            loss, guess = TeacherLoss.apply(logits, columns, *teacher, acceptance_weight, candidates)
            total = total + decay**level * loss
            correct.append(((guess == best[learnt]).sum() / known.sum().clamp(min=1)).item())
    return total, correct
