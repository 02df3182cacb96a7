"""verify_rejection: a chain that is accepted whole, against a plain read of the rows that are visited, and
against sample_tokens with verify, which emits by the other rule.

    python benchmarks/bench_rejection.py [--vocabs 32000 128256] [--levels 4] [--batches 1 8] [--rounds 10]
                                         [--json FILE]

Rows are softmaxes of normal logits with a deviation of 3, with nine tenths moved to the drafted token. The
sampled scheme reads two rows a node. sample_tokens reads every row and returns log-probabilities too; it
needs no softmax before it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# Before torch starts its threads: they would spin on the cores of whatever is timed after it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.console import Console
from rich.table import Table
from timing import environment, interleave, paired_ratio, write_json

import eagle_cuda
from eagle_cuda._extension import _C
from eagle_cuda.sampling import sample_tokens
from eagle_cuda.tree import tree_from_parents
from eagle_cuda.verify import verify, verify_rejection

SCHEMES = ("point_mass", "coin_walk", "chain")


def arms(vocab: int, levels: int, batch: int) -> dict:
    nodes = levels + 1
    tokens = torch.arange(nodes, dtype=torch.int32)[None].expand(batch, -1)
    tree = tree_from_parents(tokens, [list(range(-1, levels))] * batch)
    probs = torch.softmax(torch.randn(batch, nodes, vocab) * 3, -1) / 10
    probs[:, torch.arange(levels), torch.arange(1, nodes)] += 0.9
    logits = probs.log()
    seq_lens = torch.full((batch,), 100, dtype=torch.int32)
    seeds, heat = torch.arange(batch), torch.ones(batch)
    positions = (seq_lens[:, None] + 1 + torch.arange(nodes)).int()
    coins = {"coins": torch.zeros(batch, nodes), "final_coins": torch.zeros(batch)}

    def reject(scheme):
        draft = probs if scheme == "chain" else None
        out = verify_rejection(tree, probs, seq_lens, scheme=scheme, draft_probs=draft, **coins)
        if out.num_accepted.tolist() != [levels] * batch:
            raise SystemExit(f"verify_rejection, {scheme}: expected the whole chain, got {out.num_accepted}")
        options = {"scheme": scheme, "draft_probs": draft, "out": out, **coins}
        return lambda: verify_rejection(tree, probs, seq_lens, **options)

    def match():
        target = sample_tokens(logits, temperature=heat, seeds=seeds, positions=positions).tokens
        return verify(tree, target, seq_lens)

    found = {scheme: reject(scheme) for scheme in SCHEMES}
    data = probs.flatten().view(torch.uint8)
    return {**found, "sample and match": match, "read": lambda: _C.read_probe(data)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabs", type=int, nargs="+", default=[32000, 128256], metavar="V")
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(eagle_cuda.num_threads())
    console = Console()
    console.print(environment(), highlight=False)
    table = Table(title=f"{options.levels} levels, all accepted; {eagle_cuda.num_threads()} threads")
    for column in ("rule", "V", "B", "us", "times a read of the rows", "of sample and match"):
        table.add_column(column, justify="right")
    results = []
    for vocab in options.vocabs:
        for batch in options.batches:
            samples = interleave(arms(vocab, options.levels, batch), rounds=options.rounds, warmup=2)
            for rule in (*SCHEMES, "sample and match"):
                row = {
                    "rule": rule,
                    "vocab": vocab,
                    "batch": batch,
                    "microseconds": samples[rule].minimum * 1e6,
                    "reads": paired_ratio(samples[rule], samples["read"]),
                    "of_sample_and_match": paired_ratio(samples[rule], samples["sample and match"]),
                }
                results.append(row)
                table.add_row(
                    rule,
                    str(vocab),
                    str(batch),
                    f"{row['microseconds']:.0f}",
                    f"{row['reads']:.1f}",
                    f"{row['of_sample_and_match']:.2f}",
                )
    console.print(table)
    if options.json:
        write_json(options.json, {"rejection": results})


if __name__ == "__main__":
    main()
