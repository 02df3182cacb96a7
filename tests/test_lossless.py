"""Speculative decoding emits what plain decoding emits: equal tokens, and bitwise equal logits behind every
one of them.

An oracle drafter hides the plain continuation among decoys, so that every accepted length occurs, on best
paths and off them; random EAGLE heads draft as they do in use. Negative controls break one thing each and
must be seen.

Cases that name ops run under the emulator too: there the decoder attends by the CUDA kernels. Chosen cases
stand here; random configurations of everything in test_exactness.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import eagle_decode.engine
from eagle_cuda.sampling import Sampled
from eagle_cuda.tree import TreeShape
from eagle_decode.engine import Engine
from eagle_decode.models.llama import LlamaTarget
from eagle_decode.sampling import SamplingParams
from eagle_decode.sequence import Result
from oracle_drafter import OracleDrafter, StaticDrafter, link
from tiny_models import tiny_head, tiny_target

VOCAB = 97
MAX_LENGTH = 400

# Under the emulator. A checked build takes ten times as long: it has the cases without `unchecked`.
attends = pytest.mark.op("append_kv", "tree_attention")
decodes = pytest.mark.op("append_kv", "tree_attention", "sample_tokens", "verify", "compact_kv")
drafts = pytest.mark.op(
    "append_kv", "tree_attention", "draft", "extend_draft", "sample_tokens", "verify", "compact_kv"
)
unchecked = pytest.mark.unchecked


@dataclass
class Run:
    """What a run emitted, and the logits row behind each token, by request."""

    results: list[Result]
    logits: list[torch.Tensor]  # [tokens, V] float32
    moved_rows: int  # cache rows that compaction had to move
    kept_rows: int  # accepted nodes that were in place already
    widths: set[int]

    @property
    def tokens(self) -> list[list[int]]:
        return [result.tokens for result in self.results]

    @property
    def accepted_lengths(self) -> set[int]:
        counts = [result.metrics.accepted_lengths for result in self.results]
        return {length for lengths in counts for length, count in enumerate(lengths) if count}


@dataclass
class Recorder:
    """The engine's observer: copies the logits row of every token that is emitted."""

    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    moved_rows: int = 0
    kept_rows: int = 0
    widths: set[int] = field(default_factory=set)

    def __call__(self, batch, rows, tree, logits) -> None:
        self.widths.add(tree.tokens.shape[1])
        for place, row in enumerate(range(rows.start, rows.stop)):
            path = batch.path[row, : int(batch.num_accepted[row]) + 1].tolist()
            self.rows.setdefault(batch.requests[row].index, []).extend(
                logits[place, node].clone() for node in path
            )
            self.moved_rows += sum(node != i for i, node in enumerate(path))
            self.kept_rows += sum(node == i for i, node in enumerate(path[1:], start=1))


def run(engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams], *, speculate: bool) -> Run:
    engine.observer = recorder = Recorder()
    results = engine.generate(prompts, sampling, speculate=speculate)
    logits = [torch.stack(recorder.rows[i]) for i in range(len(results))]
    return Run(results, logits, recorder.moved_rows, recorder.kept_rows, recorder.widths)


