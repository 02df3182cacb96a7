"""End to end, greedy: transformers, our plain decoding, and speculation with several tree sizes, in one run.

    python benchmarks/end_to_end.py --prompts question.jsonl --json benchmarks/results/end_to_end.json

Every prompt is decoded by every mode in turn, in an order that rotates, because machines drift. Times are
those of the
tokens after the first: the prompt's pass is not counted, for anyone. transformers runs the same weights in
the same dtype. Without --prompts a few built-in ones are used; the figures in README are over the first 20
of MT-bench (question.jsonl in FastChat's repository, fastchat/llm_judge/data/mt_bench).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from timing import write_json

import eagle_cuda
from eagle_decode import Engine, SamplingParams
from eagle_decode.demo import HEAD, PROMPTS, TARGET
from eagle_decode.heads import load_head
from eagle_decode.metrics import PHASES, Metrics
from eagle_decode.models.checkpoint import Checkpoint
from eagle_decode.models.llama import load_target
from eagle_decode.models.tokenizer import chat_prompt, load_tokenizer, stop_token_ids
from eagle_decode.terminal import table

GOALS = (  # what, least, aim
    ("tokens per cycle, 32 nodes", 2.0, 2.4),
    ("tokens per cycle, 8 nodes", 1.7, 2.0),
    ("plain / transformers", 1.8, 3.0),
    ("speculative / plain", 1.2, 1.5),
)


class Tree(NamedTuple):
    nodes: int
    levels: int
    top_k: int

    @property
    def name(self) -> str:
        return f"tree {self.nodes}:{self.levels}:{self.top_k}"


TREES = (Tree(4, 3, 2), Tree(6, 3, 3), Tree(8, 4, 4), Tree(32, 6, 8))


class Run(NamedTuple):
    """One prompt decoded once."""

    tokens: list[int]
    seconds: float  # from the first token to the last
    metrics: Metrics | None

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


@dataclass
class Mode:
    """A way to decode, and what it did: runs[prompt][repeat]."""

    name: str
    decode: Callable[[list[int]], Run]
    runs: list[list[Run]] = field(default_factory=list)

    def median_rate(self, prompt: int) -> float:
        return statistics.median(run.rate for run in self.runs[prompt])

    @property
    def tokens_per_cycle(self) -> float:
        return self._total(lambda runs: runs[0]).tokens_per_cycle

    @property
    def milliseconds_per_cycle(self) -> dict[str, float]:
        """Where a cycle's time goes, of every prompt's fastest run."""
        total = self._total(lambda runs: min(runs, key=lambda run: run.seconds))
        phases = {phase: seconds for phase, seconds in total.seconds.items() if phase != "prefill"}
        return (
            {phase: 1e3 * seconds / total.cycles for phase, seconds in phases.items()} if total.cycles else {}
        )

    def _total(self, choose: Callable[[list[Run]], Run]) -> Metrics:
        total = Metrics()
        for runs in self.runs:
            total.add(choose(runs).metrics or Metrics())
        return total


class TransformersDecoder:
    """transformers' own greedy generation of the same weights."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, stops: list[int], max_new_tokens: int):
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = dict(checkpoint.config)
        rope = {
            "rope_type": "default",
            **(settings.pop("rope_scaling") or {}),
            "rope_theta": settings.pop("rope_theta"),
        }
        config = AutoConfig.for_model(settings.pop("model_type"), **settings, rope_parameters=rope)
        self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        report = self._model.load_state_dict(dict(checkpoint.tensors), strict=False)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        if set(report.missing_keys) - tied or report.unexpected_keys:
            raise ValueError(f"transformers: {report}")
        self._model.tie_weights()
        self._stops, self._max_new_tokens = stops, max_new_tokens

    @torch.inference_mode()
    def __call__(self, prompt: list[int]) -> Run:
        ids, times = torch.tensor([prompt]), _Times()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._max_new_tokens,
            do_sample=False,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0],
            streamer=times,
        )
        return Run(out[0, len(prompt) :].tolist(), times.seen[-1] - times.seen[1], None)


