"""The recipe: from a target to a trained EAGLE-3 head, within a given time, on a CPU or a GPU.

    train("smollm2-135m", "my_head", minutes=100)

Stages: the target writes dialogues (unless a file is given), the draft vocabulary is chosen, and then one
loop alternates between extracting the features of a new shard and training on new and old ones. Everything is
kept in `work_dir`: a run that was stopped continues where it was.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from eagle_decode.models.checkpoint import load_checkpoint
from eagle_decode.models.tokenizer import chat_prompt, load_tokenizer, stop_token_ids
from eagle_decode.train.data import (
    ANSWER_TEMPERATURES,
    Dialogue,
    choose_draft_vocabulary,
    generate_dialogues,
    read_dialogues,
    read_prompts,
)
from eagle_decode.train.evaluate import Reference, figures, write_references
from eagle_decode.train.export import export_head, import_head
from eagle_decode.train.features import FeatureStore, feature_rms
from eagle_decode.train.head import (
    EagleHead,
    HeadConfig,
    change_vocabulary,
    rescale_features,
    warm_start,
)
from eagle_decode.train.target import TorchTarget
from eagle_decode.train.trainer import Settings, Trainer


def train(
    target: str | Path,
    out: str | Path,
    *,
    minutes: float = 60.0,
    data: str | Path | Sequence[str | Path] | None = None,
    temperatures: tuple[float, ...] = ANSWER_TEMPERATURES,
    prompts: str | Path | None = None,
    init: str | Path | None = None,
    eval_prompts: str | Path | None = None,
    num_eval_prompts: int = 12,
    draft_vocab_size: int | None = None,
    device: str | None = None,
    threads: int | None = None,
    work_dir: str | Path | None = None,
    resume: bool = True,
    settings: Settings | None = None,
    max_steps: int | None = None,
    eval_minutes: float = 20.0,
    checkpoint_minutes: float = 3.0,
    command: str | None = None,
    report: Callable[[str], None] = print,
) -> Path:
    """Trains an EAGLE-3 head for `target` and writes it to the folder `out`. Returns that folder.

    target: folder, .gguf file or packaged name (see `resolve_target`).
    minutes: wall-clock budget of the whole run, writing text and extracting features included; the learning
        rate falls to almost zero over it. A resumed run spends what is left.
    data: dialogue files (see `data.py`); without any the target writes dialogues for 40 % of the time.
    temperatures: of the answers that it writes, each as often.
    prompts: file of user turns that the target answers before it invents its own.
    init: folder of an exported head to continue from; its feature layers are kept, and its draft vocabulary
        unless `draft_vocab_size` asks for another size: then rows of tokens that it lacks are guessed from
        the target's (`change_vocabulary`). A work folder's features serve any draft vocabulary.
    eval_prompts: file of prompts for the measured acceptance length, never trained on; by default
        `num_eval_prompts` dialogues are held out of the data.
    draft_vocab_size: tokens that the head can draft; by default those of `init`, else 8192.
    device: "cpu", "cuda", or None to choose. threads: torch's.
    work_dir: text, features (about 3.7 KB a token) and checkpoints; default `<out>.work`.
    resume: continue from the checkpoint in `work_dir`, if there is one.
    max_steps: ends the run (and its schedule) by steps instead of minutes.
    eval_minutes: how often to measure. checkpoint_minutes: how often to save, and to export a snapshot of the
        averaged weights to `work_dir/export`.
    command: the command line, for the README beside the head. report: receives progress lines.

    Ctrl-C saves a checkpoint before it ends the run. Raises ValueError for settings that do not fit.
    """
    started = time.monotonic()
    settings = settings or Settings()
    if not temperatures or not all(0 <= heat < math.inf for heat in temperatures):
        raise ValueError(f"temperatures: expected some of at least 0, got {list(temperatures)}")
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes: expected a finite number above 0, got {minutes}")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps: expected at least 1, got {max_steps}")
    if num_eval_prompts < 0:
        raise ValueError(f"num_eval_prompts: expected at least 0, got {num_eval_prompts}")
    for name in ("candidates", "num_columns"):
        if (value := getattr(settings, name)) < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.manual_seed(settings.seed)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = Path(out)
    work = Path(work_dir) if work_dir else out.with_name(out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    state_path = work / "checkpoint.pt"
    spent = _spent_seconds(work) if resume else 0.0

    checkpoint = load_checkpoint(target)
    model = TorchTarget(checkpoint, device)
    tokenizer = load_tokenizer(target)
    stops = stop_token_ids(tokenizer, checkpoint.config)
    report(
        f"target {checkpoint.source.name} on {device}, {torch.get_num_threads()} threads, "
        f"{spent / 60:.1f} min spent before"
    )

    if data is None:
        written = {"stops": stops, "seconds": 0.4 * minutes * 60, "seed": settings.seed}
        written |= {"temperatures": temperatures, "prompts": read_prompts(prompts) if prompts else None}
        data = _write_dialogues(model, tokenizer, work, report, **written)
    paths = [data] if isinstance(data, (str, Path)) else data
    limit = {"vocab_size": checkpoint.config["vocab_size"]}
    dialogues = [dialogue for path in paths for dialogue in read_dialogues(path, **limit)]
    training, held_out = _hold_out(dialogues, 0 if eval_prompts else num_eval_prompts)
    if eval_prompts:
        held_out = [chat_prompt(tokenizer, text) for text in read_prompts(eval_prompts)[:num_eval_prompts]]
    report(f"{len(training)} dialogues, {sum(map(len, training))} tokens; {len(held_out)} held-out prompts")

    head = import_head(init) if init else None
    if head is None:
        head = EagleHead(HeadConfig.for_target(checkpoint.config, draft_vocab_size or 8192))
    size = draft_vocab_size or head.config.draft_vocab_size
    if init and size == head.config.draft_vocab_size:
        vocabulary = head.draft_ids.clone()
    else:
        vocabulary = choose_draft_vocabulary(training, size, checkpoint.config["vocab_size"], stops)
        if init:
            head = change_vocabulary(head, model.lm_head.float().cpu(), vocabulary)
    layers = head.config.feature_layers
    store = FeatureStore(
        work / "features",
        model,
        training,
        layers,
        vocabulary,
        shard_tokens=settings.shard_tokens,
        seed=settings.seed,
    )
    rms = feature_rms(store.load(0))
    if init:
        rescale_features(head, rms)
    else:
        warm_start(head, model.lm_head.float().cpu(), model.final_norm.float().cpu(), vocabulary, rms)

    trainer = Trainer(head, model.embedding, store.load, len(store), settings, device)
    if resume and state_path.is_file():
        trainer.restore(state_path)
        report(f"resumed at step {trainer.step_count}, {trainer.tokens_seen} tokens")
    references = [
        reference
        for heat in (0.0, 1.0)
        for reference in write_references(model, held_out, 128, stops, layers, heat)
    ]
    run = _Run(trainer, references, work, state_path, started - spent, minutes * 60, max_steps, report)
    run.loop(eval_minutes * 60, checkpoint_minutes * 60)
    notes = _notes(command, checkpoint.source.name, trainer, sum(map(len, training)), run.measure("final"))
    export_head(trainer.averaged_head(), out, notes)
    report(f"exported to {out}")
    return out


class _Run:
    """The loop around a trainer: clock, progress lines, checkpoints, measurements."""

    def __init__(
        self,
        trainer: Trainer,
        references: list[Reference],
        work: Path,
        state_path: Path,
        started: float,
        budget: float,
        max_steps: int | None,
        report: Callable[[str], None],
    ):
        self.trainer, self.references, self.work, self.state_path = trainer, references, work, state_path
        self.started, self.budget, self.max_steps, self.report = started, budget, max_steps, report
        self.resumed_at, self.resumed_step = time.monotonic(), trainer.step_count

    def progress(self) -> float:
        if self.max_steps is not None:
            return self.trainer.step_count / self.max_steps
        return (time.monotonic() - self.started) / self.budget

    def loop(self, eval_seconds: float, checkpoint_seconds: float) -> None:
        trainer, now = self.trainer, time.monotonic()
        next_eval, next_save, next_line = now + eval_seconds / 3, now + checkpoint_seconds, now
        with _deferred_interrupt() as interrupted:
            while (progress := self.progress()) < 1.0 and not interrupted:
                trainer.advance(progress)
                now = time.monotonic()
                trainer.seconds = now - self.started
                if now >= next_line:
                    self._line(progress)
                    next_line = now + 20
                if now >= next_save:
                    trainer.save(self.state_path)
                    export_head(trainer.averaged_head(), self.work / "export")
                    next_save = time.monotonic() + checkpoint_seconds
                if now >= next_eval:
                    self.measure("snapshot")
                    next_eval = time.monotonic() + eval_seconds
            trainer.save(self.state_path)
        if interrupted:
            self.report(f"interrupted; saved {self.state_path}, run again to continue")
            raise KeyboardInterrupt

    def measure(self, label: str) -> dict:
        """Acceptance lengths of the averaged weights on held-out prompts; kept in `figures.jsonl` too."""
        head, trainer = self.trainer.averaged_head(), self.trainer
        found = figures(head, trainer.embedding, self.references)
        found |= {
            "label": label,
            "minutes": round(trainer.seconds / 60, 1),
            "step": trainer.step_count,
            "tokens": trainer.tokens_seen,
        }
        self.report("tokens per cycle " + json.dumps(found))
        with open(self.work / "figures.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        return found

    def _seconds_left(self, progress: float) -> float:
        if self.max_steps is None:
            return (1 - progress) * self.budget
        steps = self.trainer.step_count - self.resumed_step
        return (time.monotonic() - self.resumed_at) / steps * (self.max_steps - self.trainer.step_count)

    def _line(self, progress: float) -> None:
        trainer = self.trainer
        left = self._seconds_left(progress) / 60
        right = " ".join(f"{100 * share:.1f}" for share in trainer.accuracy)
        self.report(
            f"{100 * progress:5.1f} %  {left:5.1f} min left  step {trainer.step_count}  "
            f"{trainer.tokens_seen / 1e3:.0f}k tokens  loss {trainer.loss:.3f}  right by level {right}"
        )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Turns the first Ctrl-C (or termination) into an entry of the yielded list, so that no step is cut.

    A second one ends the program at once. Outside the main thread signals are left alone.
    """
    received: list[int] = []

    def remember(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    former = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _spent_seconds(work: Path) -> float:
    path = work / "checkpoint.pt"
    if path.is_file():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["seconds"]
    return _writing_seconds(work)


def _writing_seconds(work: Path) -> float:
    """What former runs spent on the dialogue file of the work folder."""
    path = work / "dialogues.seconds"
    return float(path.read_text()) if path.is_file() else 0.0


def _write_dialogues(model, tokenizer, work: Path, report, *, seconds: float, **settings) -> Path:
    """The dialogue file of the work folder, to which this run adds unless a former one has finished it."""
    path, finished = work / "dialogues.jsonl", work / "dialogues.finished"
    if not finished.is_file():
        before = _writing_seconds(work)
        total, started, seconds = 0, time.monotonic(), seconds - before
        for count in generate_dialogues(model, tokenizer, path, seconds=seconds, **settings):
            total += count
            passed = time.monotonic() - started
            (work / "dialogues.seconds").write_text(f"{before + passed:.1f}")
            rate, left = total / passed, max(0.0, seconds - passed) / 60
            report(f"writing dialogues: {total} answer tokens, {rate:.0f} a second, {left:.1f} min left")
        finished.touch()
    return path


def _hold_out(dialogues: list[Dialogue], count: int) -> tuple[list[Dialogue], list[list[int]]]:
    """Sets aside `count` prompts, spread over the file, with every dialogue that shares one of them."""
    distinct = list(dict.fromkeys(dialogue.prompt for dialogue in dialogues))
    chosen = set(distinct[:: max(1, len(distinct) // count)][:count]) if count else set()
    training = [dialogue for dialogue in dialogues if dialogue.prompt not in chosen]
    if not training:
        raise ValueError(f"data: {len(dialogues)} dialogues are too few to hold out {count} prompts")
    return training, [list(prompt) for prompt in distinct if prompt in chosen]


def _notes(command: str | None, target: str, trainer: Trainer, tokens: int, found: dict) -> str:
    measured = ", ".join(f"{name} {value}" for name, value in found.items() if " of " in name)
    return (
        f"# EAGLE-3 head for {target}\n\n"
        f"Made by:\n\n    {command or 'eagle_decode.train.train(...)'}\n\n"
        f"Text: {tokens} tokens of dialogues that the target itself wrote.\n"
        f"Training: {trainer.seconds / 60:.0f} minutes, {trainer.step_count} steps, "
        f"{trainer.tokens_seen} tokens (repeats counted).\n"
        f"Tokens per cycle, teacher-forced on held-out prompts, 128 tokens, greedy but where T is named: "
        f"{measured}.\n"
    )