def same(plain: Run, other: Run) -> bool:
    """Equal tokens, equal log-probabilities, and equal bits of the logits."""
    if plain.tokens != other.tokens:
        return False
    if any(a.logprobs != b.logprobs for a, b in zip(plain.results, other.results, strict=True)):
        return False
    pairs = zip(plain.logits, other.logits, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


# ---- cases

SHAPES = {  # levels, max_nodes, branching
    "chain-5": (4, 5, 1),
    "chain-64": (63, 64, 1),
    "tree-8": (3, 8, 3),
    "tree-32": (6, 32, 4),
    "tree-64": (7, 64, 8),
    "star-17": (1, 17, 16),
}
# One tree for every cycle, of EAGLE-1's kind: the better a child's rank, the more stands below it.
STATIC = [-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 5, 6, 8, 11, 11, 15]
STATIC_LEVELS = 5
HEADS = (3, 1, 64)  # query heads, KV heads, head size
OTHER_HEADS = (4, 2, 80)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    shape: str
    batch: int
    temperature: float
    seed: int
    twins: bool = False
    window: int | None = None
    tokens: int = 72
    heads: tuple[int, int, int] = HEADS

    def __str__(self) -> str:
        parts = [
            str(self.dtype).removeprefix("torch."),
            self.shape,
            f"b{self.batch}",
            f"T{self.temperature}",
            f"s{self.seed}",
        ]
        parts += ["twins"] * self.twins + [f"window{self.window}"] * (self.window is not None)
        return "-".join(parts + ["heads{}/{}x{}".format(*self.heads)] * (self.heads != HEADS))


@functools.cache
def target_of(
    dtype: torch.dtype,
    twins: bool = False,
    window: int | None = None,
    vocab_size: int = VOCAB,
    heads: tuple[int, int, int] = HEADS,
) -> LlamaTarget:
    num_heads, num_kv_heads, head_dim = heads
    return tiny_target(
        dtype=dtype,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        twins=twins,
        sliding_window=window,
        max_positions=4096,
    )


def target_for(case: Case) -> LlamaTarget:
    return target_of(case.dtype, case.twins, case.window, heads=case.heads)


def prompts_of(count: int, seed: int, vocab_size: int = VOCAB) -> list[list[int]]:
    """Prompts of unequal lengths, the first a single token."""
    random = np.random.default_rng(seed)
    return [random.integers(vocab_size, size=1 + 13 * i % 60).tolist() for i in range(count)]


def sampling_of(case: Case) -> list[SamplingParams]:
    """Every request has its own seed, and parameters around the case's temperature."""
    extras: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.9, "top_k": 40, "top_k_top_p": "joint"},
        {"min_p": 0.02},
    ]
    return [
        SamplingParams(
            temperature=case.temperature,
            seed=case.seed + 100 * i,
            max_new_tokens=case.tokens + 3 * i,
            logprobs=True,
            **extras[i],
        )
        for i in range(case.batch)
    ]


@functools.cache
def plain_run(case: Case) -> Run:
    engine = Engine(target_for(case), max_batch=case.batch, max_length=MAX_LENGTH)
    plain = run(engine, prompts_of(case.batch, case.seed), sampling_of(case), speculate=False)
    assert plain.accepted_lengths == {0}
    assert plain.widths == {1}
    return plain


def oracle_run(case: Case, **options: Any) -> Run:
    continuations = dict(enumerate(plain_run(case).tokens))
    if case.shape == "static":
        drafter = StaticDrafter(continuations, parents=STATIC, vocab_size=VOCAB, seed=case.seed)
    else:
        levels, max_nodes, branching = SHAPES[case.shape]
        drafter = OracleDrafter(
            continuations,
            levels=levels, max_nodes=max_nodes, branching=branching, vocab_size=VOCAB, seed=case.seed,
            **options,
        )  # fmt: skip
    engine = Engine(target_for(case), draft=drafter, max_batch=case.batch, max_length=MAX_LENGTH)
    return run(engine, prompts_of(case.batch, case.seed), sampling_of(case), speculate=True)


def check_oracle(case: Case) -> None:
    plain, speculative = plain_run(case), oracle_run(case)
    assert same(plain, speculative)
    levels = STATIC_LEVELS if case.shape == "static" else SHAPES[case.shape][0]
    if levels < 16:
        assert speculative.accepted_lengths == set(range(levels + 1))
    else:  # too many for one run: test_every_length_of_a_long_chain has them all
        assert len(speculative.accepted_lengths) >= 4
        assert max(speculative.accepted_lengths) >= 32
    if case.shape.startswith("chain"):
        assert speculative.moved_rows == 0
    else:
        assert speculative.moved_rows > 0
        assert speculative.kept_rows > 0
    assert len({token for tokens in plain.tokens for token in tokens}) >= 8, (
        "the model is too monotonous to test with"
    )


