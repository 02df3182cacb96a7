"""Random configurations of everything that may not change what is generated: models, trees, batches, page
layouts, sampling parameters.

    draw(seed=0, index=17)     # the same one every time, on every machine

A configuration holds plain values only, so that printing it shows all there is to know.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_decode.sampling import SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
# Each drafter in turn, so that few configurations have them all. "tree", "chain" and "static" know the plain
# continuation (oracle_drafter); "eagle3" and "eagle1" are random heads, whose trees are dynamic.
DRAFTERS = ("tree", "eagle3", "static", "chain", "eagle1", "tree")
LEVELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 31)
NODES = (2, 3, 5, 6, 8, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64)
WIDE_NODES = (65, 96, 128, 200, 255, 256)
HEAD_SHAPES = ((2, 1, 64), (3, 1, 64), (4, 2, 64), (4, 2, 80), (2, 2, 96), (2, 1, 128))
PAGE_SIZES = (None, None, 1, 5, 16, 64, 100)
TEMPERATURES = (0.0, 0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.5, 4.0)
ROPES = (
    None,
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
COUPLINGS = (None, 1.0, 0.5, 0.0)  # None: what the engine takes
HEAD_FORMATS = (None, None, None, "fp8", "int8", "int4", "int8_dynamic")
END_ID = 3  # of models that have one


@dataclass(frozen=True)
class ModelDraw:
    """A target of `tiny_models`."""

    family: str
    dtype: str
    vocab_size: int
    heads: tuple[int, int, int]  # query heads, KV heads, head size
    num_layers: int
    seed: int
    sliding_window: int | None = None
    twins: bool = False
    tied: bool = False
    rope: int = 0  # of ROPES
    eos_token_id: int | None = None


@dataclass(frozen=True)
class TreeDraw:
    """Who drafts, and what."""

    drafter: str  # of DRAFTERS
    nodes: int
    levels: int
    branching: int  # children per node; of a head the children tried
    seed: int
    parents: tuple[int, ...] = ()  # static
    paths: tuple[tuple[int, ...], ...] = ()  # of a head's static tree, if it has one
    coupling: float | None = None
    tau: float = 1.0
    head_format: str | None = None
    draft_vocab: int | None = None


@dataclass(frozen=True)
class RunDraw:
    """How a run is laid out: none of it may show in what it emits."""

    batch: int
    page_size: int | None
    threads: int  # where the process may have them


@dataclass(frozen=True)
class Grammar:
    """A LogitsMask: after every path a third of the tokens is forbidden, which one depends on the path."""

    salt: int
    always: tuple[int, ...]  # never forbidden

    def __call__(self, tokens: list[int], mask: np.ndarray) -> None:
        state = self.salt + len(tokens) + sum((i % 7 + 1) * token for i, token in enumerate(tokens[-9:]))
        ids = np.arange(32 * len(mask))
        allowed = (ids + state) % 3 != 0
        allowed[list(self.always)] = True
        mask &= np.packbits(allowed, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class Draw:
    """A configuration. Requests are (prompt, sampling parameters)."""

    seed: int
    index: int
    model: ModelDraw
    tree: TreeDraw
    plain: RunDraw
    speculative: RunDraw
    max_length: int
    requests: tuple[tuple[tuple[int, ...], SamplingParams], ...] = field(repr=False)

    @property
    def most_tokens(self) -> int:
        """That it can emit."""
        rooms = (self.max_length - len(prompt) for prompt, _ in self.requests)
        asked = ((params.max_new_tokens, params.n) for _, params in self.requests)
        return sum(
            n * (room if budget is None else min(room, budget)) for room, (budget, n) in zip(rooms, asked)
        )

    def describe(self) -> str:
        """Every value that is not its default, a line per part."""
        lines = [f"seed {self.seed}, index {self.index}, max_length {self.max_length}"]
        lines += [f"{name:11} {_differing(getattr(self, name))}" for name in ("model", "tree")]
        lines += [f"{name:11} {_differing(getattr(self, name))}" for name in ("plain", "speculative")]
        for i, (prompt, params) in enumerate(self.requests):
            shown = f"{list(prompt[:6])}{' ...' if len(prompt) > 6 else ''} ({len(prompt)})"
            lines.append(f"request {i:<3} {shown} {_differing(params)}")
        return "\n".join(lines)


def _differing(value: Any) -> str:
    shown = {
        f.name: getattr(value, f.name)
        for f in dataclasses.fields(value)
        if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
    }
    return ", ".join(f"{name}={item!r:.120}" for name, item in shown.items())


def draw(seed: int, index: int) -> Draw:
    """Configuration `index` of a seed."""
    rng = random.Random(f"{seed}/{index}")
    drafter = DRAFTERS[index % len(DRAFTERS)]
    dtype = DTYPES[index // len(DRAFTERS) % len(DTYPES)]
    of_head = drafter in ("eagle1", "eagle3")
    model = _draw_model(rng, dtype, of_head)
    tree = _draw_head_tree(rng, drafter, model) if of_head else _draw_oracle_tree(rng, drafter)
    # Half of them have requests of about one length, which keep a batch full: most tokens for the time.
    even = rng.randint(100, 300) if rng.random() < 0.5 else None
    batch = rng.choice((1, 2, 2, 3, 4, 6, 8) if even is None else (4, 8, 16))
    if tree.nodes > 64:
        batch = min(batch, 3 if even is None else 4)
    count = batch + rng.randint(0, 2 * batch) if even is None else batch * rng.randint(1, 2)
    prompts = _draw_prompts(rng, count, model.vocab_size)
    long = tree.levels > 31  # outputs in which a long chain can be accepted more than once
    room = 800 if long else 320 if even else rng.choice((8, 30, 80, 200))
    max_length = max(map(len, prompts)) + room
    features = rng.random() < 0.75
    requests = tuple((prompt, _draw_sampling(rng, model, features, long, even)) for prompt in prompts)
    layouts = [
        RunDraw(size, rng.choice(PAGE_SIZES), rng.choice((1, 1, 2)))
        for size in (rng.choice((1, 3, 5, 8, 8)) if even is None else max(batch, 8), batch)
    ]
    return Draw(seed, index, model, tree, *layouts, max_length, requests)


def _draw_model(rng: random.Random, dtype: str, of_head: bool) -> ModelDraw:
    # With a small vocabulary chance alone makes random heads right.
    vocab_size = rng.choice((12, 16, 24)) if of_head else rng.choice((97, 97, 113))
    family = rng.choice(FAMILIES)
    window = None
    if family == "mistral" or (family in ("qwen2", "qwen3") and rng.random() < 0.3):
        window = rng.choice((7, 11, 40, 300))
    twins = rng.random() < 0.3
    return ModelDraw(
        family,
        dtype,
        vocab_size,
        heads=rng.choice(HEAD_SHAPES),
        num_layers=rng.choice((2, 2, 3) if of_head else (1, 2, 2, 3)),  # EAGLE-3 reads three of their inputs
        seed=rng.randrange(4),
        sliding_window=window,
        twins=twins,
        tied=not twins and rng.random() < 0.2,
        rope=rng.randrange(len(ROPES)),
        eos_token_id=rng.choice((None, END_ID)),
    )


def _draw_oracle_tree(rng: random.Random, drafter: str) -> TreeDraw:
    nodes = rng.choice(WIDE_NODES if rng.random() < 0.12 else NODES)
    levels = rng.choice([level for level in LEVELS if (2 if nodes > 64 else 1) <= level < nodes])
    branching, parents = rng.choice((2, 3, 4, 8, 16)), ()
    if drafter == "chain":
        nodes = rng.choice((1, 2, 3, 4, 6, 8, 16, 33, 64, 128, 256))
        levels, branching = nodes - 1, 1
    elif drafter == "static":
        parents = _draw_parents(rng, nodes, levels)
        levels = max(_depths(parents))
    return TreeDraw(drafter, nodes, levels, branching, rng.randrange(2**31), parents)


def _draw_parents(rng: random.Random, nodes: int, levels: int) -> tuple[int, ...]:
    """The better a node's rank, the more stands below it; at most 64 children."""
    parents, depths, children = [-1], [0], [0]
    for node in range(1, nodes):
        parent = node
        while parent == node or depths[parent] >= levels or children[parent] >= 64:
            parent = min(rng.randrange(node), rng.randrange(node))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        children.append(0)
        children[parent] += 1
    return tuple(parents)


