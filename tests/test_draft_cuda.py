"""draft and extend_draft bit for bit against the same ops called one by one, request by request: what stands
between them, whatever the batch, the tree and the device. Holds on every backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from compare import assert_same_bits
from draft_rig import HEADS, Rig
from eagle_cuda.attention import append_kv, tree_attention
from eagle_cuda.draft import draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import linear, lm_head_topk, rms_norm
from eagle_cuda.tree import (
    MC_SIM_7B_63,
    TreeShape,
    build_tree,
    empty_candidates,
    empty_draft_tree,
    expand_tree,
)
from workspace_checks import check_workspace


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Composed:
    """A head over one request's rows, from the public ops."""

    def __init__(self, rig: Rig, request: int):
        names = ("kind", "heads", "kv_heads", "dim", "eps", "scale", "post", "before", "layers", "tensors")
        self.__dict__ |= zip(names, rig.head._arguments)
        self.scale = self.scale or None

        def own(cache: KVCache) -> KVCache:
            if cache.page_table is None:
                return KVCache(cache.k[request : request + 1], cache.v[request : request + 1], None)
            return KVCache(cache.k, cache.v, cache.page_table[request : request + 1])

        self.caches = [own(cache) for cache in rig.caches]

    def norm(self, x, weight):
        return rms_norm(x.contiguous(), weight, self.eps)

    def fuse(self, features):
        t = self.tensors
        if self.kind == "eagle1":
            return features
        if t["fc_norm"] is not None:
            slices = features.chunk(len(t["fc_norm"]), dim=1)
            features = torch.cat([self.norm(x, w) for x, w in zip(slices, t["fc_norm"])], dim=1)
        return linear(features, t["fc"], bias=t["fc_bias"])

    def run(self, tokens, hidden, length, first, position, mask):
        """Rows `first`, `first + 1`, ... of a tree at `length`; `mask` [first + rows, words]."""
        t, rows = self.tensors, len(tokens)
        embedding = t["embedding"][tokens.long().clamp(0, len(t["embedding"]) - 1)]
        if self.kind == "eagle1":
            residual = x = linear(torch.cat([embedding, hidden], dim=1), t["fc"], bias=t["fc_bias"])
        else:
            normed = self.norm(hidden, self.layers[0]["hidden_norm"])
            x = torch.cat([self.norm(embedding, self.layers[0]["input_norm"]), normed], dim=1)
            residual = normed if self.before else hidden
        for i, layer in enumerate(self.layers):
            if i or self.kind == "eagle1":
                x = residual if layer["input_norm"] is None else self.norm(residual, layer["input_norm"])
            qkv = linear(x, layer["qkv"], bias=layer["qkv_bias"]).view(1, rows, -1, self.dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            q = append_kv(
                q, k, v, self.caches[i], seq_lens=int32(length + first), num_nodes=int32(rows),
                depths=(position - (length + first))[None].int(), cos=t["cos"], sin=t["sin"],
                q_norm=layer["q_norm"], k_norm=layer["k_norm"], eps=self.eps,
            )  # fmt: skip
            every = torch.zeros(1, first + rows, *q.shape[2:], dtype=q.dtype)
            every[:, first:] = q
            out = tree_attention(
                every, self.caches[i], seq_lens=int32(length), num_nodes=int32(first + rows),
                mask=mask[None, :, : (first + rows + 31) // 32].contiguous(), softmax_scale=self.scale,
            )  # fmt: skip
            attended = out[0, first:].reshape(rows, -1)
            residual = linear(attended, layer["o"], residual=residual.contiguous())
            gated = linear(self.norm(residual, layer["post_norm"]), layer["gate_up"], activation="swiglu")
            residual = linear(gated, layer["down"], residual=residual)
        return residual

    def extend(self, features, tokens, length):
        rows = torch.arange(len(tokens))
        words = torch.arange((len(tokens) + 31) // 32)
        bits = (rows[:, None, None] >= 32 * words[:, None] + torch.arange(32)).long() << torch.arange(32)
        mask = bits.sum(-1).int()  # wraps into the sign
        return self.run(tokens, self.fuse(features), length, 0, length + rows, mask)

    def draft(
        self, features, tokens, length, *, max_nodes, top_k, levels, order, shape=None, noise=None, tau=1.0
    ):  # fmt: skip
        t = self.tensors
        output = self.extend(features, tokens, length)[-1:]
        root = length = length + len(tokens)
        candidates, beam = empty_candidates(1, top_k, levels)
        mask = torch.zeros(levels * top_k, (levels * top_k + 31) // 32, dtype=torch.int32)
        for level in range(1, levels + 1):
            coupled = {}
            if noise:
                coupled = {"temperature": noise[0].expand(len(output)), "seeds": noise[1].expand(len(output))}
                coupled = {name: values.contiguous() for name, values in coupled.items()}
                coupled["positions"] = torch.full((len(output),), root + level, dtype=torch.int32)
            best = lm_head_topk(
                output, t["lm_head"], top_k, rms_norm=t["norm"], eps=self.eps, tau=tau,
                draft_to_target=t["draft_to_target"], **coupled,
            )  # fmt: skip
            size = (1, len(output), top_k)
            expand_tree(
                best.tokens.view(size),
                best.log_probs.view(size),
                candidates,
                beam,
                level=level,
                levels=levels,
                shape=shape,
            )
            if level == levels:
                break
            parents = beam.rows[0].long() if level > 1 else torch.zeros(top_k, dtype=torch.long)
            hidden = output[parents]
            if self.post:
                hidden = self.norm(hidden, t["norm"])
            first = (level - 1) * top_k
            mask[first : first + top_k] = beam.mask[0]
            position = torch.full((top_k,), length + level - 1)
            output = self.run(beam.tokens[0], hidden, length, first, position, mask[: first + top_k])
        tree = empty_draft_tree(1, max_nodes)
        build_tree(tokens[-1:], candidates, out=tree, order=order)
        return tree


CASES = [
    (HEADS[0], torch.bfloat16, 3, 4, 3, 0.0),
    (HEADS[1], torch.bfloat16, 3, 32, 2, 0.8),
    (HEADS[2], torch.float16, 3, 4, 3, 1.2),
    (HEADS[3], torch.bfloat16, 3, 3, 4, 0.0),
    (HEADS[4], torch.float32, 3, 4, 3, 0.8),
    (HEADS[2], torch.bfloat16, 1, 1, 34, 0.7),  # a chain over more than one word of its mask
    (HEADS[0], torch.bfloat16, 1, 2, 31, 0.0),  # as deep as a tree may branch
    (HEADS[1], torch.bfloat16, 6, 12, 2, 0.9),  # more than 64 rows a level
]


def one_cycle(case, dtype, batch, top_k, levels, temperature, shape=None, composed=True):
    """Draft after prompts of some lengths, paths of several and no rows; what each request should get, if
    that is wanted."""
    rig = Rig.random(case, dtype, batch=batch, capacity=208, paged=16, spare=2)
    lengths = [(37 * b) % 101 + 3 for b in range(batch)]
    rig.fill(lengths)
    counts = int32(*((b + 1) % 4 - 1 for b in range(batch)))
    if batch > 1:
        counts[1], counts[-1] = 3, -1
    path = torch.full((batch, 5), -1, dtype=torch.int32)
    for b, count in enumerate(counts.tolist()):
        path[b, : count + 1] = torch.randperm(6, generator=rig.random)[: count + 1]
    features = rig.features(batch, 6)
    targets = torch.randint(0, 96, (batch, 6), generator=rig.random).int()
    options = {"max_nodes": min(1 + top_k * levels, 60), "top_k": top_k, "levels": levels, "order": "path"}
    if shape is not None:
        options |= {"shape": shape, "max_nodes": shape.num_nodes + 1}
    noise = None
    if temperature:
        heat = torch.full((batch,), temperature)
        if batch > 1:
            heat[0] = 0.0
        noise = (heat, torch.arange(batch) * 12345 - 7)
    want = []
    for b, count in enumerate(counts.tolist() if composed else []):
        alone, nodes = Composed(rig, b), path[b, : count + 1].long()
        if count < 0:
            want.append(empty_draft_tree(1, options["max_nodes"]))
            continue
        before = [(k.clone(), v.clone()) for k, v, *_ in rig.caches]
        own = noise and (noise[0][b : b + 1], noise[1][b : b + 1])
        rows = (features[b, nodes], targets[b, nodes], int(rig.lengths[b]))
        want.append(alone.draft(*rows, noise=own, tau=1.25 if noise else 1.0, **options))
        for (k, v, *_), (old_k, old_v) in zip(rig.caches, before):
            k.copy_(old_k), v.copy_(old_v)
    coupled = {"temperature": noise[0], "seeds": noise[1], "tau": 1.25} if noise else {}
    where = SimpleNamespace(path=path, num_accepted=counts)
    got = rig.draft(features, targets, where, **options, **coupled)
    return rig, got, want


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    "case",
    [
        CASES[3],
        *(pytest.param(case, marks=pytest.mark.unchecked) for case in CASES[:3]),
        *(pytest.param(case, marks=pytest.mark.full) for case in CASES[4:]),
    ],
    ids=lambda c: f"{c[0][0]}-{c[1]}-{c[2]}x{c[3]}x{c[4]}",
)
def test_draft_equals_its_ops_called_one_by_one(case):
    _, got, want = one_cycle(*case)
    for b, tree in enumerate(want):
        for name, mine, theirs in zip(got._fields, got, tree):
            assert torch.equal(mine[b], theirs[0]), (b, name)
    assert int(got.num_nodes.max()) > 2


SHAPES = {  # the head, its type, the batch, the temperature, the tree's shape, the levels grown
    "published": (HEADS[1], torch.bfloat16, 3, 0.0, MC_SIM_7B_63, 5),
    "coupled, fewer levels": (HEADS[2], torch.float16, 3, 0.8, MC_SIM_7B_63, 3),
    "fp32, missing ranks": (HEADS[4], torch.float32, 3, 0.8, TreeShape([(1,), (2,), (1, 3), (2, 0)]), 2),
    "chain": (HEADS[0], torch.bfloat16, 1, 0.0, TreeShape.chain(34), 34),
}


@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.unchecked] * (name != "coupled, fewer levels"))
        for name in SHAPES
    ],
)
def test_a_static_draft_equals_its_ops_called_one_by_one(name):
    head, dtype, batch, temperature, shape, levels = SHAPES[name]
    _, got, want = one_cycle(head, dtype, batch, shape.top_k, levels, temperature, shape)
    for b, tree in enumerate(want):
        for name, mine, theirs in zip(got._fields, got, tree):
            assert torch.equal(mine[b], theirs[0]), (b, name)
    assert int(got.num_nodes.max()) == 1 + shape.nodes_within(levels)


