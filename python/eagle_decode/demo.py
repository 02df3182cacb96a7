"""The demo: a small model answers prompts with draft-accepted tokens marked, and plain decoding has to
agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

from rich.console import Console
from rich.markup import escape

from eagle_decode.engine import Engine
from eagle_decode.metrics import Metrics
from eagle_decode.models.tokenizer import chat_prompt
from eagle_decode.sampling import SamplingParams
from eagle_decode.sequence import Result
from eagle_decode.terminal import show_stream, table

TARGET = "smollm2-135m"
HEAD = Path(__file__).with_name("demo_head")

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List five ways to save water at home, with one sentence about each.",
)


def tokens_per_second(metrics: Metrics) -> float:
    """Tokens of the cycles over their wall time: the prompt's pass, and the token that it yields, are left
    out."""
    return (metrics.tokens - metrics.first_tokens) / metrics.decode_seconds if metrics.decode_seconds else 0.0


@dataclass
class Comparison:
    """One prompt decoded plainly and speculatively, several times in turn."""

    prompt: str
    streamed: list[int]
    plain: list[Result] = field(default_factory=list)
    speculative: list[Result] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Every run gave the very tokens that were streamed, and none failed."""
        runs = (*self.plain, *self.speculative)
        return all(result.tokens == self.streamed and result.error is None for result in runs)

    @property
    def tokens_per_cycle(self) -> float:
        return self.speculative[0].metrics.tokens_per_cycle

    @property
    def plain_rate(self) -> float:
        """Tokens per second, of the fastest run."""
        return max(tokens_per_second(result.metrics) for result in self.plain)

    @property
    def speculative_rate(self) -> float:
        return max(tokens_per_second(result.metrics) for result in self.speculative)


def run_demo(
    console: Console,
    engine: Engine,
    prompts: Sequence[str] = PROMPTS,
    *,
    max_new_tokens: int = 128,
    repeats: int = 3,
    setting: str = "",
) -> bool:
    """Streams an answer to every prompt, decodes each `repeats` times both ways, prints the figures.
    `setting` (model, tree, threads) stands under the table. Returns whether plain and speculative decoding
    gave the same tokens everywhere."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    engine.generate(
        [chat_prompt(engine.tokenizer, "Hello")], SamplingParams(max_new_tokens=8)
    )  # touches all memory once
    mark = "[bold green]green[/]" if console.color_system else "‹marked›"
    console.print(f"Tokens that the draft head proposed and the model confirmed are {mark}.\n")
    comparisons = []
    for prompt in prompts:
        ids = chat_prompt(engine.tokenizer, prompt)
        console.print(f"[bold]>[/] {escape(prompt)}", highlight=False)
        comparison = Comparison(
            prompt, show_stream(console, engine.tokenizer, engine.stream([ids], sampling), brackets=True)
        )
        with console.status("decoding the same plainly and speculatively, in turn"):
            for _ in range(repeats):
                comparison.plain += engine.generate([ids], sampling, speculate=False)
                comparison.speculative += engine.generate([ids], sampling)
        comparisons.append(comparison)
        console.print()
    show_figures(console, comparisons, repeats, setting)
    return all(comparison.identical for comparison in comparisons)


def _joint_rate(tokens: Sequence[int], rates: Sequence[float]) -> float:
    """Of several texts with a rate each; those that ended before the first cycle have none."""
    timed = [(count, rate) for count, rate in zip(tokens, rates, strict=True) if rate]
    return sum(count for count, _ in timed) / sum(count / rate for count, rate in timed) if timed else 0.0


def show_figures(
    console: Console, comparisons: Sequence[Comparison], repeats: int, setting: str = ""
) -> None:
    """Prints the table of a demo."""

    def cells(name: str, of: Sequence[Comparison]) -> list:
        identical = "yes" if all(c.identical for c in of) else "NO"
        tokens = [len(c.streamed) for c in of]
        plain, speculative = (
            _joint_rate(tokens, rates)
            for rates in ([c.plain_rate for c in of], [c.speculative_rate for c in of])
        )
        metrics = Metrics()
        for comparison in of:
            metrics.add(comparison.speculative[0].metrics)
        return [
            name,
            str(sum(tokens)),
            metrics.tokens_per_cycle,
            f"{plain:.1f}",
            f"{speculative:.1f}",
            f"{speculative / plain:.2f}x" if plain and speculative else "-",
            identical,
        ]

    rows = [cells(shorten(c.prompt, 60, placeholder=" ..."), [c]) for c in comparisons]
    if len(comparisons) > 1:
        rows += [None, cells("all", comparisons)]
    columns = (
        "prompt",
        "tokens",
        "tokens\nper cycle",
        "plain\ntok/s",
        "speculative\ntok/s",
        "speed-up",
        "identical",
    )
    agree = sum(comparison.identical for comparison in comparisons)
    caption = (
        f"Best of {repeats} runs each, plain and speculative in turn; prompts are not timed.\n"
        f"Tokens of every run compared: identical for {agree} of {len(comparisons)} prompts."
        + (f"\n{setting}" if setting else "")
    )
    console.print(table("Plain and speculative decoding", columns, rows, caption=caption))
