"""What the head learns from: the target's features and next-token distributions, kept on disk in shards.

Text of a million tokens makes gigabytes of features, so they are computed a shard at a time, written once,
and streamed in every later pass. A shard holds a flat list of dialogues:

    tokens [T] int32, prompt_lengths [n] int32, lengths [n] int32
    features [T, F] bf16            hidden states entering the head's feature layers
    teacher_ids [A, k] int32        the target's k best tokens, as draft ids, for each answer row
    teacher_probs [A, k] fp16       their probabilities, normalised over these k
    target_best [A] int32           the best of them; -1 where the text goes on with an undraftable token

The full vocabulary is never scored: that would cost a fifth more.

A dialogue of n tokens with a prompt of p has n - p answer rows: row j is the distribution of token p + j.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_decode.train.data import Dialogue
from eagle_decode.train.target import TorchTarget


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
    teacher_k: int = 64,
    batch_tokens: int = 4096,
) -> list[Example]:
    """Runs the target over whole dialogues (shortest first, padded on the right) and keeps what a head needs.

    layers: whose inputs are the features. draft_ids: ascending int64 [Vd]. Returns CPU tensors.
    """
    device = target.device
    draft_of = torch.full((target.config["vocab_size"],), -1)
    draft_of[draft_ids.cpu()] = torch.arange(len(draft_ids))
    draft_head = target.lm_head[draft_ids.to(device)]
    k = min(teacher_k, len(draft_ids))
    examples = []
    for group in _groups(sorted(dialogues, key=len), batch_tokens):
        longest = max(map(len, group))
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, dialogue in enumerate(group):
            ids[row, : len(dialogue)] = torch.tensor(dialogue.prompt + dialogue.response)
        hidden, captured = target.forward(ids, torch.arange(longest)[None], capture=layers)
        features = torch.cat(captured, -1).to(torch.bfloat16).cpu()
        spans = [(len(dialogue.prompt) - 1, len(dialogue) - 1) for dialogue in group]
        answers = torch.cat([hidden[row, first:end] for row, (first, end) in enumerate(spans)])
        values, teacher_ids = F.linear(answers, draft_head).float().topk(k, -1)
        follows = torch.cat([ids[row, first + 1 : end + 1] for row, (first, end) in enumerate(spans)])
        best = torch.where(draft_of[follows] >= 0, teacher_ids[:, 0].to(torch.int32).cpu(), -1)
        counts = [end - first for first, end in spans]
        teacher_ids = teacher_ids.to(torch.int32).cpu().split(counts)
        teacher_probs = values.softmax(-1).to(torch.float16).cpu().split(counts)
        for row, (dialogue, best_row) in enumerate(zip(group, best.split(counts), strict=True)):
            examples.append(
                Example(
                    tokens=ids[row, : len(dialogue)].to(torch.int32),
                    prompt_length=len(dialogue.prompt),
                    features=features[row, : len(dialogue)].clone(),
                    teacher_ids=teacher_ids[row],
                    teacher_probs=teacher_probs[row],
                    target_best=best_row,
                )
            )
    return examples


def _groups(dialogues: list[Dialogue], batch_tokens: int) -> Iterator[list[Dialogue]]:
    group: list[Dialogue] = []
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
    anywhere.
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
        if not path.is_file():
            examples = extract_features(self.target, self._shards[shard], self.layers, self.draft_ids)
            write_shard(path, examples)
            return examples
        return read_shard(path)


def write_shard(path: Path, examples: list[Example]) -> None:
    """Writes a shard; it appears under its name only when it is complete."""
    from safetensors.torch import save_file

    tensors = {
        "lengths": torch.tensor([len(example) for example in examples], dtype=torch.int32),
        "prompt_lengths": torch.tensor([example.prompt_length for example in examples], dtype=torch.int32),
    }
    for name in ("tokens", "features", "teacher_ids", "teacher_probs", "target_best"):
        tensors[name] = torch.cat([getattr(example, name) for example in examples])
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file(tensors, partial)
    os.replace(partial, path)


def read_shard(path: Path) -> list[Example]:
    """Reads a shard back; the examples share its memory."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    lengths, prompts = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    by_row = {name: tensors[name].split(lengths) for name in ("tokens", "features")}
    by_answer = {
        name: tensors[name].split(answers) for name in ("teacher_ids", "teacher_probs", "target_best")
    }
    columns = {**by_row, **by_answer}
    return [
        Example(prompt_length=prompt, **{name: column[i] for name, column in columns.items()})
        for i, prompt in enumerate(prompts)
    ]


def feature_rms(examples: list[Example]) -> Tensor:
    """Root mean square of each feature dimension [F] float32, position 0 (an outlier in most models) left
    out.
    """
    total, rows = 0, 0
    for example in examples:
        total = total + example.features[1:].float().square().sum(0)
        rows += len(example) - 1
    return (total / rows).sqrt()