def _depths(parents: tuple[int, ...]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _draw_head_tree(rng: random.Random, drafter: str, model: ModelDraw) -> TreeDraw:
    branching = rng.choice((1, 2, 4, 8, 8, 9))  # no draft vocabulary is smaller
    levels = rng.choice((1, 2, 3, 3, 4, 6) + ((40,) if branching == 1 else ()))
    most = 1 + branching + (levels - 1) * branching**2
    sizes = [n for n in (*NODES, *WIDE_NODES) if n <= most]
    nodes = max(rng.choice(sizes), rng.choice(sizes))
    tree = TreeDraw(
        drafter,
        nodes,
        levels,
        branching,
        rng.randrange(8),
        coupling=COUPLINGS[int(rng.random() * len(COUPLINGS))],
        tau=rng.choice((0.7, 1.0, 1.5)),
        head_format=rng.choice(HEAD_FORMATS),
        draft_vocab=rng.choice((None, model.vocab_size - 3)) if drafter == "eagle3" else None,
    )
    own = random.Random(repr(tree))  # the other draws stay what they are
    if own.random() >= 0.25:
        return tree
    paths = _draw_paths(own, nodes)
    return dataclasses.replace(tree, paths=paths, nodes=len(paths) + 1, levels=max(map(len, paths)))


def _draw_paths(rng: random.Random, nodes: int) -> tuple[tuple[int, ...], ...]:
    """At most `nodes` rank paths of at most 6 levels with at most 9 parents, of low ranks mostly."""
    paths: list[tuple[int, ...]] = [(rng.randrange(3),)]
    for _ in range(nodes):
        above = rng.choice([(), *(path for path in paths if len(path) < 6)])
        path = (*above, min(rng.randrange(9), rng.randrange(9)))
        parents = {p[:-1] for p in (*paths, path) if len(p) == len(path)}
        if path not in paths and len(parents) <= 9:
            paths.append(path)
    return tuple(paths)


def _draw_prompts(rng: random.Random, count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Mostly short ones; some end just before a position where prompts are cut and attention folds its
    sums."""
    lengths = [rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, 70))) for _ in range(count)]
    if rng.random() < 0.1:
        lengths[rng.randrange(count)] = 256 - rng.randint(0, 40)
    if rng.random() < 0.01:
        lengths[rng.randrange(count)] = 2048 - rng.randint(0, 40)
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths]


def _draw_sampling(
    rng: random.Random, model: ModelDraw, features: bool, long: bool, even: int | None
) -> SamplingParams:
    def maybe(probability: float) -> bool:
        return rng.random() < probability

    def some(low: int, high: int) -> list[int]:
        return rng.sample(ids, rng.randint(low, high))

    vocab_size = model.vocab_size
    ids = list(range(vocab_size))
    rng.shuffle(ids)
    always, ids = tuple(ids[:3]), ids[3:]  # some tokens stay possible, whatever else is asked for
    if vocab_size > END_ID and END_ID in always:
        always = tuple(token for token in always if token != END_ID)
    budget = rng.choice((rng.randint(1, 12), rng.randint(12, 60), rng.randint(40, 90), rng.randint(60, 160)))
    if even:
        budget = even + rng.randint(0, 20)
    if long and maybe(0.5):
        budget *= 6
    rarely = 0.05 if even else 0.25
    new = {
        "temperature": rng.choice(TEMPERATURES),
        "seed": rng.choice((rng.randrange(100), rng.randrange(-(2**63), 2**64))),
        "max_new_tokens": 0 if maybe(0.02) else None if maybe(rarely / 2) else budget,
        "logprobs": maybe(0.5),
        "ignore_eos": maybe(1 - rarely),
        "n": rng.choice((2, 3)) if maybe(0.08) else 1,
    }
    if maybe(rarely):
        new["stop_token_ids"] = some(1, 5)
    if maybe(rarely / 2):  # a text of two characters or one: tokens are bytes
        letters = [chr(token) for token in ids if 32 <= token < 97] or ["~"]
        new["stop"] = ["".join(rng.choices(letters, k=rng.randint(1, 2))) for _ in range(rng.randint(1, 2))]
    if maybe(0.25):
        new["top_k"] = rng.choice((1, 2, 5, 20, vocab_size, 1000))
    if maybe(0.25):
        new["top_p"] = rng.choice((0.05, 0.5, 0.8, 0.9, 0.95, 0.999))
        new["top_k_top_p"] = rng.choice(("sequential", "joint"))
    if maybe(0.2):
        new["min_p"] = rng.choice((0.001, 0.02, 0.1, 0.5))
    if maybe(0.2):
        new["top_logprobs"] = rng.choice((1, 3, min(32, vocab_size)))
    if features:
        if maybe(0.25):
            new["repetition_penalty"] = rng.choice((0.8, 1.05, 1.3, 2.0))
        if maybe(0.2):
            new["presence_penalty"] = rng.choice((-0.5, 0.3, 1.5))
        if maybe(0.2):
            new["frequency_penalty"] = rng.choice((-0.2, 0.1, 0.7, 2.0))
        if maybe(0.25):
            new["logit_bias"] = {token: rng.uniform(-4, 4) for token in some(1, 6)}
            if maybe(0.5):
                new["logit_bias"][rng.choice(ids)] = float("-inf")
        if maybe(0.2):
            most = new["max_new_tokens"]
            new["min_new_tokens"] = rng.randint(0, 20 if most is None else most)
            if "stop_token_ids" in new and maybe(0.7):  # it ends as soon as it may
                new.setdefault("logit_bias", {})[new["stop_token_ids"][0]] = 8.0
        if maybe(0.15):
            new["allowed_tokens"] = [*always, *some(vocab_size // 3, 2 * vocab_size // 3)]
        if maybe(0.15):
            new["banned_tokens"] = some(1, vocab_size // 3)
        if maybe(0.12):
            new["logits_mask"] = Grammar(rng.randrange(1000), always)
    return SamplingParams(**new)
