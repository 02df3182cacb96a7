"""The GPU part of the draft benchmark: the draft phase of one request and its peers, head by head."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from ceilings import Ceilings
from draft_cases import FORMATS, Cycle, floor, row_of
from gpu_arms import Variant, Variants, WrongResult, run_cases, time_arms, words
from gpu_timing import Budget, Clock
from head_shapes import HEADS, HeadShape
from peers.draft import EPS, Caches, Dense, TorchDraft, Tree

from eagle_cuda.attention import rope_table
from eagle_cuda.draft import DraftHead, DraftLayer, draft, draft_workspace_bytes
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import PackedWeight, pack_weight, unpack_weight
from eagle_cuda.tree import DraftTree, empty_draft_tree
from eagle_cuda.verify import Accepted

OURS, SHORT = "draft", "draft, half the levels"
GRAPH, COMPILED, EAGER = "torch, graph", "torch.compile, graph", "torch, eager"
MATRICES = ("qkv", "o", "gate_up", "down", "fc", "lm_head")
# Of log-probabilities that are sums over up to 8 levels, against float32: the root's best child, and the
# middle one of the differences when both trees' scores are sorted.
TOLERANCE = 0.1
COMMON = 0.7  # of the tokens: rounding changes the order of candidates that are equally good
EAGER_ROUNDS = 5


@dataclass
class Settings:
    rounds: int
    cycle: Cycle = field(default_factory=Cycle)
    formats: Sequence[str] = FORMATS
    tuned: Sequence[str] = ()  # heads whose products torch.compile tunes
    peers: Sequence[str] = (GRAPH, COMPILED, EAGER)
    absent: dict[str, str] = field(default_factory=dict)
    ceilings: Ceilings | None = None


class Part(NamedTuple):
    """A head in all formats; or in bf16 beside torch.compile, which needs long."""

    head: str
    compiled: bool = False

    def __str__(self) -> str:
        return self.head + self.compiled * ", torch.compile"


class Request(NamedTuple):
    """One request between two cycles."""

    cache: KVCache
    features: torch.Tensor  # [1, N, F]
    targets: torch.Tensor  # [1, N] int32
    accepted: Accepted
    seq_lens: torch.Tensor


def make_dense(shape: HeadShape, positions: int, dtype: torch.dtype, device: torch.device) -> Dense:
    """Random weights that keep activations of one size, and an LM head that has its favourites."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    def gain() -> torch.Tensor:
        return 1 + 0.1 * draw(shape.hidden)

    found = {name: draw(m.n, m.k).mul_(m.k**-0.5) for name, m in shape.matrices.items()}
    found["lm_head"].mul_(3)
    table = rope_table(positions, shape.head_dim)
    found |= {"embedding": draw(shape.vocab, shape.hidden), "post_norm": gain()}
    found |= {"cos": table.cos.to(device), "sin": table.sin.to(device)}
    if shape.kind == "eagle3":
        found |= {name: gain() for name in ("input_norm", "hidden_norm", "norm")}
    else:  # no norm before the LM head: activations are larger there
        found["lm_head"].mul_(0.5)
    if shape.draft_vocab < shape.vocab:
        ids = torch.randperm(shape.vocab, generator=generator, device=device)[: shape.draft_vocab]
        found["draft_to_target"] = ids.sort().values
    return Dense(**found)


def make_head(shape: HeadShape, dense: Dense, form: str | None) -> tuple[DraftHead, Dense]:
    """(the head in a format, what its weights are worth in float32)."""
    packed = {
        name: pack_weight(getattr(dense, name), form, paired=shape.matrices[name].paired) for name in MATRICES
    }
    layer = DraftLayer(
        **{name: packed[name] for name in ("qkv", "o", "gate_up", "down")}, post_norm=dense.post_norm,
        input_norm=dense.input_norm, hidden_norm=dense.hidden_norm,
    )  # fmt: skip
    ids = dense.draft_to_target
    head = DraftHead(
        kind=shape.kind, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        norm_eps=EPS, embedding=dense.embedding, fc=packed["fc"], lm_head=packed["lm_head"], layers=[layer],
        norm=dense.norm, draft_to_target=None if ids is None else ids.int(), cos=dense.cos, sin=dense.sin,
    )  # fmt: skip
    return head, worth(dense, packed)