@pytest.mark.op("extend_draft")
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(CASES[i], marks=pytest.mark.unchecked) for i in (1, 2, 4))],
    ids=lambda c: f"{c[0][0]}-{c[1]}",
)
def test_extend_draft_equals_its_ops_called_one_by_one(case):
    """More rows than a tile, requests that begin and end inside it, one without rows."""
    rig = Rig.random(case[0], case[1], batch=4, capacity=300, paged=16)
    counts = [70, 0, 190, 5]
    rig.lengths[:] = int32(9, 4, 0, 60)
    features, tokens = rig.pairs(sum(counts))
    offsets = [0, 70, 70, 260, 265]
    before = [(k.clone(), v.clone()) for k, v, *_ in rig.caches]
    hidden = rig.extend(features, tokens, offsets)
    after = [(k.clone(), v.clone()) for k, v, *_ in rig.caches]
    for (k, v, *_), (old_k, old_v) in zip(rig.caches, before):
        k.copy_(old_k), v.copy_(old_v)
    for b, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        if begin < end:
            want = Composed(rig, b).extend(features[begin:end], tokens[begin:end], int(rig.lengths[b]))
            assert_same_bits(hidden[begin:end], want)
    for (k, v, *_), (new_k, new_v) in zip(rig.caches, after):
        assert_same_bits(k, new_k)
        assert_same_bits(v, new_v)


