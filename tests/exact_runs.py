"""Runs a configuration of `exact_draws` plainly and speculatively, compares the two to the bit, and counts
what the speculative run went through.

The two runs differ in all that may not matter: batch, page layout, threads, trees. Rows of the caches that
nothing has written hold NaN. Compared are tokens, text, log-probabilities, the n best, why each request
ended, and the logits behind every token.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import eagle_cuda
import eagle_decode.engine
from eagle_cuda.kv_cache import KVCache, compact_kv
from eagle_cuda.tree import TreeShape
from eagle_decode.engine import Engine
from eagle_decode.models.base import TargetOutput
from eagle_decode.models.llama import LlamaTarget
from eagle_decode.sequence import Result
from exact_draws import ROPES, Draw, ModelDraw, RunDraw
from oracle_drafter import OracleDrafter, StaticDrafter
from tiny_models import ByteTokenizer, tiny_checkpoint, tiny_head

MAX_POSITIONS = 4096

# ---- models whose caches lie in pages


@dataclass
class PagedRows:
    """Keys or values [requests, rows, Hkv, D] that lie in pages: as much of a tensor as the engine uses."""

    pool: torch.Tensor  # [pages, page_size, Hkv, D]
    table: torch.Tensor  # [requests, max_pages] int32
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.table.shape[0], self.num_rows)

    def _at(self, key: tuple[int, slice]) -> tuple[torch.Tensor, torch.Tensor]:
        request, rows = key
        positions = torch.arange(self.num_rows)[rows]
        size = self.pool.shape[1]
        return self.table[request].long()[positions // size], positions % size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return PagedRows(self.pool, self.table[key], self.num_rows)
        return self.pool[self._at(key)]

    def __setitem__(self, key: tuple[int, slice], values: torch.Tensor) -> None:
        self.pool[self._at(key)] = values


def unpaged(cache: KVCache) -> KVCache:
    """The form that ops read."""
    if isinstance(cache.k, PagedRows):
        return KVCache(cache.k.pool, cache.v.pool, cache.k.table)
    return cache


class AnyLayoutTarget(LlamaTarget):
    """A target whose caches are contiguous or, with a page_size, in pages dealt out at random; new ones hold
    NaN."""

    page_size: int | None = None

    def new_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """See Target."""
        caches = super().new_cache(batch_size, capacity)
        if self.page_size is None:
            for cache in caches:
                cache.k.fill_(torch.nan)
                cache.v.fill_(torch.nan)
            return caches
        per_request = -(-capacity // self.page_size)
        pages = torch.randperm(
            batch_size * per_request + 3, generator=torch.Generator().manual_seed(capacity), dtype=torch.int32
        )
        table = pages[: batch_size * per_request].view(batch_size, per_request).contiguous()

        def pool(like: torch.Tensor) -> PagedRows:
            shape = (len(pages), self.page_size, *like.shape[2:])
            return PagedRows(torch.full(shape, torch.nan, dtype=like.dtype), table, capacity)

        return [KVCache(pool(cache.k), pool(cache.v)) for cache in caches]

    def forward(self, tokens: torch.Tensor, *, cache: Any, **options: Any) -> TargetOutput:
        """See Target."""
        return super().forward(tokens, cache=[unpaged(layer) for layer in cache], **options)


def compact_any(caches: list[KVCache], *args: Any, **options: Any) -> None:
    """compact_kv of caches in either form."""
    compact_kv([unpaged(cache) for cache in caches], *args, **options)


@functools.lru_cache(maxsize=64)
def target_of(model: ModelDraw) -> AnyLayoutTarget:
    num_heads, num_kv_heads, head_dim = model.heads
    return AnyLayoutTarget(
        tiny_checkpoint(
            family=model.family,
            dtype=getattr(torch, model.dtype),
            vocab_size=model.vocab_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=model.num_layers,
            seed=model.seed,
            sliding_window=model.sliding_window,
            twins=model.twins,
            tied=model.tied,
            rope_scaling=ROPES[model.rope],
            eos_token_id=model.eos_token_id,
            max_positions=MAX_POSITIONS,
        )
    )


# ---- one run


@dataclass
class Recorder:
    """The engine's observer: keeps the logits row of every token that is emitted, and counts what happens.

    lengths: accepted length -> cycles. events: what happened -> how often.
    """

    rows: dict[int, list[np.ndarray]] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    widest: int = 0  # nodes of a tree
    _places: dict[int, int] = field(default_factory=dict)  # request -> row of the batch
    _size: int = 0

    def __call__(self, batch: Any, rows: slice, tree: Any, logits: torch.Tensor) -> None:
        accepted = batch.num_accepted[rows].tolist()
        paths = batch.path[rows].tolist()
        scores = logits.numpy()
        joined = rows.stop - rows.start == 1 and not batch.requests[rows.start].tokens
        self._follow(batch, rows, joined)
        emitted = batch.sampled.tokens[rows].tolist()
        if not joined:
            finished = batch.finished[rows].tolist()
            tokens, first_child, next_sibling = (
                t.tolist() for t in (tree.tokens, tree.first_child, tree.next_sibling)
            )
            nodes = tree.num_nodes.tolist()
        for place, count in enumerate(accepted):
            path = paths[place][: count + 1]
            request = batch.requests[rows.start + place]
            chosen = scores[place, path]
            self.rows.setdefault(request.index, []).append(chosen)
            self._count_ties(request, chosen)
            if joined:
                continue
            self.lengths[count] += 1
            self.events["nodes"] += nodes[place]
            self.widest = max(self.widest, nodes[place])
            if count:
                best = all(first_child[place][a] == b for a, b in zip(path, path[1:]))
                self.events["best paths" if best else "other paths"] += 1
                moved = any(node != i for i, node in enumerate(path))
                self.events["paths that moved rows" if moved else "paths in place"] += 1
                self._count_features(request.params, count)
            if finished[place]:
                child = first_child[place][path[-1]]
                last = emitted[place][path[-1]]
                while child >= 0 and tokens[place][child] != last:
                    child = next_sibling[place][child]
                if child >= 0:  # but for its end, the walk would have gone on
                    self.events[f"ended inside a path: {_end(request, finished[place])}"] += 1

    def _follow(self, batch: Any, rows: slice, joined: bool) -> None:
        """Requests that come and go while others run."""
        requests = batch.requests
        if joined:
            others = [other for i, other in enumerate(requests) if i != rows.start]
            self.events["joined a running batch"] += any(len(other.tokens) > 1 for other in others)
        else:
            self.events["left a running batch"] += max(self._size - len(requests), 0)
            self._size = len(requests)
        for row, request in enumerate(requests):
            before = self._places.setdefault(request.index, row)
            self.events["changed its row"] += before != row
            self._places[request.index] = row

    def _count_ties(self, request: Any, chosen: np.ndarray) -> None:
        if request.params.temperature < 1e-5:
            best = np.partition(chosen, -2, axis=1)
            self.events["ties at the top"] += int((best[:, -1] == best[:, -2]).sum())

    def _count_features(self, params: Any, count: int) -> None:
        self.events[f"accepted at T = {params.temperature:g}"] += count
        for name in FEATURES:
            if _uses(params, name):
                self.events[f"accepted with {name}"] += count


# Fields of SamplingParams, and the values at which they do nothing.
FEATURES = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "min_new_tokens": 0,
    "allowed_tokens": None, "banned_tokens": (), "logits_mask": None, "logprobs": False, "top_logprobs": 0,
    "stop_token_ids": (), "stop": (), "joint top_p": None,
}  # fmt: skip


def _uses(params: Any, name: str) -> bool:
    if name == "joint top_p":
        return params.top_p < 1 and params.top_k_top_p == "joint"
    return getattr(params, name) != FEATURES[name]


def _end(request: Any, finished: int) -> str:
    if finished == 1:
        return "stop token"
    return "context" if request.params.max_new_tokens is None else "budget"


@dataclass
class Run:
    results: list[Result]
    logits: list[
        np.ndarray
    ]  # per request [tokens or more, V]: a stop string cuts tokens that had been emitted
    recorder: Recorder


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many, but never more than there are already."""
    before = eagle_cuda.num_threads()
    if count >= before:
        yield
        return
    eagle_cuda.set_num_threads(count)
    try:
        yield
    finally:
        eagle_cuda.set_num_threads(before)


