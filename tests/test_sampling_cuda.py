"""sample_tokens: every way through its kernels gives the bits of the CPU backend, in as few reads as
promised.

With --backend cpu the same cases compare this machine's instruction set with the generic one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_cuda.sampling import Sampled, gumbel_noise, sample_tokens
from guarded import Guards
from sampling_cases import (
    BATCHES,
    CORNER_VOCAB,
    CORNERS,
    FULL,
    Batch,
    Setting,
    corner_settings,
    make_corner,
    make_logits,
    sample,
    words,
)
from state_cases import STATE_CASES, state_words

ROOT = Path(__file__).resolve().parent.parent


def cpu_extension() -> str:
    """The extension without emulated kernels of the same build; empty: the one in place."""
    named = Path(os.environ.get("EAGLE_CUDA_EXTENSION", ""))
    built = named.parent.parent / named.name if named.parent.name.startswith("simt_") else named
    return str(built) if built.is_file() else ""


def on_the_cpu(path: Path, backend: str, *arguments: str) -> dict[str, np.ndarray]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "tests")),
        "EAGLE_CUDA_EXTENSION": cpu_extension(),
    }
    if backend == "cpu":
        environment["EAGLE_CPU_ISA"] = "generic"
    command = [sys.executable, str(ROOT / "tests" / "sampling_cases.py"), str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


@pytest.fixture(scope="module")
def cpu_words(tmp_path_factory, backend):
    return on_the_cpu(tmp_path_factory.mktemp("cpu") / "words.npz", backend)


@pytest.fixture(scope="module")
def cpu_words_full(tmp_path_factory, backend):
    return on_the_cpu(tmp_path_factory.mktemp("cpu") / "full.npz", backend, "full")


def compare(batch: Batch, expected: np.ndarray) -> None:
    guards = Guards()
    count = len(batch.settings)
    out = Sampled(guards.new(count, 1), guards.new(count, 1, dtype=torch.float32), guards.new(count, 1))
    got = words(sample(batch, out))
    guards.check()
    for i, setting in enumerate(batch.settings):
        assert got[:, i].tolist() == expected[:, i].tolist(), (i, setting, batch.rule)


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("key", BATCHES)
def test_the_bits_are_those_of_the_cpu(key, cpu_words):
    compare(BATCHES[key], cpu_words[key])


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("key", STATE_CASES)
def test_the_bits_with_a_state_are_those_of_the_cpu(key, cpu_words):
    assert np.array_equal(state_words(key), cpu_words[f"state-{key}"])


@pytest.mark.full
@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("key", FULL)
def test_the_bits_are_those_of_the_cpu_in_more_cases(key, cpu_words_full):
    compare(FULL[key], cpu_words_full[f"full-{key}"])


def winners_and_limits(batch: Batch) -> tuple[list[int], dict[str, list[Setting]]]:
    """The token that wins without limits, by row, and limits that only just keep it or only just lose it."""
    winners = sample(batch).tokens[:, 0].tolist()
    limits: dict[str, list[Setting]] = {
        f"{name} {fate}": [] for name in ("top-k", "top-p", "both", "joint") for fate in ("keeps", "loses")
    }
    for i, (token, logits) in enumerate(zip(winners, make_logits(batch)[:, 0].float().numpy())):
        order = np.lexsort((np.arange(batch.vocab), -logits))  # T = 1: z = logit
        masses = np.exp((logits[order] - logits.max()).astype(np.float64))
        rank = int(np.flatnonzero(order == token)[0])
        survivors = min(batch.vocab - 1, rank + 1 + (batch.vocab - rank) // 2)
        for name, among in (("top-p", batch.vocab), ("both", survivors), ("joint", batch.vocab)):
            for fate, before in (("keeps", rank + 0.5), ("loses", rank - 0.5)):
                mass = masses[: int(before)].sum() + 0.5 * masses[int(before)] if before > 0 else 0.0
                limits[f"{name} {fate}"].append(
                    batch.settings[i]._replace(
                        top_p=mass / masses[:among].sum(), top_k=0 if name == "top-p" else survivors
                    )
                )
        limits["top-k keeps"].append(batch.settings[i]._replace(top_k=rank + 1))
        limits["top-k loses"].append(batch.settings[i]._replace(top_k=max(rank, 1)))
    return winners, limits


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (300, torch.float16),
        (9001, torch.bfloat16),
        pytest.param(32001, torch.float32, marks=pytest.mark.unchecked),
    ],
)
def test_boundaries_to_the_token(vocab, dtype):
    """Which token wins says little about where top-k and top-p end, unless they end at the winner."""
    kinds = ["normal", "flat", "near", "ties", "two", "clusters"]
    batch = Batch(vocab, dtype, [Setting(kind) for kind in kinds * 2], skew=1)
    winners, limits = winners_and_limits(batch)
    lost = 0
    for name, settings in limits.items():
        rule = "joint" if name.startswith("joint") else "sequential"
        tokens = sample(batch._replace(settings=settings, rule=rule)).tokens[:, 0].tolist()
        for token, winner, setting in zip(tokens, winners, settings):
            if name.endswith("keeps"):
                assert token == winner, (name, setting)
            else:
                lost += token != winner
                # The most likely token cannot be lost.
                assert token != winner or setting.top_k == 1 or setting.top_p < 1e-3, (name, setting)
    assert lost >= 3 * len(batch.settings)


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("vocab", [1024, 16384])
def test_top_p_at_a_mass_that_is_exact(vocab):
    """Flat rows and p = n / V: n tokens stay, not one more; listed and counted by key."""
    batch = Batch(vocab, torch.float32, [Setting("flat")] * 6)
    winners = sample(batch).tokens[:, 0].tolist()
    for more in (0, 1):
        settings = [Setting("flat", top_p=(winner + more) / vocab) for winner in winners]
        tokens = sample(batch._replace(settings=settings)).tokens[:, 0].tolist()
        assert [token == winner for token, winner in zip(tokens, winners)] == [bool(more)] * 6


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("vocab", [9, 300])
def test_rows_that_do_not_exist(vocab):
    """Nothing is read of them; without log-probabilities and flags nothing else changes."""
    logits = torch.full((3, 4, vocab), float("nan"))
    counts = [2, -1, 9]
    logits[0, :2, vocab // 2] = 1.0
    logits[2, :, 3] = 2.0
    arguments = {
        "temperature": torch.tensor([1.0, 1.0, 0.0]),
        "seeds": torch.arange(3),
        "positions": torch.zeros(3, 4, dtype=torch.int32),
        "num_nodes": torch.tensor(counts, dtype=torch.int32),
    }
    guards = Guards()
    whole = Sampled(guards.new(3, 4), guards.new(3, 4, dtype=torch.float32), guards.new(3, 4))
    sample_tokens(logits, **arguments, out=whole)
    tokens = guards.new(3, 4)
    sample_tokens(logits, **arguments, out=Sampled(tokens, None, None))
    guards.check()
    half = vocab // 2
    assert whole.tokens.tolist() == [[half, half, 0, 0], [0] * 4, [3] * 4]
    assert torch.equal(tokens, whole.tokens)
    assert not whole.log_probs.any()
    assert not whole.flags.any()


@pytest.mark.op("gumbel_noise", "sample_tokens")
@pytest.mark.parametrize("skew", [0, 1, 2, 3])
def test_the_noise_is_the_noise_of_the_choice(skew):
    """Flat rows: the token is that of the largest noise, at every alignment."""
    vocab, rows = 1021, 3
    seeds = torch.arange(rows) * 31
    positions = torch.arange(rows, dtype=torch.int32)
    noise = gumbel_noise(seeds, positions, vocab)
    whole = torch.zeros(rows, vocab + 4)
    out = sample_tokens(
        whole[:, None, skew : skew + vocab],
        temperature=torch.ones(rows),
        seeds=seeds,
        positions=positions[:, None],
    )
    assert out.tokens[:, 0].tolist() == noise.argmax(1).tolist()


# kind of row, reads, settings
READS = [
    ("normal", 1, {"temperature": 0.0}),
    ("normal", 1, {}),
    ("flat", 1, {}),
    ("normal", 2, {"min_p": 0.05}),
    ("normal", 2, {"top_k": 50, "top_p": 0.9}),
    ("normal", 2, {"temperature": 0.05, "top_p": 0.9}),
    ("normal", 3, {"top_p": 0.9}),
    ("normal", 3, {"top_k": 12000}),
    ("normal", 4, {"top_k": 12000, "top_p": 0.9}),
    ("near", 4, {"top_k": 12000, "top_p": 0.9}),
    ("flat", 4, {"top_k": 50}),
    ("flat", 4, {"top_p": 0.9, "min_p": 0.5}),
    ("two", 4, {"top_k": 25000, "top_p": 0.95}),
]


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "reads", "options"), READS)
def test_reads_of_a_row(kind, reads, options, dtype, simulator):
    batch = Batch(32001, dtype, [Setting(kind, **options)], skew=1)
    size = batch.vocab * torch.finfo(dtype).bits // 8
    with simulator.counting() as counters:
        sample(batch)
    assert counters.launches == 1
    assert reads * size <= counters.global_load_bytes <= reads * size + 64
    # In 16-byte pieces but for the two ends.
    assert counters.global_load_sectors <= reads * (size // 32 + 40)


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("kind", CORNERS)
def test_four_reads_of_a_row_in_a_corner(kind, simulator):
    """Wherever top-p ends when the bounds of the mass that top-k leaves do not say in which bucket."""
    for setting in corner_settings(kind):
        with simulator.counting() as counters:
            sample(Batch(CORNER_VOCAB, torch.float32, [setting]))
        assert 4 * 4 * CORNER_VOCAB <= counters.global_load_bytes <= 4 * 4 * CORNER_VOCAB + 64, setting


def favourite_at(row: torch.Tensor, rank: int) -> tuple[torch.Tensor, int, int]:
    """The values of `row` in an order in which the token of this rank wins; that token, and the seed."""
    z = row.sort(descending=True).values
    tied = (z == z[rank]).nonzero()[:, 0]
    before, after = rank - int(tied[0]), int(tied[-1]) - rank
    for seed in range(100):
        noise = gumbel_noise(torch.tensor([seed]), torch.zeros(1, dtype=torch.int32), len(row))[0]
        token = int(noise.argmax())
        ids = torch.randperm(len(row), generator=torch.Generator().manual_seed(seed))
        below, above = ids[ids < token], ids[ids > token]
        if len(below) < before or len(above) < after:
            continue
        others = torch.cat([below[before:], above[after:]])
        tie = torch.cat([below[:before], torch.tensor([token]), above[:after]])
        mixed = torch.empty_like(row)
        mixed[torch.cat([others[: tied[0]], tie, others[tied[0] :]])] = z
        if int((mixed + noise).argmax()) == token:
            return mixed, token, seed
    raise AssertionError("no such seed")


@pytest.mark.op("sample_tokens")
@pytest.mark.parametrize("kind", [kind for kind in CORNERS if kind != "dust"])
def test_corners_to_the_token(kind):
    """A token that wins if it takes part does so where top-p ends with it, not where it ends before it."""
    corner = CORNERS[kind]
    for rank in corner.ranks:
        row, token, seed = favourite_at(make_corner(corner), rank)
        z = row.sort(descending=True).values[: corner.top_k]
        masses = torch.exp((z - z[0]).double())
        ends = [masses[:rank].sum() + masses[rank] / 2, masses[:rank].sum() - masses[rank] / 2]
        tokens = (
            sample_tokens(
                row.repeat(2, 1, 1),
                temperature=torch.ones(2),
                seeds=torch.full((2,), seed),
                positions=torch.zeros(2, 1, dtype=torch.int32),
                top_k=torch.full((2,), corner.top_k, dtype=torch.int32),
                top_p=torch.stack(ends).div(masses.sum()).float(),
            )
            .tokens[:, 0]
            .tolist()
        )
        assert tokens[0] == token, rank
        assert tokens[1] != token, rank


def test_cases_reach_every_alignment():
    """What the cases are for: rows that begin at, and beside, a boundary of 16 bytes."""
    offsets = {
        (batch.dtype, make_logits(batch).data_ptr() % 16) for batch in BATCHES.values() if batch.vocab < 300
    }
    assert len(offsets) >= 4
