"""`python -m eagle_decode.train --target smollm2-135m --out my_head --minutes 100`."""

from __future__ import annotations

import argparse
import shlex
import sys

from eagle_decode.train.recipe import train
from eagle_decode.train.trainer import Settings


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and trains; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle_decode.train", description=train.__doc__.split("\n\n")[0]
    )
    parser.add_argument("--target", required=True, help="folder, .gguf file, or smollm2-135m")
    parser.add_argument("--out", required=True, help="folder of the trained head")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock budget of the run")
    parser.add_argument("--data", help="dialogue file (JSON lines with token ids p and r)")
    parser.add_argument("--prompts", help="file of user turns for the target to answer")
    parser.add_argument("--init", help="folder of a head to continue from")
    parser.add_argument("--eval-prompts", help="prompts to measure on, never trained on")
    parser.add_argument("--num-eval-prompts", type=int, default=12)
    parser.add_argument("--draft-vocab-size", type=int)
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work-dir", help="text, features and checkpoints (default: <out>.work)")
    parser.add_argument("--restart", action="store_true", help="ignore a checkpoint in the work folder")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--eval-minutes", type=float, default=20.0)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--batch-tokens", type=int, default=Settings.batch_tokens)
    parser.add_argument(
        "--acceptance-weight",
        type=float,
        default=Settings.acceptance_weight,
        help="of -log(acceptance) beside the cross-entropy",
    )
    parser.add_argument(
        "--candidates", type=int, default=Settings.candidates, help="a level, that acceptance counts on"
    )
    parser.add_argument(
        "--num-columns",
        type=int,
        default=Settings.num_columns,
        help="of a larger draft vocabulary, that each step computes",
    )
    parser.add_argument("--muon", action="store_true", help="Muon for the layer's matrices")
    parser.add_argument("--seed", type=int, default=0)
    chosen = vars(parser.parse_args(arguments))
    settings = Settings(
        learning_rate=chosen.pop("learning_rate"),
        batch_tokens=chosen.pop("batch_tokens"),
        acceptance_weight=chosen.pop("acceptance_weight"),
        candidates=chosen.pop("candidates"),
        num_columns=chosen.pop("num_columns"),
        muon=chosen.pop("muon"),
        seed=chosen.pop("seed"),
    )
    written = sys.argv[1:] if arguments is None else arguments
    command = "python -m eagle_decode.train " + shlex.join(written)

    def report(line: str) -> None:
        print(line, flush=True)

    try:
        train(resume=not chosen.pop("restart"), settings=settings, command=command, report=report, **chosen)
    except KeyboardInterrupt:
        return 130
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