def worth(dense: Dense, packed: dict[str, PackedWeight]) -> Dense:
    """In float32, matrices as they were packed."""
    unpacked = {name: unpack_weight(weight).float() for name, weight in packed.items()}
    others = {
        name: value.float()
        for name, value in dense._asdict().items()
        if value is not None and value.is_floating_point()
    }
    return dense._replace(**{**others, **unpacked})


def make_request(shape: HeadShape, cycle: Cycle, dtype: torch.dtype, device: torch.device) -> Request:
    generator = torch.Generator(device).manual_seed(2)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    cache = KVCache.empty(1, cycle.rows, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
    for part in (cache.k, cache.v):
        part.normal_(generator=generator)
    features = torch.randn(1, cycle.nodes, shape.features, generator=generator, device=device, dtype=dtype)
    targets = torch.randint(0, shape.vocab, (1, cycle.nodes), generator=generator, device=device).int()
    steps = max(cycle.nodes // (cycle.accepted + 2), 1)
    path = [i * steps for i in range(cycle.accepted + 1)]
    return Request(
        cache,
        features,
        targets,
        Accepted(
            path=ints(*path, *[-1] * max(cycle.levels + 1 - len(path), 0))[None],
            num_accepted=ints(cycle.accepted),
            next_tokens=targets[:, path[-1]],
            finished=ints(0),
            new_seq_lens=ints(cycle.committed),
        ),
        ints(cycle.context),
    )


def ours(head: DraftHead, request: Request, cycle: Cycle) -> tuple[Variants, DraftTree]:
    """(our op, the tree that it writes); its workspace is its own, as in a captured cycle."""
    tree = empty_draft_tree(1, cycle.nodes, like=request.features)

    def variant() -> Variant:
        caches, path = [request.cache], request.accepted.path
        size = draft_workspace_bytes(head, *path.shape, cycle.top_k, cycle.levels, caches)
        workspace = torch.empty(size, dtype=torch.uint8, device=request.features.device) if size else None

        def call(i: int) -> torch.Tensor:
            draft(
                head, request.features, request.targets, request.accepted, request.seq_lens, caches,
                top_k=cycle.top_k, levels=cycle.levels, order="candidate", out=tree, workspace=workspace,
            )  # fmt: skip
            return tree.scores

        def view(scores: torch.Tensor) -> torch.Tensor:
            return torch.stack([scores[0], tree.tokens[0]])[:, 1 : int(tree.num_nodes[0])]

        return Variant(call, view)

    return {"draft": variant}, tree


def peer(
    shape: HeadShape, dense: Dense, request: Request, cycle: Cycle,
    transform: Callable[[Callable], Callable] = lambda step: step,
) -> TorchDraft:  # fmt: skip
    caches = Caches(request.cache.k[0], request.cache.v[0])
    path = request.accepted.path[0, : cycle.accepted + 1]
    return TorchDraft(
        shape, dense, caches, request.features[0], request.targets[0], path, cycle, transform
    )  # fmt: skip


def compiler(mode: str) -> Callable[[Callable], Callable]:
    def compiled(step: Callable) -> Callable:
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
        return torch.compile(step, dynamic=False, fullgraph=True, mode=mode)

    return compiled


def in_float(request: Request) -> Request:
    """For the reference: in float32, with caches of its own."""
    cache = KVCache(request.cache.k.float(), request.cache.v.float())
    return request._replace(cache=cache, features=request.features.float())


def both(tree: Tree) -> torch.Tensor:
    """[2, draft nodes]: scores and tokens."""
    return torch.stack([tree.scores, tree.tokens.to(tree.scores.dtype)])


def close(got: torch.Tensor, want: torch.Tensor) -> float:
    """The larger one of the two differences that TOLERANCE is about. Raises WrongResult. Both as from
    `both`."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        raise WrongResult(f"{got.shape[1]} draft nodes of {want.shape[1]}, or scores that are not finite")
    a, b = (x[0].float().sort(descending=True).values for x in (got, want))
    off = max(float((a[0] - b[0]).abs()), float((a - b).abs().median()))
    if off > TOLERANCE:
        raise WrongResult(f"log-probabilities differ from float32 by {off:.2f}")
    common = float(torch.isin(got[1].float(), want[1].float()).float().mean())
    if common < COMMON:
        raise WrongResult(f"{common:.0%} of the tokens are those of float32")
    return off


def eager_seconds(call: Callable[[], object], clock: Clock) -> list[float]:
    """Wall time of calls that are launched one by one, as a program without graphs would."""
    times = []
    for _ in range(EAGER_ROUNDS + 1):
        clock.synchronize()
        begin = time.perf_counter()
        call()
        clock.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])


def measure(part: Part, settings: Settings, clock: Clock, device: torch.device) -> list[dict[str, Any]]:
    shape, cycle = HEADS[part.head], settings.cycle
    dense = make_dense(shape, cycle.rows, torch.bfloat16, device)
    request = make_request(shape, cycle, torch.bfloat16, device)
    formats = ["bf16"] if part.compiled else settings.formats
    return [measure_format(part, form, dense, request, settings, clock) for form in formats]


def measure_format(
    part: Part, form: str, dense: Dense, request: Request, settings: Settings, clock: Clock
) -> dict[str, Any]:
    """The figures of a head in one format; the peers' head is in bf16."""
    name, shape, cycle = part.head, HEADS[part.head], settings.cycle
    half = cycle._replace(levels=max(cycle.levels // 2, 1))
    head, real = make_head(shape, dense, form)
    plain = real if form == "bf16" else worth(dense, {})
    want = {}
    for arm, weights, what in ((OURS, real, cycle), (SHORT, real, half), ("peer", plain, cycle)):
        want[arm] = both(peer(shape, weights, in_float(request), what)())
    del real, plain

    def torch_variants(*modes: str) -> Variants:
        def variant(transform) -> Variant:
            cycle_of, trees = peer(shape, dense, request, cycle, transform), []

            def call(i: int) -> torch.Tensor:
                trees[:] = [cycle_of()]  # in the end that of the graph, which its replays write again
                return trees[0].scores

            return Variant(call, lambda scores: both(trees[0]))

        if not modes:
            return {"cuBLAS": lambda: variant(lambda step: step)}
        return {mode: lambda mode=mode: variant(compiler(mode)) for mode in modes}

    modes = ["default"] + ["max-autotune-no-cudagraphs"] * (name in settings.tuned)
    arms = {
        OURS: lambda: ours(head, request, cycle)[0],
        SHORT: lambda: ours(head, request, half)[0],
        GRAPH: lambda: torch_variants(),
        COMPILED: lambda: torch_variants(*modes),
    }
    chosen = {OURS, COMPILED} if part.compiled else {OURS, SHORT, GRAPH, EAGER}
    chosen &= {OURS, SHORT, *settings.peers}
    arms = {arm: make for arm, make in arms.items() if arm in chosen}
    records, samples = time_arms(
        f"{name} {form}", arms, OURS, lambda arm, got: close(got, want.get(arm, want["peer"])), clock=clock,
        sets=1, rounds=settings.rounds, absent=settings.absent,
    )  # fmt: skip
    if EAGER in chosen:
        try:
            seconds = eager_seconds(peer(shape, dense, request, cycle), clock)
            middle = seconds[len(seconds) // 2]
            records[EAGER] = {
                "microseconds": 1e6 * middle,
                "min_microseconds": 1e6 * seconds[0],
                "max_microseconds": 1e6 * seconds[-1],
            }
            if OURS in samples:
                records[EAGER]["times_ours"] = middle / samples[OURS].median
        except RuntimeError as error:
            records[EAGER] = {"error": words(error)}
    made = row_of(name, form, cycle, settings.ceilings)
    if OURS in samples:
        seconds, needed = samples[OURS].median, floor(name, form, cycle)
        made |= {
            "microseconds_per_level": seconds * 1e6 / cycle.levels,
            "gigabytes_per_second": needed.bytes / seconds / 1e9,
            "share_of_read": needed.bytes / seconds / settings.ceilings.bytes_per_second,
        }
        if SHORT in samples and half.levels < cycle.levels:
            rest = (seconds - samples[SHORT].median) / (cycle.levels - half.levels)
            made["microseconds_per_further_level"] = rest * 1e6
    return made | {"arms": records}


def run(
    heads: Sequence[str], settings: Settings, clock: Clock, device: torch.device, budget: Budget,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of the heads in turn, and then of those beside torch.compile, until the time is up."""
    parts = [Part(head) for head in heads]
    if COMPILED in settings.peers:
        parts += [Part(head, compiled=True) for head in heads]
    yield from run_cases(
        parts, lambda part: measure(part, settings, clock, device), lambda part: {"head": part.head}, clock,
        budget, progress,
    )  # fmt: skip