FAST = [
    Case(torch.float32, "tree-32", 3, 0.0, seed=1),
    Case(torch.float32, "chain-5", 1, 0.7, seed=2),
    Case(torch.float32, "tree-8", 2, 1.0, seed=3),
    Case(torch.bfloat16, "tree-64", 4, 0.7, seed=4),
    Case(torch.bfloat16, "star-17", 2, 0.0, seed=5, twins=True),
    Case(torch.bfloat16, "tree-32", 1, 1.0, seed=6, tokens=48),
    Case(torch.bfloat16, "chain-64", 2, 0.0, seed=7),
    Case(torch.float32, "tree-32", 2, 0.7, seed=8, window=11),
    Case(torch.float16, "tree-32", 2, 0.0, seed=9, heads=OTHER_HEADS),
    Case(torch.float16, "chain-5", 1, 1.0, seed=10, heads=OTHER_HEADS, tokens=48),
    Case(torch.float16, "static", 2, 1.0, seed=11),
    Case(torch.bfloat16, "static", 1, 0.0, seed=12, heads=OTHER_HEADS),
]
CHECKED = [FAST[5], FAST[9]]  # short ones: a tree in bf16 and a chain in fp16


def cases(*chosen: Case) -> list[Any]:
    return [
        pytest.param(case, id=str(case), marks=[decodes] if case in CHECKED else [decodes, unchecked])
        for case in chosen
    ]


@pytest.mark.parametrize("case", cases(*FAST))
def test_oracle_drafter(case):
    check_oracle(case)


# ---- the CUDA kernels under the emulator: more of the above in the two types that tensor cores take


WIDE = [
    Case(torch.bfloat16, "tree-64", 2, 1.0, seed=51, heads=OTHER_HEADS),
    Case(torch.bfloat16, "tree-8", 4, 0.0, seed=52, heads=(4, 2, 128)),
    Case(torch.bfloat16, "chain-64", 2, 1.0, seed=53, heads=OTHER_HEADS),
    Case(torch.bfloat16, "static", 3, 1.0, seed=54),
    Case(torch.bfloat16, "tree-32", 3, 0.0, seed=55, window=11),
    Case(torch.bfloat16, "star-17", 2, 0.7, seed=56, heads=(2, 1, 192)),
    Case(torch.float16, "tree-64", 3, 0.0, seed=57),
    Case(torch.float16, "tree-8", 2, 1.0, seed=58, twins=True),
    Case(torch.float16, "chain-64", 2, 0.0, seed=59),
    Case(torch.float16, "static", 2, 0.0, seed=60, heads=(6, 2, 96)),
    Case(torch.float16, "tree-32", 2, 1.0, seed=61, window=40, heads=OTHER_HEADS),
    Case(torch.float16, "star-17", 1, 0.0, seed=62, heads=(3, 1, 256)),
]


@pytest.mark.full
@pytest.mark.parametrize("case", cases(*WIDE))
def test_oracle_drafter_in_half_precision(case):
    check_oracle(case)


