"""sampling: the target's token for every row of logits, against a plain read of the logits and against torch.

    python benchmarks/bench_sampling.py [--vocabs 32000 49152 262144] [--rows 1 8] [--rounds 10] [--json FILE]

fp32 logits, normal with a deviation of 3: how much top-p leaves depends on that. Ours also returns
log-probabilities and flags, and its noise is counter-based (10 Philox rounds for four tokens), so that a
token depends on seed and position alone; torch draws from its own generator.
"""

from __future__ import annotations

import os
from typing import NamedTuple

# Before torch starts its threads: they would spin on the cores of whatever is timed after it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.console import Console
from rich.table import Table
from timing import Samples, interleave, paired_ratio, parser, ratio, start, write_json

import eagle_cuda
from eagle_cuda._extension import _C
from eagle_cuda.sampling import gumbel_noise, sample_tokens

DEVIATION = 3.0
SLACK = 1e-3  # between fp32 here and there: of the noised logits, and of top-p's mass


class Mode(NamedTuple):
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


MODES = {
    "greedy": Mode(0.0),
    "T=1": Mode(1.0),
    "top-k 50": Mode(1.0, top_k=50),
    "top-p 0.9": Mode(1.0, top_p=0.9),
}


class Inputs(NamedTuple):
    logits: torch.Tensor  # [1, N, V]
    seeds: torch.Tensor
    positions: torch.Tensor


def make_inputs(rows: int, vocab: int) -> Inputs:
    logits = torch.randn(1, rows, vocab) * DEVIATION
    return Inputs(logits, torch.tensor([12345]), torch.arange(100, 100 + rows, dtype=torch.int32)[None])


def ours(inputs: Inputs, mode: Mode):
    """The call of one mode, its small tensors made once."""
    options = {
        "temperature": torch.tensor([mode.temperature]),
        "top_k": torch.tensor([mode.top_k], dtype=torch.int32) if mode.top_k else None,
        "top_p": torch.tensor([mode.top_p]) if mode.top_p < 1 else None,
    }
    out = sample_tokens(inputs.logits, seeds=inputs.seeds, positions=inputs.positions, **options)
    return lambda: sample_tokens(
        inputs.logits, seeds=inputs.seeds, positions=inputs.positions, out=out, **options
    )


def support(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[N, V] bool: tokens that top-k or top-p leaves."""
    order = logits.sort(dim=-1, descending=True)
    rank_keeps = torch.ones_like(order.values, dtype=torch.bool)
    if top_k:
        rank_keeps[:, top_k:] = False
    if top_p < 1:
        probabilities = torch.softmax(order.values, dim=-1)
        rank_keeps &= probabilities.cumsum(-1) - probabilities < top_p
    return torch.zeros_like(rank_keeps).scatter(1, order.indices, rank_keeps)


def torch_sample(logits: torch.Tensor, mode: Mode) -> torch.Tensor:
    """A sample by torch: masks as above, then the argmax of probability through exponential noise."""
    if mode.temperature == 0:
        return logits.argmax(-1)
    z = logits / mode.temperature
    if mode.top_k:
        z = z.masked_fill(z < z.topk(mode.top_k).values[:, -1:], -torch.inf)
    if mode.top_p < 1:
        z = z.masked_fill(~support(z, 0, mode.top_p), -torch.inf)
    return (torch.softmax(z, -1) / torch.empty_like(z).exponential_()).argmax(-1)


def check(inputs: Inputs, mode: Mode) -> None:
    """The token is the argmax of the noised logits within the support."""
    tokens = ours(inputs, mode)().tokens[0].long()
    logits = inputs.logits[0]
    noised, least, most = logits, torch.ones_like(logits, dtype=torch.bool), None
    if mode.temperature > 0:
        rows, vocab = logits.shape
        noise = gumbel_noise(inputs.seeds.expand(rows).contiguous(), inputs.positions[0], vocab)
        noised = logits / mode.temperature + noise
        least = support(logits / mode.temperature, mode.top_k, mode.top_p - SLACK if mode.top_p < 1 else 1)
        most = support(logits / mode.temperature, mode.top_k, mode.top_p + SLACK)
    got = noised.gather(1, tokens[:, None])[:, 0]
    best = noised.masked_fill(~least, -torch.inf).amax(-1)
    inside = most is None or bool(most.gather(1, tokens[:, None]).all())
    if not inside or bool((got < best - SLACK).any()):
        raise SystemExit(f"sample_tokens {mode}: tokens {tokens.tolist()} are not the noised argmax")


def measure(inputs: Inputs, rounds: int) -> dict[str, Samples]:
    """Arms "read", and "ours MODE" and "torch MODE"."""
    data = inputs.logits.view(-1).view(torch.uint8)
    # The arms before and after also leave the logits in the caches, as the LM head does.
    arms = {"warm": lambda: _C.read_probe(data), "read": lambda: _C.read_probe(data)}
    for name, mode in MODES.items():
        check(inputs, mode)
        arms[f"ours {name}"] = ours(inputs, mode)
        arms[f"torch {name}"] = lambda mode=mode: torch_sample(inputs.logits[0], mode)
    return interleave(arms, rounds=rounds)


def report(vocab: int, by_rows: dict[int, dict[str, Samples]], console: Console) -> list[dict]:
    table = Table(title=f"sample_tokens, fp32, V {vocab}; {eagle_cuda.num_threads()} threads")
    columns = ("mode", "rows", "us", "us/row", "ns/logit", "of read", "torch us", "x torch")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    results = []
    for name in MODES:
        for rows, samples in by_rows.items():
            arm, torchs, read = samples[f"ours {name}"], samples[f"torch {name}"], samples["read"]
            row = {
                "mode": name,
                "vocab": vocab,
                "rows": rows,
                "microseconds": arm.minimum * 1e6,
                "median_microseconds": arm.median * 1e6,
                "share_of_read": ratio(read, arm),
                "read_gigabytes_per_second": 4 * rows * vocab / read.minimum / 1e9,
                "torch_microseconds": torchs.minimum * 1e6,
                "speedup_over_torch": ratio(torchs, arm),
                "paired_speedup_over_torch": paired_ratio(torchs, arm),
            }
            results.append(row)
            table.add_row(
                name,
                str(rows),
                f"{row['microseconds']:.0f}",
                f"{row['microseconds'] / rows:.0f}",
                f"{row['microseconds'] * 1e3 / (rows * vocab):.3f}",
                f"{row['share_of_read']:.0%}",
                f"{row['torch_microseconds']:.0f}",
                f"{row['speedup_over_torch']:.1f}",
            )
    console.print(table)
    return results


def main() -> None:
    line = parser(__doc__, rounds=10)
    line.add_argument("--vocabs", type=int, nargs="+", default=[32000, 49152, 262144], metavar="V")
    line.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N")
    options, console = line.parse_args(), start()
    results = []
    with torch.inference_mode():
        for vocab in options.vocabs:
            by_rows = {rows: measure(make_inputs(rows, vocab), options.rounds) for rows in options.rows}
            results += report(vocab, by_rows, console)
    if options.json:
        write_json(options.json, {"sampling": results})


if __name__ == "__main__":
    main()
