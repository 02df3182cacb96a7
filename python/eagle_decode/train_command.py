"""`eagle-cuda train`; `python -m eagle_decode.train` is the same."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eagle_decode.loading import head_folder

TargetOption = Annotated[str, typer.Option(help="Hugging Face folder, .gguf file, or smollm2-135m")]


def train(
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="folder of the trained head")],
    minutes: Annotated[float, typer.Option(help="wall-clock budget of the whole run")] = 60.0,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="dialogues to train on, can be repeated; without it the target writes its own"),
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="of the answers that the target writes, comma-separated")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="user turns for the target to answer first")] = None,
    init: Annotated[
        str | None, typer.Option(help="folder of a head of this recipe to continue from, or `demo`")
    ] = None,
    eval_prompts: Annotated[Path | None, typer.Option(help="prompts to measure on, never trained on")] = None,
    num_eval_prompts: int = 12,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="tokens that the head can draft; default: those of --init, else 8192")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    threads: int | None = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="text, features, checkpoints; default: beside --out")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="ignore a checkpoint in the work folder")
    ] = False,
    max_steps: int | None = None,
    eval_minutes: float = 12.0,
    learning_rate: float | None = None,
    batch_tokens: int | None = None,
    acceptance_weight: Annotated[
        float | None, typer.Option(help="of -log(acceptance) beside the cross-entropy")
    ] = None,
    candidates: Annotated[int | None, typer.Option(help="a level, that acceptance counts on")] = None,
    num_columns: Annotated[
        int | None, typer.Option(help="of a larger draft vocabulary, that each step computes")
    ] = None,
    muon: Annotated[bool, typer.Option("--muon", help="Muon for the layer's matrices")] = False,
    seed: int = 0,
) -> None:
    """Trains an EAGLE-3 head for a target. Can be interrupted, and goes on where it was when run again."""
    from eagle_decode.train import Settings
    from eagle_decode.train import train as run
    from eagle_decode.train.data import ANSWER_TEMPERATURES

    try:
        heats = tuple(map(float, temperatures.split(","))) if temperatures else ANSWER_TEMPERATURES
    except ValueError:
        raise ValueError(f"temperatures: expected numbers with commas, got {temperatures!r}") from None

    chosen = {
        "learning_rate": learning_rate,
        "batch_tokens": batch_tokens,
        "acceptance_weight": acceptance_weight,
        "candidates": candidates,
        "num_columns": num_columns,
    }
    settings = Settings(
        muon=muon, seed=seed, **{name: value for name, value in chosen.items() if value is not None}
    )
    console = Console(highlight=False)
    run(
        target,
        out,
        minutes=minutes,
        data=data or None,
        temperatures=heats,
        prompts=prompts,
        init=head_folder(init) if init else None,
        eval_prompts=eval_prompts,
        num_eval_prompts=num_eval_prompts,
        draft_vocab_size=draft_vocab_size,
        device=device,
        threads=threads,
        work_dir=work_dir,
        resume=not restart,
        settings=settings,
        max_steps=max_steps,
        eval_minutes=eval_minutes,
        command="eagle-cuda " + shlex.join(sys.argv[1:]),
        report=lambda line: console.print(line, markup=False, soft_wrap=True),
    )
