"""What the command line shows: streamed text with its drafted tokens marked, and tables of figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from eagle_decode.sequence import Chunk, Result
from eagle_decode.text import TextStream

DRAFTED = "bold green"


class MarkedStream:
    """Prints the text of one request as it comes, tokens that were drafted and then confirmed in another
    colour.

    brackets: where the console has no colours, put drafted runs between ‹ and ›.
    """

    def __init__(self, console: Console, tokenizer: Any, *, brackets: bool = False):
        self._console = console
        self._pieces = TextStream(tokenizer)  # finds how much of a chunk's text its drafted tokens made
        self._brackets = brackets and console.color_system is None
        self._open = False

    def show(self, chunk: Chunk) -> None:
        """Prints what `chunk` adds."""
        drafted = sum(chunk.accepted)
        self._pieces.push(chunk.tokens[:drafted])
        split = len(self._pieces.take())
        self._pieces.push(chunk.tokens[drafted:])
        self._pieces.take()
        text = chunk.text or ""
        self._print(text[:split], drafted=True)
        self._print(text[split:], drafted=False)
        if chunk.finish_reason is not None:
            self._bracket(False)
            self._console.print()

    def _print(self, text: str, *, drafted: bool) -> None:
        if text:
            self._bracket(drafted)
            self._console.print(Text(text, style=DRAFTED if drafted else ""), end="", soft_wrap=True)

    def _bracket(self, drafted: bool) -> None:
        if self._brackets and drafted != self._open:
            self._console.print(Text("‹" if drafted else "›"), end="", soft_wrap=True)
            self._open = drafted


def show_stream(
    console: Console, tokenizer: Any, chunks: Iterable[Chunk], *, brackets: bool = False
) -> list[int]:
    """Prints one request's chunks as they come; returns its tokens."""
    stream, tokens = MarkedStream(console, tokenizer, brackets=brackets), []
    for chunk in chunks:
        stream.show(chunk)
        tokens += chunk.tokens
    return tokens


def table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, caption: str | None = None
) -> Table:
    """A table whose first column is text and whose others are figures. A row of None draws a line.
    In a narrow terminal the text wraps; figures stay whole. Text stands as it is, brackets too."""
    made = Table(
        title=escape(title),
        caption=None if caption is None else escape(caption),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for i, column in enumerate(columns):
        made.add_column(escape(column), justify="left" if i == 0 else "right", no_wrap=i > 0)
    for row in rows:
        if row is None:
            made.add_section()
        else:
            made.add_row(*(escape(cell) if isinstance(cell, str) else f"{cell:.2f}" for cell in row))
    return made


def as_dict(prompt: str, result: Result) -> dict[str, Any]:
    """What `--json` prints of a result."""
    asked = {"logprobs": result.logprobs, "top_logprobs": result.top_logprobs}
    return {
        "prompt": prompt,
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        **({} if result.error is None else {"error": result.error}),
        **{name: value for name, value in asked.items() if value is not None},
        "metrics": result.metrics.to_dict(),
    }


def show_errors(console: Console, results: Iterable[Result]) -> bool:
    """Prints why requests ended that could not go on; returns whether there were any."""
    errors = [result.error for result in results if result.error is not None]
    for error in errors:
        console.print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)
    return bool(errors)


def results_with_progress(
    console: Console, engine: Any, prompts: list, sampling: Any, speculate: bool
) -> list[Result]:
    """The result of every prompt, with a progress bar over the tokens meanwhile."""
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokens", total=len(prompts) * sampling.max_new_tokens)
        stream = engine.stream(prompts, sampling, speculate=speculate)
        for chunk in stream:
            progress.advance(task, len(chunk.tokens))
    return stream.results
