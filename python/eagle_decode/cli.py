"""The command line: `eagle-cuda generate`, `inspect`, `train` and `demo`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Annotated

# Before torch is imported: its workers sleep between operations instead of spinning against ours
# (CONTRIBUTING.md).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import typer
from rich.console import Console
from rich.text import Text

from eagle_decode.loading import TreeOptions, head_folder, open_engine
from eagle_decode.train_command import TargetOption, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generate faster with EAGLE drafting; the text stays that of plain decoding, token for token.",
)

HeadOption = Annotated[str | None, typer.Option(help="folder of a draft head, or `demo` for the shipped one")]
HeadFormatOption = Annotated[
    str | None, typer.Option(help="quantise the head's weights: fp8, int8, int4 or int8_dynamic")
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, max=256, help="nodes of the draft tree, root included; default: 6")
]
LevelsOption = Annotated[int | None, typer.Option(min=1, help="depth of the draft tree; default: 3")]
TopKDraftOption = Annotated[
    int | None, typer.Option(min=1, max=32, help="children tried per node of the draft tree; default: 3")
]
TreeShapeOption = Annotated[
    str | None,
    typer.Option(
        help="a static tree instead: mc_sim_7b_63, chain:N, or a JSON file of its nodes' rank paths"
    ),
]
DtypeOption = Annotated[str, typer.Option(help="bfloat16, float16 or float32")]


def _version(asked: bool) -> None:
    if asked:
        import eagle_cuda

        typer.echo(f"eagle-cuda {eagle_cuda.__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
]


@app.callback()
def common(version: VersionOption = False) -> None:
    """Options that stand before the command."""


def main() -> None:
    """Entry point: faults in what the user gave end with one line on stderr and status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        line = Text.assemble(("error:", "bold red"), f" {error}")
        Console(stderr=True).print(line, highlight=False, soft_wrap=True)
        sys.exit(2)


@app.command()
def generate(
    target: TargetOption,
    prompt: Annotated[
        list[str], typer.Option(help="what to answer; `-` reads it from stdin; may be given several times")
    ],
    head: HeadOption = None,
    head_format: HeadFormatOption = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=0, help="default: 128")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: the most likely token")] = None,
    top_k: Annotated[int | None, typer.Option(help="sample from the k most likely tokens; 0: off")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="sample from the smallest set of this probability; 1: off")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="drop tokens below this share of the best one's probability; 0: off")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="above 1: avoid what prompt and answer hold; 1: off")
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="above 0: avoid what the answer holds")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="above 0: the more, the more often it does")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID:VALUE added to a token's logit; may be given several times")
    ] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(min=0, help="tokens before a stop token may come")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=32, help="with --json: log-probabilities, and of the N best")
    ] = None,
    seed: Annotated[int, typer.Option(help="a seeded text is the same with and without speculation")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="end before this string; may be given several times")
    ] = None,
    speculate: Annotated[bool, typer.Option(help="use the draft head, or decode plainly")] = True,
    nodes: NodesOption = None,
    levels: LevelsOption = None,
    top_k_draft: TopKDraftOption = None,
    tree_shape: TreeShapeOption = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="apply the chat template, or continue the text as it is")
    ] = True,
    dtype: DtypeOption = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of text")] = False,
) -> None:
    """Answers prompts. With one prompt the text streams, drafted tokens marked by colour.

    Of sampling, what is not given is what the target's generation_config.json sets, else off: the most likely
    token, 128 of them.
    """
    from eagle_decode.demo import tokens_per_second
    from eagle_decode.generation_config import set_fields
    from eagle_decode.models.tokenizer import chat_prompt
    from eagle_decode.sampling import SamplingParams
    from eagle_decode.terminal import as_dict, results_with_progress, show_errors, show_stream

    if logprobs is not None and not as_json:
        raise ValueError("logprobs: expected --json beside it, got none")
    options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": [_bias(text) for text in logit_bias or ()],
        "min_new_tokens": min_new_tokens,
        "logprobs": logprobs is not None,
        "top_logprobs": logprobs or 0,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "stop": stop,
    }
    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**{"max_new_tokens": None} | given)  # faults show before anything is loaded
    texts = [sys.stdin.read() if text == "-" else text for text in prompt]
    for text in texts:
        if not text.strip():
            raise ValueError(f"prompt: expected text, got {text!r}")
    notes = Console(stderr=True)
    tree = TreeOptions(nodes, levels, top_k_draft, tree_shape)
    engine = open_engine(
        notes,
        target,
        head if speculate else None,
        head_format=head_format if speculate else None,
        dtype=dtype,
        tree=tree,
        max_batch=min(4, len(texts)),
    )
    sampling = replace(engine.default_sampling, **given)
    if taken := set_fields(engine.default_sampling, given):
        notes.print(f"note: generation_config.json sets {taken}", style="dim", markup=False, highlight=False)
    prompts = [chat_prompt(engine.tokenizer, text) if chat else text for text in texts]
    if as_json:
        results = engine.generate(prompts, sampling, speculate=speculate)
        shape = {"tree_shape": tree_shape} if tree_shape and head and speculate else {}
        shown = [as_dict(text, result) | shape for text, result in zip(texts, results, strict=True)]
        typer.echo(json.dumps(shown, indent=2))
        if show_errors(notes, results):
            raise typer.Exit(1)
        return
    out = Console(highlight=False)
    if len(prompts) == 1:
        stream = engine.stream(prompts, sampling, speculate=speculate)
        show_stream(out, engine.tokenizer, stream)
        results = stream.results
    else:
        results = results_with_progress(notes, engine, prompts, sampling, speculate)
        for text, result in zip(texts, results, strict=True):
            out.print(f"> {text}", markup=False)
            out.print(result.text, markup=False, soft_wrap=True)
            out.print()
    done = engine.metrics
    notes.print(
        f"{done.tokens} tokens, {tokens_per_second(done):.1f} tokens/s, "
        + (
            f"{done.tokens_per_cycle:.2f} tokens per cycle"
            if head and speculate
            else f"decoded plainly ({'--no-speculate' if head else 'no --head'})"
        ),
        style="dim",
        highlight=False,
    )
    if show_errors(notes, results):
        raise typer.Exit(1)