class _Times:
    """A streamer of transformers that notes when the prompt, and then each token, is handed out."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, _: Any) -> None:
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        pass


def engine_decoder(engine: Engine, sampling: SamplingParams, speculate: bool) -> Callable[[list[int]], Run]:
    def decode(prompt: list[int]) -> Run:
        (result,) = engine.generate([prompt], sampling, speculate=speculate)
        if result.error is not None:
            raise RuntimeError(result.error)
        return Run(result.tokens, result.metrics.decode_seconds, result.metrics)

    return decode


def read_prompts(path: Path | None, count: int) -> list[str]:
    """First turns of a file of JSON lines with `turns` (MT-bench), or the built-in prompts."""
    if path is None:
        return list(PROMPTS)[:count]
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["turns"][0] for line in lines]


def measure(modes: list[Mode], prompts: list[list[int]], repeats: int, console: Console) -> None:
    """Decodes every prompt `repeats` times by every mode, in turn."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=len(modes) * len(prompts) * repeats)
        for mode in modes:
            mode.decode(prompts[0])
        for i, prompt in enumerate(prompts):
            if not console.is_terminal:  # a bar would stay invisible in a log
                console.print(f"prompt {i + 1} of {len(prompts)}")
            for mode in modes:
                mode.runs.append([])
            for repeat in range(repeats):
                turn = (i + repeat) % len(modes)
                for mode in modes[turn:] + modes[:turn]:
                    progress.update(task, description=f"prompt {i + 1}: {mode.name}")
                    mode.runs[i].append(mode.decode(prompt))
                    progress.advance(task)