@pytest.mark.unchecked  # a law of values
@pytest.mark.op("draft", "extend_draft")
@pytest.mark.parametrize("device", [(3, 90), pytest.param((132, 86), marks=pytest.mark.full)])
def test_bits_do_not_depend_on_the_device(simulator, device):
    """Another number of multiprocessors, less shared memory: other grids and splits everywhere."""
    _, got, _ = one_cycle(*CASES[2], composed=False)
    with simulator.device(multiprocessors=device[0], compute_capability=device[1]):
        _, other, _ = one_cycle(*CASES[2], composed=False)
    for mine, theirs in zip(got, other):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.op(op)) for op in ("draft", "extend_draft")]
)
def test_a_workspace_is_checked(op, backend):
    rig = Rig.random(HEADS[2], torch.bfloat16, batch=3)
    features, tokens = rig.fill([9, 4, 30])
    counts = torch.zeros(3, dtype=torch.int32)

    def outputs(workspace):
        if op == "draft":
            options = {"max_nodes": 16, "top_k": 4, "levels": 3, "workspace": workspace}
            where = SimpleNamespace(path=torch.zeros(3, 1, dtype=torch.int32), num_accepted=counts)
            inputs = features[:, None], tokens[:, None], where, rig.lengths, rig.caches
            return list(draft(rig.head, *inputs, **options))
        hidden = torch.zeros(3, rig.head.hidden_size, dtype=torch.bfloat16)
        rows = features, tokens, [0, 1, 2, 3], rig.lengths, rig.caches
        return [extend_draft(rig.head, *rows, hidden=hidden, workspace=workspace)]

    check_workspace(outputs, backend, [cache.k for cache in rig.caches])