def _run(drawn: Draw, layout: RunDraw, continuations: dict[int, list[int]] | None) -> Run:
    """continuations: of each request, for drafters that know them; None: plainly."""
    target = target_of(drawn.model)
    target.page_size = layout.page_size
    options: dict[str, Any] = {}
    if continuations is not None:
        options = _drafter_options(drawn, target, continuations)
    tokenizer = ByteTokenizer() if any(params.stop for _, params in drawn.requests) else None
    engine = Engine(
        target, tokenizer=tokenizer, max_batch=layout.batch, max_length=drawn.max_length, **options
    )
    engine.observer = recorder = Recorder()
    prompts, sampling = [list(prompt) for prompt, _ in drawn.requests], [p for _, p in drawn.requests]
    with _threads(layout.threads), mock.patch.object(eagle_decode.engine, "compact_kv", compact_any):
        results = engine.generate(prompts, sampling, speculate=continuations is not None)
    empty = np.zeros((0, target.vocab_size), np.float32)
    logits = [np.concatenate(recorder.rows.get(i, [empty])) for i in range(len(results))]
    return Run(results, logits, recorder)


def _drafter_options(drawn: Draw, target: Any, continuations: dict[int, list[int]]) -> dict[str, Any]:
    tree = drawn.tree
    if tree.drafter.startswith("eagle"):
        shape = {"draft_vocab": tree.draft_vocab} if tree.drafter == "eagle3" else {}
        return {
            "head": tiny_head(tree.drafter, target, seed=tree.seed, **shape),
            "head_format": tree.head_format,
            "coupling": tree.coupling, "tau": tree.tau,
        } | (
            {"tree_shape": TreeShape(tree.paths)}
            if tree.paths
            else {"levels": tree.levels, "draft_top_k": tree.branching, "max_nodes": tree.nodes}
        )  # fmt: skip
    # Trees go on behind the end, so that only the loop's own bounds end a request.
    random = np.random.default_rng(tree.seed)
    known = {
        index: tokens + random.integers(drawn.model.vocab_size, size=8).tolist()
        for index, tokens in continuations.items()
    }
    shared = {"vocab_size": drawn.model.vocab_size, "seed": tree.seed}
    if tree.drafter == "static":
        return {"draft": StaticDrafter(known, parents=tree.parents, **shared)}
    oracle = OracleDrafter(
        known, levels=tree.levels, max_nodes=tree.nodes, branching=tree.branching, ragged=tree.seed % 2 == 0,
        **shared,
    )  # fmt: skip
    return {"draft": oracle}