@attends
def test_every_layer_attends_by_the_kernels(simulator, monkeypatch):
    """In a whole run, prompts included: a launch for each layer of each pass, and traffic of every kernel."""
    passes, forward = [], LlamaTarget.forward

    def counted(self, *args, **options):
        passes.append(self)
        return forward(self, *args, **options)

    monkeypatch.setattr(LlamaTarget, "forward", counted)
    ops = ("append_kv", "tree_attention")
    before = {op: simulator.launches(op) for op in ops}
    target = target_of(torch.bfloat16)
    prompt = np.random.default_rng(1).integers(VOCAB, size=70).tolist()
    sampling = SamplingParams(max_new_tokens=8)
    with simulator.counting():
        plain = Engine(target, max_length=128).generate([prompt], sampling)
        drafter = OracleDrafter({0: plain[0].tokens}, levels=3, max_nodes=8, vocab_size=VOCAB)
        drafted = Engine(target, draft=drafter, max_length=128).generate([prompt], sampling)
    assert drafted[0].tokens == plain[0].tokens
    assert target.num_layers == 2
    assert len(passes) >= 10
    for op in ops:
        assert simulator.launches(op) - before[op] == target.num_layers * len(passes)
    table = simulator.traffic_table()
    for source in ("append_kv.cu", "common_pass.cuh", "finish.cuh"):
        assert source in table


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float16, marks=[pytest.mark.full, decodes, unchecked]),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_trees_across_the_borders_of_chunks(dtype):
    """Prompts end just before positions where prefill is cut and attention folds its partial sums."""
    target = target_of(dtype)
    prompts = [
        np.random.default_rng(i).integers(VOCAB, size=n).tolist() for i, n in enumerate((240, 253, 2035))
    ]
    sampling = [SamplingParams(temperature=0.7, seed=i, max_new_tokens=48, logprobs=True) for i in range(3)]
    plain = run(Engine(target, max_batch=3, max_length=2100), prompts, sampling, speculate=False)
    drafter = OracleDrafter(dict(enumerate(plain.tokens)), levels=6, max_nodes=32, vocab_size=VOCAB)
    engine = Engine(target, draft=drafter, max_batch=3, max_length=2100)
    speculative = run(engine, prompts, sampling, speculate=True)
    assert same(plain, speculative)
    assert speculative.moved_rows > 0
    for tokens in plain.tokens:
        assert len(tokens) == 48


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "chain-64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_oracle_drafter_sweep(dtype, shape, temperature):
    for batch in (1, 2, 3, 4):
        for seed in (11, 12):
            twins, window = (batch == 2, 11 if batch == 3 else None)
            check_oracle(Case(dtype, shape, batch, temperature, seed=seed, twins=twins, window=window))