@app.command()
def inspect(
    head: Annotated[str, typer.Argument(help="folder of a draft head, or `demo` for the shipped one")],
    target: Annotated[
        str | None, typer.Option(help="its target, to check what the head borrows from it")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document instead of a table")
    ] = False,
) -> None:
    """Shows what the loader found in a draft head, what it decided, and why."""
    from rich.table import Table

    from eagle_decode.heads import inspect_head
    from eagle_decode.models.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(target) if target else None
    loaded = inspect_head(
        head_folder(head),
        target_config=checkpoint.config if checkpoint else None,
        target_tensors=checkpoint.tensors if checkpoint else None,
    )
    if as_json:
        sizes = {
            name: getattr(loaded, name)
            for name in (
                "kind",
                "hidden_size",
                "target_hidden_size",
                "feature_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "intermediate_size",
                "vocab_size",
                "draft_vocab_size",
                "norm_eps",
                "rope_theta",
                "rope_scaling",
                "max_positions",
                "feature_layers",
                "feedback_post_norm",
                "norm_before_residual",
            )
        }
        decisions = [decision._asdict() for decision in loaded.report]
        typer.echo(
            json.dumps(
                {**sizes, "dtype": str(loaded.dtype).removeprefix("torch."), "report": decisions}, indent=2
            )
        )
        return
    shown = Table(title=str(head_folder(head)), title_justify="left")
    for column in ("what", "decision", "why"):
        shown.add_column(column, overflow="fold")
    for decision in loaded.report:
        shown.add_row(*map(str, decision))
    Console().print(shown, markup=False)


app.command()(train)


@app.command()
def demo(
    target: TargetOption = "smollm2-135m",
    head: HeadOption = "demo",
    head_format: Annotated[
        str, typer.Option(help="the head's weights: fp8, int8, int4, int8_dynamic, or as stored: stored")
    ] = "int8",
    prompt: Annotated[
        list[str] | None, typer.Option(help="instead of the built-in ones; may be given several times")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each kind")] = 3,
    nodes: NodesOption = None,
    levels: LevelsOption = None,
    top_k_draft: TopKDraftOption = None,
    tree_shape: TreeShapeOption = None,
) -> None:
    """Streams answers of a small model with drafted tokens marked, and compares them with plain decoding."""
    from eagle_decode.demo import PROMPTS, run_demo

    console = Console(highlight=False)
    tree = TreeOptions(nodes, levels, top_k_draft, tree_shape)
    engine = open_engine(
        console,
        target,
        head,
        head_format=None if head_format == "stored" else head_format,
        dtype="bfloat16",
        tree=tree,
        max_batch=1,
    )
    import eagle_cuda

    setting = f"{target}, head {head} ({head_format}), {tree}, {eagle_cuda.num_threads()} threads."
    identical = run_demo(
        console,
        engine,
        prompt or PROMPTS,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        setting=setting,
    )
    if not identical:
        raise typer.Exit(1)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"logit_bias: expected ID:VALUE, got {text!r}") from None


if __name__ == "__main__":
    main()
