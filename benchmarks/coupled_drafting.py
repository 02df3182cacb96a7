"""Tokens per cycle at temperature 0, and above it with coupled and with the usual drafting.

    python benchmarks/coupled_drafting.py --prompts question.jsonl --json FILE

Coupled drafting ranks the draft's candidates with the target's own noise, the usual one by draft probability
(docs/coupled_drafting.md). Verification takes what equals the target's own token, so for one prompt, seed and
temperature both arms write the same text, which is asserted: they are compared along the same tokens. Counts
do not depend on the machine's speed or load.

Greedy text is another text, and an easier one. `--every N` therefore also puts every arm, the greedy one too,
at every N-th token of the texts written at the highest temperature, and lets it run a single cycle there.

`--couplings` compares how much of the noise counts (`default`: what the engine takes for such a request), and
`--taus` adds arms that soften the coupled confidence by other tau than 1. `coupling.py` measures the coupling
alone, faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from end_to_end import Tree, parse_trees, read_prompts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from timing import start, write_json

from eagle_decode import Engine, SamplingParams
from eagle_decode.demo import HEAD, TARGET
from eagle_decode.heads import load_head
from eagle_decode.heads.loaded import LoadedHead
from eagle_decode.metrics import Metrics
from eagle_decode.models.base import Target
from eagle_decode.models.llama import load_target
from eagle_decode.models.tokenizer import chat_prompt, load_tokenizer, stop_token_ids
from eagle_decode.terminal import table

COLUMNS = (
    TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"),
    TimeRemainingColumn(),
)  # fmt: skip


class Arm(NamedTuple):
    """One way to draft, at one temperature."""

    temperature: float
    coupling: float | None  # 0: the usual drafting; None: what the engine takes
    tau: float

    @property
    def drafting(self) -> str:
        if not self.temperature:
            return "greedy"
        if self.coupling == 0:
            return "usual"
        name = "coupled" if self.coupling is None else f"coupling {self.coupling:g}"
        return name if self.tau == 1 else f"{name}, tau {self.tau:g}"


def arms_of(temperatures: list[float], couplings: list[float | None], taus: list[float]) -> list[Arm]:
    arms = [Arm(0.0, None, 1.0)]
    for temperature in temperatures:
        arms.append(Arm(temperature, 0.0, 1.0))
        arms += [Arm(temperature, c, tau) for c in couplings if c != 0 for tau in taus]
    return arms


Texts = dict[tuple[int, float, int], list[int]]  # by prompt, temperature and seed
Engines = dict[tuple[float | None, float], Engine]  # by coupling and tau


def measure(
    engines: Engines, arms: list[Arm], prompts: list[list[int]], seeds: list[int],
    settings: dict[str, Any], console: Console,
) -> tuple[dict[Arm, Metrics], Texts]:  # fmt: skip
    """Every prompt once greedily, and with every seed above temperature 0: counts, and what was written."""
    texts: Texts = {}
    totals = {arm: Metrics() for arm in arms}
    steps = sum(len(prompts) * (len(seeds) if arm.temperature else 1) for arm in arms)
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for i, prompt in enumerate(prompts):
            if not console.is_terminal:  # a bar would stay invisible in a log
                console.print(f"prompt {i + 1} of {len(prompts)}")
            for arm in arms:
                for seed in seeds if arm.temperature else [0]:
                    progress.update(task, description=f"prompt {i + 1}: T {arm.temperature:g} {arm.drafting}")
                    sampling = SamplingParams(temperature=arm.temperature, seed=seed, **settings)
                    (result,) = engines[arm.coupling, arm.tau].generate([prompt], sampling)
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    if texts.setdefault((i, arm.temperature, seed), result.tokens) != result.tokens:
                        raise AssertionError(f"prompt {i + 1}, {arm}, seed {seed}: another text")
                    totals[arm].add(result.metrics)
                    progress.advance(task)
    return totals, texts


def measure_cycles(
    engines: Engines, arms: list[Arm], prompts: list[list[int]], texts: Texts,
    every: int, settings: dict[str, Any], console: Console,
) -> dict[Arm, Metrics]:  # fmt: skip
    """One cycle of every arm at every `every`-th token of the texts of the highest temperature."""
    hottest = max(temperature for _, temperature, _ in texts)
    arms = [arm for arm in arms if arm.temperature in (0.0, hottest)]
    totals = {arm: Metrics() for arm in arms}
    chosen = [(i, seed, text) for (i, temperature, seed), text in texts.items() if temperature == hottest]
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        task = progress.add_task("single cycles", total=len(chosen))
        for i, seed, text in chosen:
            for at in range(0, len(text) - 1, every):
                for arm in arms:
                    sampling = SamplingParams(temperature=arm.temperature, seed=seed, **settings)
                    stream = engines[arm.coupling, arm.tau].stream([prompts[i] + text[:at]], sampling)
                    next(stream)  # the prompt's pass emits the cycle's root
                    chunk = next(stream, None)
                    if chunk is not None:
                        totals[arm].count_cycle(sum(chunk.accepted), 1)
                    stream.close()
            progress.advance(task)
            if not console.is_terminal:
                console.print(f"single cycles: text {progress.tasks[0].completed:.0f} of {len(chosen)}")
    return totals


def summarise(totals: dict[Arm, Metrics]) -> list[dict[str, Any]]:
    """One row an arm: tokens per cycle, accepted drafts per cycle, against greedy and against the usual."""
    greedy = next(metrics for arm, metrics in totals.items() if not arm.temperature)
    rows = []
    for arm, metrics in totals.items():
        usual = totals.get(Arm(arm.temperature, 0.0, 1.0), metrics)
        accepted = metrics.accepted_tokens / metrics.cycles
        accepted_usual = usual.accepted_tokens / usual.cycles
        rows.append(
            {
                "temperature": arm.temperature,
                "drafting": arm.drafting,
                "tokens": metrics.tokens,
                "cycles": metrics.cycles,
                "tokens_per_cycle": metrics.tokens_per_cycle,
                "accepted_per_cycle": accepted,
                "of_greedy": metrics.tokens_per_cycle / greedy.tokens_per_cycle,
                "tokens_per_cycle_to_usual": metrics.tokens_per_cycle / usual.tokens_per_cycle,
                "accepted_to_usual": accepted / accepted_usual if accepted_usual else None,
                "acceptance_per_depth": metrics.acceptance_per_depth,
            }
        )
    return rows


def show(console: Console, title: str, rows: list[dict[str, Any]], caption: str) -> None:
    columns = (
        "T", "drafting", "tokens\nper cycle", "of T = 0", "accepted\nper cycle", "tokens per cycle\nx usual",
        "accepted\nx usual",
    )  # fmt: skip

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    cells = [
        [
            f"{row['temperature']:g}", row["drafting"], figure(row["tokens_per_cycle"]),
            f"{row['of_greedy']:.1%}", figure(row["accepted_per_cycle"]),
            figure(row["tokens_per_cycle_to_usual"]), figure(row["accepted_to_usual"]),
        ]
        for row in rows
    ]  # fmt: skip
    console.print(table(title, columns, cells, caption=caption))


def numbers(kind: Any) -> Any:
    return lambda text: [kind(item) for item in text.split(",")]


def coupling_of(text: str) -> float | None:
    return None if text == "default" else share(text)


def share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 1, got {text}")
    return value


def load(chosen: argparse.Namespace) -> tuple[Target, LoadedHead, list[list[int]], tuple[int, ...]]:
    """What --target, --head, --prompts and --num-prompts name; of the prompts their tokens, and the tokens
    that end an answer."""
    target, tokenizer = load_target(chosen.target), load_tokenizer(chosen.target)
    checkpoint = target.checkpoint
    prompts = [chat_prompt(tokenizer, text) for text in read_prompts(chosen.prompts, chosen.num_prompts)]
    head = load_head(chosen.head, target_config=checkpoint.config, target_tensors=checkpoint.tensors)
    return target, head, prompts, tuple(stop_token_ids(tokenizer, checkpoint.config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TARGET, help="Hugging Face folder, .gguf file, or packaged name")
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of the draft head")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns`, as MT-bench's question.jsonl")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--temperatures", type=numbers(float), default=[0.3, 0.7, 1.0], help="comma-separated"
    )
    parser.add_argument("--seeds", type=numbers(int), default=[0, 1, 2], help="comma-separated")
    parser.add_argument(
        "--couplings", type=numbers(coupling_of), default=[None], help="comma-separated numbers, or `default`"
    )
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--taus", type=numbers(float), default=[1.0], help="comma-separated")
    parser.add_argument("--every", type=int, default=8, help="tokens between two single cycles; 0: none")
    parser.add_argument("--tree", type=parse_trees, default=[Tree(32, 6, 8)], help="nodes:levels:top_k")
    parser.add_argument("--json", type=Path, help="write every figure there")
    chosen = parser.parse_args()

    console = start()
    with console.status("loading"):
        target, head, prompts, ends = load(chosen)
        arms = arms_of(chosen.temperatures, chosen.couplings, chosen.taus)
        (tree,) = chosen.tree
        room = max(map(len, prompts)) + chosen.max_new_tokens + tree.levels + 2
        engines = {
            (coupling, tau): Engine(
                target, head, levels=tree.levels, draft_top_k=tree.top_k, max_nodes=tree.nodes, max_batch=1,
                max_length=room, coupling=coupling, tau=tau,
            )
            for coupling, tau in {(arm.coupling, arm.tau) for arm in arms}
        }  # fmt: skip
    settings = {
        "max_new_tokens": chosen.max_new_tokens,
        "stop_token_ids": ends,
        "top_k": chosen.top_k, "top_p": chosen.top_p, "min_p": chosen.min_p,
    }  # fmt: skip
    totals, texts = measure(engines, arms, prompts, chosen.seeds, settings, console)
    rows = summarise(totals)
    caption = f"{len(prompts)} prompts, {len(chosen.seeds)} seeds, {tree.name}"
    show(console, "Free running", rows, caption)
    cycles = []
    if chosen.every:
        every = {**settings, "max_new_tokens": tree.levels + 2}
        cycles = summarise(measure_cycles(engines, arms, prompts, texts, chosen.every, every, console))
        show(console, "Single cycles along the hottest texts", cycles, caption)
    if chosen.json:
        write_json(
            chosen.json,
            {
                "target": str(chosen.target),
                "tree": tree._asdict(),
                "seeds": chosen.seeds,
                "prompts": len(prompts),
                "max_new_tokens": chosen.max_new_tokens,
                "truncation": {name: settings[name] for name in ("top_k", "top_p", "min_p")},
                "every": chosen.every,
                "free_running": rows,
                "single_cycles": cycles,
            },
        )


if __name__ == "__main__":
    main()