# ---- two runs compared


@dataclass
class Difference:
    """The first place where a speculative run is not the plain one."""

    request: int
    place: int  # index among the request's tokens
    what: str
    plain: Any
    speculative: Any
    gap: float | None = None  # between the two best logits of the plain run there

    def __str__(self) -> str:
        gap = "" if self.gap is None else f"; the two best plain logits are {self.gap:.3g} apart"
        return (
            f"request {self.request}, token {self.place}: {self.what}: plain {self.plain!r:.200}, "
            f"speculative {self.speculative!r:.200}{gap}"
        )


def first_difference(plain: Run, other: Run) -> Difference | None:
    """None where the runs are equal to the bit."""
    for i, (a, b) in enumerate(zip(plain.results, other.results, strict=True)):
        found = _differs(a, b, plain.logits[i], other.logits[i])
        if found:
            place, what, left, right = found
            gap = None
            if place < len(plain.logits[i]):
                second, best = np.sort(plain.logits[i][place])[-2:].tolist()
                gap = best - second
            return Difference(i, place, what, left, right, gap)
    return None


def _differs(a: Result, b: Result, x: np.ndarray, y: np.ndarray) -> tuple[int, str, Any, Any] | None:
    common = min(len(a.tokens), len(b.tokens))
    bits = (x[:common].view(np.uint32) != y[:common].view(np.uint32)).any(axis=1)
    tokens = [s != t for s, t in zip(a.tokens, b.tokens)]
    wrong = [i for i in range(common) if bits[i] or tokens[i]]
    if wrong:
        place = wrong[0]
        if not bits[place]:
            return place, "token after equal logits", a.tokens[place], b.tokens[place]
        token = int((x[place] != y[place]).argmax())
        return place, f"logit of token {token}", float(x[place, token]), float(y[place, token])
    for name in ("tokens", "logprobs", "top_logprobs", "text", "finish_reason", "stop_reason", "error"):
        # repr tells every float from every other, and NaN is equal to itself.
        if repr(getattr(a, name)) != repr(getattr(b, name)):
            return common, name, getattr(a, name), getattr(b, name)
    return None


def miscounted(result: Result) -> str | None:
    """What the metrics of a request say that cannot be."""
    m = result.metrics
    emitted = m.first_tokens + m.accepted_tokens + m.cycles - m.cut_tokens
    if sum(m.accepted_lengths) != m.cycles or m.tokens != emitted or m.tokens != len(result.tokens):
        return f"metrics: {m.to_dict()} for {len(result.tokens)} tokens"
    return None


class Outcome(NamedTuple):
    tokens: int  # compared
    difference: Difference | None
    recorder: Recorder  # of the speculative run


def check(drawn: Draw) -> Outcome:
    """Both runs of a configuration, compared."""
    plain = _run(drawn, drawn.plain, None)
    assert set(plain.recorder.lengths) <= {0}
    continuations = {i: result.tokens for i, result in enumerate(plain.results)}
    speculative = _run(drawn, drawn.speculative, continuations)
    difference = first_difference(plain, speculative)
    for i, result in enumerate(speculative.results):
        wrong = miscounted(result)
        if difference is None and wrong:
            difference = Difference(i, len(result.tokens), wrong, None, None)
    tokens = sum(len(result.tokens) for result in plain.results)
    speculative.recorder.rows.clear()
    return Outcome(tokens, difference, speculative.recorder)
