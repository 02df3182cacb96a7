"""What the head learns from: the target's features and next-token distributions, kept on disk in shards.

Text of a million tokens makes gigabytes of features, so they are computed a shard at a time, written once,
and streamed in every later pass. A shard holds a flat list of dialogues:

    tokens [T] int32, prompt_lengths [n] int32, lengths [n] int32
    draft_ids [Vd] int32            the draft vocabulary that the teachers speak of
    features [T, F] bf16            hidden states entering the head's feature layers
    teacher_ids [A, k + n] int32    for each answer row the target's k best tokens, as draft ids, then n
                                    tokens drawn from all others
    teacher_probs [A, k + n] fp16   probabilities of the best in the draft vocabulary; each drawn token stands
                                    for 1 / n of what they leave
    target_best [A] int32           the best of them; -1 where the text goes on with an undraftable token

and in its metadata `origin`, a hash of the text, the target and the feature layers that it was made from.

Tokens outside the draft vocabulary are never scored: that would cost a fifth more. The drawn tokens make the
expected cross-entropy that of the whole distribution: text written at temperature 1 takes a tenth of its
tokens from behind the 64 best, and a head taught that these do not happen cannot draft them.

A dialogue of n tokens with a prompt of p has n - p answer rows: row j is the distribution of token p + j.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_decode.train.data import Dialogue
from eagle_decode.train.target import TorchTarget

TEACHER_BEST = 64
TEACHER_DRAWN = 16


@dataclass
class Example:
    """One dialogue with its features; field names as in the shard."""

    tokens: Tensor
    prompt_length: int
    features: Tensor
    teacher_ids: Tensor
    teacher_probs: Tensor
    target_best: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]


@torch.inference_mode()
def extract_features(
    target: TorchTarget,
    dialogues: list[Dialogue],
    layers: tuple[int, ...],
    draft_ids: Tensor,
    *,
    batch_tokens: int = 4096,
) -> list[Example]:
    """Runs the target over whole dialogues (shortest first, padded on the right) and keeps what a head needs.

    layers: whose inputs are the features. draft_ids: ascending int64 [Vd]. Returns CPU tensors.
    """
    teach = _Teacher(target, draft_ids)
    examples = []
    for group in _groups(sorted(dialogues, key=len), batch_tokens):
        longest = max(map(len, group))
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, dialogue in enumerate(group):
            ids[row, : len(dialogue)] = torch.tensor(dialogue.prompt + dialogue.response)
        hidden, captured = target.forward(ids, torch.arange(longest)[None], capture=layers)
        features = torch.cat(captured, -1).to(torch.bfloat16).cpu()
        taught = teach(ids, hidden, [(len(d.prompt), len(d)) for d in group])
        for row, (dialogue, teacher) in enumerate(zip(group, taught, strict=True)):
            count = len(dialogue)
            examples.append(
                Example(
                    ids[row, :count].to(torch.int32),
                    len(dialogue.prompt),
                    features[row, :count].clone(),
                    *teacher,
                )
            )
    return examples


@torch.inference_mode()
def renew_teachers(
    target: TorchTarget,
    examples: list[Example],
    layers: tuple[int, ...],
    draft_ids: Tensor,
    *,
    batch_tokens: int = 4096,
) -> list[Example]:
    """The examples with teachers for another draft vocabulary, from their features: only the layers behind
    the last feature layer are run. Arguments as `extract_features`.
    """
    teach = _Teacher(target, draft_ids)
    last, size = layers[-1], target.config["hidden_size"]
    renewed = []
    for group in _groups(sorted(examples, key=len), batch_tokens):
        longest = max(map(len, group))
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        entering = torch.zeros(len(group), longest, size, dtype=torch.bfloat16)
        for row, example in enumerate(group):
            ids[row, : len(example)] = example.tokens
            entering[row, : len(example)] = example.features[:, -size:]
        positions = torch.arange(longest)[None]
        hidden, _ = target.forward(ids, positions, entering=(last, entering.to(target.device)))
        taught = teach(ids, hidden, [(example.prompt_length, len(example)) for example in group])
        renewed += [
            replace(example, teacher_ids=found[0], teacher_probs=found[1], target_best=found[2])
            for example, found in zip(group, taught, strict=True)
        ]
    return renewed


def _num_best_and_drawn(draft_ids: Tensor) -> tuple[int, int]:
    """Columns of a teacher: a draft vocabulary that the best cover leaves nothing to draw from."""
    return min(TEACHER_BEST, len(draft_ids)), TEACHER_DRAWN if len(draft_ids) > TEACHER_BEST else 0


class _Teacher:
    """The target's distributions over a draft vocabulary."""

    def __init__(self, target: TorchTarget, draft_ids: Tensor):
        self.num_best, self.num_drawn = _num_best_and_drawn(draft_ids)
        self.generator = torch.Generator(target.device).manual_seed(0)
        self.draft_of = torch.full((target.config["vocab_size"],), -1)
        self.draft_of[draft_ids.cpu()] = torch.arange(len(draft_ids))
        self.draft_head = target.lm_head[draft_ids.to(target.device)]

    def __call__(self, ids: Tensor, hidden: Tensor, sizes: list[tuple[int, int]]) -> list[tuple[Tensor, ...]]:
        """ids [B, S], hidden [B, S, H] behind the final norm, (prompt length, length) of each row -> of each
        row (teacher_ids, teacher_probs, target_best).
        """
        spans = [(prompt - 1, length - 1) for prompt, length in sizes]
        answers = torch.cat([hidden[row, first:end] for row, (first, end) in enumerate(spans)])
        teacher_ids, teacher_probs = self._columns(F.linear(answers, self.draft_head).float().softmax(-1))
        follows = torch.cat([ids[row, first + 1 : end + 1] for row, (first, end) in enumerate(spans)])
        best = torch.where(self.draft_of[follows] >= 0, teacher_ids[:, 0].to(torch.int32).cpu(), -1)
        counts = [end - first for first, end in spans]
        columns = (teacher_ids.to(torch.int32).cpu(), teacher_probs.to(torch.float16).cpu(), best)
        return list(zip(*(column.split(counts) for column in columns), strict=True))

    def _columns(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """probs [A, Vd], destroyed -> the best and drawn tokens of each row and what they stand for."""
        best, ids = probs.topk(self.num_best, -1)
        if not self.num_drawn:
            return ids, best
        rest = probs.scatter_(1, ids, 0.0)
        mass = rest.sum(-1, keepdim=True)
        # A row without a rest draws evenly, at no weight: multinomial refuses rows that sum to zero.
        drawn = torch.where(mass > 0, rest, 1.0).multinomial(self.num_drawn, True, generator=self.generator)
        return torch.cat([ids, drawn], 1), torch.cat([best, (mass / self.num_drawn).expand_as(drawn)], 1)


Sized = TypeVar("Sized", Dialogue, Example)


def _groups(dialogues: list[Sized], batch_tokens: int) -> Iterator[list[Sized]]:
    group: list[Sized] = []
    for dialogue in dialogues:
        if group and (len(group) + 1) * len(dialogue) > batch_tokens:
            yield group
            group = []
        group.append(dialogue)
    if group:
        yield group


class FeatureStore:
    """Shards in a folder, extracted when first asked for and read back ever after.

    Every shard is a pure function of the dialogues, their order and the target, so that a run may stop
    anywhere. One that was made from others (its `origin`) is extracted anew.
    """

    def __init__(
        self,
        folder: Path,
        target: TorchTarget,
        dialogues: list[Dialogue],
        layers: tuple[int, ...],
        draft_ids: Tensor,
        *,
        shard_tokens: int = 25_000,
        seed: int = 0,
    ):
        self.folder, self.target, self.layers, self.draft_ids = folder, target, layers, draft_ids
        self._made_by = f"{target.fingerprint()} {tuple(layers)}"
        folder.mkdir(parents=True, exist_ok=True)
        order = list(dialogues)
        random.Random(seed).shuffle(order)
        self._shards: list[list[Dialogue]] = [[]]
        filled = 0
        for dialogue in order:
            if filled + len(dialogue) > shard_tokens and self._shards[-1]:
                self._shards.append([])
                filled = 0
            self._shards[-1].append(dialogue)
            filled += len(dialogue)

    def __len__(self) -> int:
        return len(self._shards)

    def tokens_in(self, shard: int) -> int:
        return sum(map(len, self._shards[shard]))

    def load(self, shard: int) -> list[Example]:
        """The examples of a shard, extracted first if need be."""
        path = self.folder / f"shard-{shard:05d}.safetensors"
        origin = self._origin(shard)
        if path.is_file() and shard_origin(path) == origin:
            examples, draft_ids = read_shard(path)
            columns = sum(_num_best_and_drawn(self.draft_ids))
            whole = all(example.teacher_ids.shape[1] == columns for example in examples)
            if whole and draft_ids is not None and torch.equal(draft_ids, self.draft_ids.to(torch.int32)):
                return examples
            examples = renew_teachers(self.target, examples, self.layers, self.draft_ids)
        else:
            examples = extract_features(self.target, self._shards[shard], self.layers, self.draft_ids)
        write_shard(path, examples, self.draft_ids, origin)
        return examples

    def _origin(self, shard: int) -> str:
        text = [(dialogue.prompt, dialogue.response) for dialogue in self._shards[shard]]
        return hashlib.sha256(f"{self._made_by} {text}".encode()).hexdigest()


def write_shard(path: Path, examples: list[Example], draft_ids: Tensor, origin: str) -> None:
    """Writes a shard; it appears under its name only when it is complete."""
    from safetensors.torch import save_file

    tensors = {
        "lengths": torch.tensor([len(example) for example in examples], dtype=torch.int32),
        "prompt_lengths": torch.tensor([example.prompt_length for example in examples], dtype=torch.int32),
        "draft_ids": draft_ids.to(torch.int32),
    }
    for name in ("tokens", "features", "teacher_ids", "teacher_probs", "target_best"):
        tensors[name] = torch.cat([getattr(example, name) for example in examples])
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file(tensors, partial, {"origin": origin})
    os.replace(partial, path)


def shard_origin(path: Path) -> str | None:
    """What a shard says that it was made from."""
    from safetensors import safe_open

    return (safe_open(path, framework="pt").metadata() or {}).get("origin")


def read_shard(path: Path) -> tuple[list[Example], Tensor | None]:
    """Reads a shard back: its examples, which share its memory, and their draft vocabulary [Vd] int32."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    lengths, prompts = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    by_row = {name: tensors[name].split(lengths) for name in ("tokens", "features")}
    by_answer = {
        name: tensors[name].split(answers) for name in ("teacher_ids", "teacher_probs", "target_best")
    }
    columns = {**by_row, **by_answer}
    examples = [
        Example(prompt_length=prompt, **{name: column[i] for name, column in columns.items()})
        for i, prompt in enumerate(prompts)
    ]
    return examples, tensors.get("draft_ids")


def feature_rms(examples: list[Example]) -> Tensor:
    """Root mean square of each feature dimension [F] float32, position 0 (an outlier in most models) left
    out.
    """
    total, rows = 0, 0
    for example in examples:
        total = total + example.features[1:].float().square().sum(0)
        rows += len(example) - 1
    return (total / rows).sqrt()