def summarise(modes: list[Mode], count: int) -> list[dict[str, Any]]:
    """Figures of each mode; ratios are against plain decoding, prompt by prompt."""
    plain = next(mode for mode in modes if mode.name == "plain")
    made = []
    for mode in modes:
        by_median = [mode.median_rate(i) / plain.median_rate(i) for i in range(count)]
        # Seconds for all prompts, each in its fastest run: load on the machine only ever adds to a time.
        fastest = [min(run.seconds for run in mode.runs[i]) for i in range(count)]
        tokens = sum(len(mode.runs[i][0].tokens) - 1 for i in range(count))
        made.append(
            {
                "mode": mode.name,
                "tokens_per_cycle": mode.tokens_per_cycle or 1.0,
                "tokens_per_second_median": statistics.median(mode.median_rate(i) for i in range(count)),
                "tokens_per_second_best": tokens / sum(fastest),
                "ratio_to_plain_median": statistics.median(by_median),
                "milliseconds_per_cycle": mode.milliseconds_per_cycle,
                "identical_to_plain": sum(
                    all(run.tokens == plain.runs[i][0].tokens for run in mode.runs[i]) for i in range(count)
                ),
                "seconds": [[run.seconds for run in runs] for runs in mode.runs],
                "num_tokens": [len(runs[0].tokens) for runs in mode.runs],
            }
        )
    base = next(row for row in made if row["mode"] == "plain")
    for row in made:
        row["ratio_to_plain_best"] = row["tokens_per_second_best"] / base["tokens_per_second_best"]
    return made


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured figure for each goal that this run has one for; ratios by medians, and by minima beside
    them."""
    figures: dict[str, tuple[float, float | None]] = {}
    trees = [row for row in rows if row["mode"].startswith("tree")]
    for nodes in (32, 8):
        sized = [row["tokens_per_cycle"] for row in trees if row["mode"].startswith(f"tree {nodes}:")]
        if sized:
            figures[f"tokens per cycle, {nodes} nodes"] = max(sized), None
    for row in rows:
        if row["mode"] == "transformers":
            figures["plain / transformers"] = 1 / row["ratio_to_plain_median"], 1 / row["ratio_to_plain_best"]
    if trees:
        best = max(trees, key=lambda row: row["ratio_to_plain_median"])
        figures["speculative / plain"] = best["ratio_to_plain_median"], best["ratio_to_plain_best"]
    return [
        {"goal": what, "least": least, "aim": aim, "median": figures[what][0], "minima": figures[what][1]}
        for what, least, aim in GOALS
        if what in figures
    ]


def show(
    console: Console, rows: list[dict[str, Any]], reached: list[dict[str, Any]], count: int, repeats: int
) -> None:
    columns = (
        "mode",
        "tokens\nper cycle",
        "tok/s\nmedian",
        "tok/s\nbest",
        "x plain\nmedian",
        "x plain\nbest",
        "identical",
    )
    cells = [
        [
            row["mode"],
            row["tokens_per_cycle"],
            f"{row['tokens_per_second_median']:.1f}",
            f"{row['tokens_per_second_best']:.1f}",
            row["ratio_to_plain_median"],
            row["ratio_to_plain_best"],
            f"{row['identical_to_plain']} of {count}",
        ]
        for row in rows
    ]
    caption = f"{count} prompts, {repeats} runs each, modes in turn; best: every prompt's fastest run"
    console.print(table("Greedy decoding, end to end", columns, cells, caption=caption))
    phases = [phase for phase in PHASES if phase != "prefill"]
    cells = [
        [row["mode"], *(row["milliseconds_per_cycle"][phase] for phase in phases)]
        for row in rows
        if row["milliseconds_per_cycle"]
    ]
    console.print(table("Milliseconds per cycle, fastest runs", ("mode", *phases), cells))
    cells = [
        [row["goal"], row["median"], "" if row["minima"] is None else row["minima"], row["least"], row["aim"],
         "yes" if row["median"] >= row["least"] else "NO"]
        for row in reached
    ]  # fmt: skip
    console.print(table("Goals", ("figure", "by\nmedians", "by\nminima", "least", "aim", "reached"), cells))


def parse_trees(text: str) -> list[Tree]:
    """`8:4:4,32:6:8` -> trees of (nodes, levels, top-k)."""
    trees = []
    for item in text.split(","):
        parts = item.split(":")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise SystemExit(f"--trees: expected nodes:levels:top_k, got {item!r}")
        trees.append(Tree(*map(int, parts)))
    return trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TARGET, help="Hugging Face folder, .gguf file, or packaged name")
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of the draft head")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns`, as MT-bench's question.jsonl")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--trees", type=parse_trees, default=TREES, help="nodes:levels:top_k, comma-separated"
    )
    parser.add_argument(
        "--head-formats", nargs="+", default=["stored"], metavar="FORMAT",
        help="formats of the head's weights: stored, fp8, int8, int4, int8_dynamic",
    )  # fmt: skip
    parser.add_argument("--no-transformers", action="store_true", help="leave the peer out")
    parser.add_argument("--json", type=Path, help="write every figure there")
    chosen = parser.parse_args()

    console = Console(highlight=False)
    torch.set_num_threads(eagle_cuda.num_threads())
    sampling = SamplingParams(max_new_tokens=chosen.max_new_tokens)
    with console.status("loading"):
        target, tokenizer = load_target(chosen.target), load_tokenizer(chosen.target)
        checkpoint = target.checkpoint
        stops = stop_token_ids(tokenizer, checkpoint.config)
        sampling = SamplingParams(max_new_tokens=chosen.max_new_tokens, stop_token_ids=stops)
        prompts = [chat_prompt(tokenizer, text) for text in read_prompts(chosen.prompts, chosen.num_prompts)]
        room = max(map(len, prompts)) + chosen.max_new_tokens
        head = load_head(chosen.head, target_config=checkpoint.config, target_tensors=checkpoint.tensors)
        modes = [Mode("plain", engine_decoder(Engine(target, max_batch=1, max_length=room), sampling, False))]
        for tree, head_format in itertools.product(chosen.trees, chosen.head_formats):
            stored = head_format == "stored"
            engine = Engine(
                target,
                head,
                head_format=None if stored else head_format,
                levels=tree.levels,
                draft_top_k=tree.top_k,
                max_nodes=tree.nodes,
                max_batch=1,
                max_length=room,
            )
            name = tree.name if stored else f"{tree.name} {head_format}"
            modes.append(Mode(name, engine_decoder(engine, sampling, True)))
        if not chosen.no_transformers:
            peer = TransformersDecoder(checkpoint, target.dtype, stops, chosen.max_new_tokens)
            modes.insert(0, Mode("transformers", peer))

    measure(modes, prompts, chosen.repeats, console)
    rows = summarise(modes, len(prompts))
    reached = goals(rows)
    show(console, rows, reached, len(prompts), chosen.repeats)
    if chosen.json:
        import transformers

        figures = {
            "transformers": transformers.__version__,
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
            "target": str(chosen.target),
            "prompts": chosen.prompts.name if chosen.prompts else "built in",
            "trees": [tree._asdict() for tree in chosen.trees],
            "head_formats": chosen.head_formats,
            "max_new_tokens": chosen.max_new_tokens,
            "repeats": chosen.repeats,
            "modes": rows,
            "goals": reached,
        }
        write_json(chosen.json, figures)


if __name__ == "__main__":
    main()