@pytest.mark.full
def test_every_length_of_a_long_chain():
    case = Case(torch.float32, "chain-64", 1, 0.7, seed=21, tokens=64 * 65 // 2 + 80)
    levels, max_nodes, _ = SHAPES[case.shape]
    target = target_for(case)
    engine = Engine(target, max_batch=1, max_length=2400)
    plain = run(engine, prompts_of(1, 21), sampling_of(case), speculate=False)
    drafter = OracleDrafter(
        {0: plain.tokens[0]}, levels=levels, max_nodes=max_nodes, branching=1, vocab_size=VOCAB, ragged=False
    )
    engine = Engine(target, draft=drafter, max_batch=1, max_length=2400)
    speculative = run(engine, prompts_of(1, 21), sampling_of(case), speculate=True)
    assert same(plain, speculative)
    assert speculative.accepted_lengths >= set(range(levels + 1))


# ---- random heads: with a small vocabulary and wide levels, chance alone accepts every length

HEAD_VOCAB = 16


def check_head(
    kind: str,
    dtype: torch.dtype,
    temperature: float,
    batch: int,
    nodes: int,
    seed: int,
    requests: int = 0,
    heads: tuple[int, int, int] = HEADS,
    **options: Any,
) -> set[int]:
    """Returns the accepted lengths that occurred. There are more requests than rows: most join a batch that
    runs. nodes = 0: of a tree_shape among the options."""
    target = target_of(dtype, vocab_size=HEAD_VOCAB, heads=heads)
    head = tiny_head(kind, target, seed=seed, **({"draft_vocab": 13} if kind == "eagle3" else {}))
    tree = {"levels": 3, "draft_top_k": 8, "max_nodes": nodes} if nodes else {}
    engine = Engine(target, head, max_batch=batch, max_length=MAX_LENGTH, **tree, **options)
    prompts = prompts_of(requests or 3 * batch + 4, seed, HEAD_VOCAB)
    sampling = [
        SamplingParams(temperature=temperature, seed=seed + i, max_new_tokens=25 + 5 * (i % 4), logprobs=True)
        for i in range(len(prompts))
    ]
    plain = run(engine, prompts, sampling, speculate=False)
    speculative = run(engine, prompts, sampling, speculate=True)
    assert same(plain, speculative)
    assert speculative.moved_rows > 0
    for result in speculative.results:
        assert result.metrics.speculative
        assert result.metrics.draft_tokens > 0
    return speculative.accepted_lengths


@pytest.mark.parametrize(
    ("kind", "dtype", "temperature", "batch", "nodes"),
    [
        ("eagle3", torch.float32, 0.0, 2, 48),
        ("eagle3", torch.bfloat16, 1.0, 3, 64),
        ("eagle1", torch.bfloat16, 0.0, 3, 64),
        ("eagle1", torch.float32, 0.7, 1, 64),
    ],
)
def test_random_head(kind, dtype, temperature, batch, nodes):
    assert check_head(kind, dtype, temperature, batch, nodes, seed=31) == {0, 1, 2, 3}


# The root's 8 best children, the 5 best of each of those, the best of some of these.
SHAPE = TreeShape(
    [(i,) for i in range(8)]
    + [(i, j) for i in range(8) for j in range(5)]
    + [(i, i % 2, 0) for i in range(8)]
)


@pytest.mark.parametrize(
    ("kind", "dtype", "temperature", "batch"),
    [
        ("eagle3", torch.bfloat16, 1.0, 3),
        ("eagle1", torch.float32, 0.0, 2),
        pytest.param("eagle1", torch.bfloat16, 0.7, 1, marks=pytest.mark.full),
    ],
)
def test_random_head_with_a_static_tree(kind, dtype, temperature, batch):
    lengths = check_head(kind, dtype, temperature, batch, 0, seed=31, tree_shape=SHAPE)
    assert lengths >= {0, 1, 2}


@drafts
@unchecked
@pytest.mark.parametrize(
    ("kind", "dtype", "temperature", "batch", "heads"),
    [
        ("eagle1", torch.bfloat16, 0.0, 2, HEADS),
        ("eagle3", torch.float16, 1.0, 2, OTHER_HEADS),
        pytest.param("eagle1", torch.float16, 0.7, 3, HEADS, marks=pytest.mark.full),
        pytest.param("eagle3", torch.bfloat16, 1.0, 3, OTHER_HEADS, marks=pytest.mark.full),
        pytest.param("eagle3", torch.float32, 0.7, 2, HEADS, marks=pytest.mark.full),
    ],
)
def test_random_head_with_few_requests(kind, dtype, temperature, batch, heads, draft_launches):
    lengths = check_head(kind, dtype, temperature, batch, 33, seed=31, requests=batch + 2, heads=heads)
    assert lengths >= {0, 1, 2}
    assert dtype == torch.float32 or set(draft_launches) <= {1}  # the persistent kernel takes these sizes


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_random_head_sweep(dtype, kind, temperature):
    lengths: set[int] = set()
    for batch in (1, 2, 3, 4):
        coupling = [None, 0.0, 1.0, 0.4][batch - 1]
        lengths |= check_head(kind, dtype, temperature, batch, nodes=48, seed=41 + batch, coupling=coupling)
    assert lengths == {0, 1, 2, 3}


# ---- the test itself: exact ties occur, outputs vary, and every fault is seen


def test_ties_occur_at_the_top():
    plain = plain_run(Case(torch.bfloat16, "star-17", 2, 0.0, seed=5, twins=True))
    tied = 0
    for tokens, logits in zip(plain.tokens, plain.logits, strict=True):
        for token, row in zip(tokens, logits, strict=True):
            best = (row == row.max()).nonzero().flatten().tolist()
            assert token == best[0]
            tied += len(best) > 1
    assert tied > 50


def test_threads_change_no_bit(one_and_two_threads):
    case = Case(torch.bfloat16, "tree-64", 4, 0.7, seed=4)
    one, two = one_and_two_threads(lambda: oracle_run(case))
    assert same(plain_run(case), one)
    assert same(plain_run(case), two)


def test_outputs_vary_with_the_seed_and_the_prompt():
    runs = [plain_run(Case(torch.float32, "tree-8", 2, 1.0, seed=seed)) for seed in (3, 9)]
    outputs = [tuple(tokens) for each in runs for tokens in each.tokens]
    assert len(set(outputs)) == len(outputs)


BROKEN = Case(torch.float32, "tree-32", 2, 0.0, seed=1)
BROKEN_BF16 = Case(torch.bfloat16, "tree-32", 1, 0.0, seed=1)

Arrays = dict[str, np.ndarray]


def drop_ancestor(arrays: Arrays, row: int, planted: list[int]) -> None:
    """A planted node of depth 2 or more no longer sees its parent."""
    if len(planted) > 2:
        parent, node = planted[1], planted[2]
        arrays["mask"][row, node].view(np.uint32)[parent // 32] &= ~np.uint32(1 << parent % 32)


def see_stranger(arrays: Arrays, row: int, planted: list[int]) -> None:
    """A planted node sees a node that is none of its ancestors."""
    if len(planted) > 1 and planted[-1] > len(planted) - 1:
        stranger = next(slot for slot in range(planted[-1]) if slot not in planted)
        arrays["mask"][row, planted[-1]].view(np.uint32)[stranger // 32] |= np.uint32(1 << stranger % 32)


def shift_position(arrays: Arrays, row: int, planted: list[int]) -> None:
    """A planted node stands one position too far."""
    if len(planted) > 1:
        arrays["depths"][row, planted[1]] += 1


def child_before_parent(arrays: Arrays, row: int, planted: list[int]) -> None:
    """A planted node and its parent change slots, everything else being right: parents[i] < i no longer
    holds."""
    if len(planted) < 3:
        return
    a, b = planted[1], planted[2]
    swap = {a: b, b: a}
    for name in ("tokens", "depths"):
        values = arrays[name][row]
        values[a], values[b] = values[b].copy(), values[a].copy()
    parents = arrays["parents"][row]
    parents[a], parents[b] = parents[b], parents[a]
    count = int(arrays["num_nodes"][row])
    for node in range(1, count):
        parents[node] = swap.get(int(parents[node]), int(parents[node]))
    for node in range(count):
        words = arrays["mask"][row, node].view(np.uint32)
        words[:] = 0
        while node >= 0:
            words[node // 32] |= np.uint32(1 << node % 32)
            node = int(parents[node])
    link(arrays, row)


@pytest.mark.parametrize(
    "case", [BROKEN, pytest.param(BROKEN_BF16, marks=[decodes, unchecked])], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("corrupt", [drop_ancestor, see_stranger, shift_position, child_before_parent])
def test_a_broken_tree_is_seen(corrupt: Callable[[Arrays, int, list[int]], None], case):
    assert same(plain_run(case), oracle_run(case))
    assert not same(plain_run(case), oracle_run(case, corrupt=corrupt))


def test_skipped_compaction_is_seen(monkeypatch):
    monkeypatch.setattr(eagle_decode.engine, "compact_kv", lambda *args, **options: None)
    assert not same(plain_run(BROKEN), oracle_run(BROKEN))


def test_one_wrong_cache_row_is_seen(monkeypatch):
    compact = eagle_decode.engine.compact_kv
    spoiled = []

    def compact_then_spoil(caches, *args: Any, **options: Any) -> None:
        compact(caches, *args, **options)
        if not spoiled:
            spoiled.append(True)
            caches[1].k[0, 0] *= 1.01

    monkeypatch.setattr(eagle_decode.engine, "compact_kv", compact_then_spoil)
    assert not same(plain_run(BROKEN), oracle_run(BROKEN))


def test_the_other_tie_order_is_seen(monkeypatch):
    case = Case(torch.float32, "tree-32", 2, 0.0, seed=1, twins=True)
    assert same(plain_run(case), oracle_run(case))

    sample = eagle_decode.engine.sample_tokens

    def highest_id(logits, **options: Any) -> Sampled:
        out = sample(logits, **options)
        out.tokens.copy_(logits.shape[-1] - 1 - logits.flip(-1).argmax(-1))
        return out

    monkeypatch.setattr(eagle_decode.engine, "sample_tokens", highest_id)
    assert not same(plain_run(case), oracle_run(case))


def test_another_seed_is_seen():
    case = Case(torch.float32, "tree-8", 2, 1.0, seed=3)
    other = plain_run(Case(torch.float32, "tree-8", 2, 1.0, seed=4))
    assert not same(plain_run(case), other)
