"""A real model, prompt by prompt: is what speculation writes what plain decoding writes?

    python benchmarks/exact_demo.py --prompts question.jsonl --json benchmarks/results/exact_demo.json

Every prompt is decoded plainly and speculatively at every temperature, in batches of unequal sizes, so that
requests join and leave at other moments. Compared are tokens, text, log-probabilities to the bit, and why
each ended. A run that was stopped goes on where it was. Without --prompts a few built-in ones are used;
MT-bench is question.jsonl in FastChat's repository (fastchat/llm_judge/data/mt_bench).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from end_to_end import Tree, parse_trees, read_prompts
from rich.console import Console
from timing import start, write_json

from eagle_cuda._extension import _C
from eagle_decode import Engine, SamplingParams
from eagle_decode.demo import HEAD, TARGET
from eagle_decode.heads import load_head
from eagle_decode.metrics import Metrics
from eagle_decode.models.llama import load_target
from eagle_decode.models.tokenizer import chat_prompt, load_tokenizer, stop_token_ids
from eagle_decode.sequence import Result
from eagle_decode.terminal import table

ROOT = Path(__file__).resolve().parent.parent
GROUP = 5  # prompts that are decoded together, and the step in which a run is resumed


@dataclass
class State:
    """What is done so far: a row per group and temperature. Worth something for the same library and
    settings only."""

    path: Path
    key: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, path: Path, head: Path, settings: dict[str, Any]) -> State:
        library = hashlib.sha256(Path(_C.__file__).read_bytes())
        for folder in (ROOT / "eagle_cuda", ROOT / "python" / "eagle_decode", head):
            for source in sorted(folder.rglob("*")):
                if source.suffix in (".py", ".json", ".safetensors"):
                    library.update(source.read_bytes())
        state = cls(path, {**settings, "library": library.hexdigest()}, [])
        if path.is_file():
            stored = json.loads(path.read_text())
            if stored["key"] == state.key:
                state.rows = stored["rows"]
        return state

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"key": self.key, "rows": self.rows}))


def same(a: Result, b: Result) -> bool:
    """Equal to the bit."""
    names = ("tokens", "text", "logprobs", "finish_reason", "stop_reason", "error")
    return all(repr(getattr(a, name)) == repr(getattr(b, name)) for name in names)


def run_group(
    plain: Engine, drafted: Engine, prompts: list[list[int]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Decodes some prompts both ways; what is to be kept of it."""
    sampling = [SamplingParams(**settings, seed=i, logprobs=True) for i in range(len(prompts))]
    clock = time.perf_counter
    begin = clock()
    one = plain.generate(prompts, sampling, speculate=False)
    between = clock()
    other = drafted.generate(prompts, sampling)
    total = Metrics()
    for result in other:
        total.add(result.metrics)
    return {
        "identical": [same(a, b) for a, b in zip(one, other, strict=True)],
        "tokens": [len(result.tokens) for result in one],
        "sha256": [hashlib.sha256(repr(result.tokens).encode()).hexdigest() for result in one],
        "accepted_lengths": total.accepted_lengths,
        "plain_seconds": between - begin,
        "speculative_seconds": clock() - between,
    }


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per temperature."""
    made = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        own = [row for row in rows if row["temperature"] == temperature]
        total = Metrics()
        for row in own:
            counts = row["accepted_lengths"]
            total.add(Metrics(cycles=sum(counts), accepted_lengths=counts))
        joined = "".join(digest for row in own for digest in row["sha256"])
        made.append(
            {
                "temperature": temperature,
                "prompts": sum(len(row["identical"]) for row in own),
                "identical": sum(sum(row["identical"]) for row in own),
                "tokens": sum(sum(row["tokens"]) for row in own),
                "cycles": total.cycles,
                "tokens_per_cycle": total.tokens_per_cycle,
                "accepted_lengths": total.accepted_lengths,
                "sha256_of_tokens": hashlib.sha256(joined.encode()).hexdigest(),
            }
        )
    return made


def show(console: Console, rows: list[dict[str, Any]], caption: str) -> None:
    columns = ("T", "prompts", "identical", "tokens", "cycles", "tokens\nper cycle")
    cells = [
        [
            f"{row['temperature']:g}", str(row["prompts"]), str(row["identical"]), f"{row['tokens']:,}",
            f"{row['cycles']:,}", row["tokens_per_cycle"],
        ]
        for row in rows
    ]  # fmt: skip
    console.print(table("Speculative and plain decoding", columns, cells, caption=caption))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TARGET, help="Hugging Face folder, .gguf file, or packaged name")
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of the draft head")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns`, as MT-bench's question.jsonl")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,1", help="comma-separated")
    parser.add_argument("--tree", type=parse_trees, default=[Tree(8, 4, 4)], help="nodes:levels:top_k")
    parser.add_argument("--batches", default="5,3", help="requests at a time, plainly and speculatively")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "exact_demo.json")
    chosen = parser.parse_args()

    console = start()
    with console.status("loading"):
        target, tokenizer = load_target(chosen.target), load_tokenizer(chosen.target)
        checkpoint = target.checkpoint
        texts = read_prompts(chosen.prompts, chosen.num_prompts)
        prompts = [chat_prompt(tokenizer, text) for text in texts]
        head = load_head(chosen.head, target_config=checkpoint.config, target_tensors=checkpoint.tensors)
        (tree,) = chosen.tree
        plain_batch, batch = map(int, chosen.batches.split(","))
        room = max(map(len, prompts)) + chosen.max_new_tokens
        plain = Engine(target, tokenizer=tokenizer, max_batch=plain_batch, max_length=room)
        drafted = Engine(
            target, head, tokenizer, levels=tree.levels, draft_top_k=tree.top_k, max_nodes=tree.nodes,
            max_batch=batch, max_length=room,
        )  # fmt: skip
    stops = stop_token_ids(tokenizer, checkpoint.config)
    temperatures = [float(item) for item in chosen.temperatures.split(",")]
    settings = {
        "target": str(chosen.target),
        "head": chosen.head.name,
        "prompts": hashlib.sha256(repr(texts).encode()).hexdigest(),
        "max_new_tokens": chosen.max_new_tokens,
        "tree": list(tree),
        "batches": [plain_batch, batch],
    }
    state = State.of(chosen.state, chosen.head, settings)
    done = {(row["temperature"], row["first"]) for row in state.rows}
    todo = [
        (temperature, first)
        for first in range(0, len(prompts), GROUP)
        for temperature in temperatures
        if (temperature, first) not in done
    ]
    begin = time.monotonic()
    for i, (temperature, first) in enumerate(todo):
        sampling = {
            "temperature": temperature, "max_new_tokens": chosen.max_new_tokens, "stop_token_ids": stops
        }  # fmt: skip
        row = run_group(plain, drafted, prompts[first : first + GROUP], sampling)
        state.add({"temperature": temperature, "first": first, **row})
        left = (time.monotonic() - begin) / (i + 1) * (len(todo) - i - 1) / 60
        console.print(
            f"prompts {first + 1} to {first + len(row['identical'])}, T = {temperature:g}: "
            f"{sum(row['identical'])} of {len(row['identical'])} identical, about {left:.0f} min left",
            highlight=False,
        )
    wanted = {(t, first) for first in range(0, len(prompts), GROUP) for t in temperatures}
    rows = summarise([row for row in state.rows if (row["temperature"], row["first"]) in wanted])
    show(
        console,
        rows,
        f"{tree.name}, {chosen.max_new_tokens} tokens at most, batches of {plain_batch} and {batch}",
    )
    if chosen.json:
        write_json(chosen.json, {**settings, "temperatures": rows})
    return int(any(row["identical"] != row["prompts"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
