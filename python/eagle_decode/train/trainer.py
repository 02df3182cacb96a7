"""The state of a training run: head, optimiser, average, position in the data; saved and taken up exactly."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle_decode.train.features import Example
from eagle_decode.train.head import EagleHead
from eagle_decode.train.loss import collate, make_batches, unrolled_loss
from eagle_decode.train.optimizer import Optimizer, WeightAverage, learning_rate_factor

# Share of start rows kept at each level of the unrolled pass, for most of the run and for its last quarter.
KEEP_EARLY = (1.0, 0.5, 0.35, 0.25)
KEEP_LATE = (1.0, 0.6, 0.45, 0.35, 0.25)


@dataclass
class Settings:
    """Numbers of a run that a continued run must share with the one it continues."""

    batch_tokens: int = 1536
    learning_rate: float = 2e-3
    muon: bool = False
    replays: int = 3
    shard_tokens: int = 25_000
    level_decay: float = 0.8
    acceptance_weight: float = 1.0  # of -log(acceptance) beside the cross-entropy (`TeacherLoss`)
    candidates: int = 1  # that acceptance counts on
    num_columns: int = 16384  # of the draft vocabulary that a batch computes (`Columns`)
    seed: int = 0


def shard_schedule(num_shards: int, replays: int, seed: int) -> Iterator[int]:
    """Endless order of shards: each new one is followed by `replays` old ones, then whole passes in random
    order.

    New features cost several times as much as a pass over old ones: spread out, they leave no stretch of the
    run without training, and the run may end before all are extracted.
    """
    chooser = random.Random(seed)
    for new in range(num_shards):
        yield new
        for _ in range(min(replays, new)):
            yield chooser.randrange(new)
    while True:
        order = list(range(num_shards))
        chooser.shuffle(order)
        yield from order


class Trainer:
    """State of a run: head, optimiser, average, position in the data, time spent.

    `step_count`, `tokens_seen` and `seconds` go into checkpoints; `advance` trains on the next batch.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: Tensor,
        load_shard: Callable[[int], list[Example]],
        num_shards: int,
        settings: Settings,
        device: torch.device,
    ):
        self.head, self.embedding, self.load_shard = head.to(device), embedding, load_shard
        self.num_shards, self.settings, self.device = num_shards, settings, device
        self.optimizer = Optimizer(head, settings.learning_rate, settings.muon)
        self.average = WeightAverage(head)
        self.step_count, self.tokens_seen, self.seconds = 0, 0, 0.0
        self.visit, self.batch_in_visit = 0, 0
        self.loss, self.accuracy = float("nan"), []
        self._batches: Iterator | None = None

    def advance(self, progress: float) -> None:
        """Trains on one batch; `progress` in [0, 1] sets the learning rate and the depth of the unrolled
        pass.
        """
        group = self._next_group()
        keep, settings = KEEP_LATE if progress > 0.75 else KEEP_EARLY, self.settings
        generator = torch.Generator().manual_seed(hash((settings.seed, self.step_count)) % (1 << 62))
        size = self.head.config.draft_vocab_size, settings.num_columns
        batch = collate(group, len(keep), generator, self.device, *size)
        weights = settings.level_decay, settings.acceptance_weight, settings.candidates
        loss, accuracy = unrolled_loss(self.head, self.embedding, batch, keep, *weights)
        if loss.requires_grad:  # else no row of the batch can be learnt from
            loss.backward()
            self.optimizer.step(learning_rate_factor(progress, self.step_count))
        self.average.update(self.head, self.step_count)
        self.step_count += 1
        self.tokens_seen += batch.num_tokens
        self.loss = loss.item()
        old = self.accuracy + accuracy[len(self.accuracy) :]
        self.accuracy = [0.95 * a + 0.05 * b for a, b in zip(old, accuracy, strict=False)]

    def _next_group(self) -> list[Example]:
        while True:
            if self._batches is None:
                self._open_visit()
            group = next(self._batches, None)
            if group is not None:
                self.batch_in_visit += 1
                return group
            self._batches, self.visit, self.batch_in_visit = None, self.visit + 1, 0

    def _open_visit(self) -> None:
        """Opens the shard that comes next, past the batches that a checkpoint has already counted."""
        schedule = shard_schedule(self.num_shards, self.settings.replays, self.settings.seed)
        for _ in range(self.visit + 1):
            shard = next(schedule)
        chooser = random.Random(f"{self.settings.seed}/{self.visit}")
        self._batches = make_batches(self.load_shard(shard), self.settings.batch_tokens, chooser)
        for _ in range(self.batch_in_visit):
            next(self._batches, None)

    def averaged_head(self) -> EagleHead:
        """A copy of the head with averaged weights, in evaluation mode."""
        head = copy.deepcopy(self.head).eval().requires_grad_(False)
        self.average.copy_to(head)
        return head

    def save(self, path: Path) -> None:
        """Writes a checkpoint; the file is replaced whole."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        numbers = ("step_count", "tokens_seen", "seconds", "visit", "batch_in_visit", "accuracy")
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "settings": asdict(self.settings),
            **{name: getattr(self, name) for name in numbers},
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Takes up a checkpoint. Raises ValueError where it was made with other settings, or for a head of
        another draft vocabulary or size."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise ValueError(
                f"{path}: the run was started with {state['settings']}, not {asdict(self.settings)}; "
                "choose another work_dir or resume=False"
            )
        mine, stored = self.head.state_dict(), state.pop("head")
        sizes = [{name: tensor.shape for name, tensor in part.items()} for part in (mine, stored)]
        other = "size" if sizes[0] != sizes[1] else None
        if not other and not torch.equal(mine["draft_ids"], stored["draft_ids"]):
            other = "draft vocabulary"
        if other:
            raise ValueError(
                f"{path}: the run was started with a head of another {other}, which follows from the data "
                "and the settings; choose another work_dir or resume=False"
            )
        self.head.load_state_dict(stored)
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.average.load_state_dict(state.pop("average"))
        state.pop("settings")
        for name, value in state.items():
            setattr(self, name, value)
        self._batches = None
