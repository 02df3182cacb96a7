"""What draft, extend_draft and DraftHead refuse or leave alone; the head of the training recipe."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draft_rig import HEADS, Rig, accepted, trees_of
from eagle_cuda.attention import rope_table
from eagle_cuda.draft import DraftHead, DraftLayer, draft, extend_draft
from eagle_cuda.kv_cache import KVCache
from eagle_cuda.linear import pack_weight
from eagle_cuda.tree import DraftTree
from eagle_decode.heads import head_from_tensors
from eagle_decode.train.export import head_config, head_tensors
from eagle_decode.train.head import EagleHead, HeadConfig
from guarded import Guards
from random_heads import random_head, random_target

zeros = partial(torch.zeros, dtype=torch.int32)
OPTIONS = {"max_nodes": 8, "top_k": 3, "levels": 3}


@pytest.fixture(scope="module")
def rig():
    rig = Rig.random(HEADS[1], torch.float32, batch=2, capacity=32)
    rig.cycle = rig.fill([5, 7])
    rig.draft_rows(*rig.cycle, **OPTIONS)
    return rig


def arguments(rig):
    """Good arguments of `draft`, to be spoilt one at a time."""
    features, tokens = rig.cycle
    return {
        "features": features[:, None],
        "target_tokens": tokens[:, None],
        "accepted": accepted(zeros(2)),
        "seq_lens": rig.before,
        "caches": rig.caches,
        "top_k": 3,
        "levels": 3,
        "max_nodes": 8,
    }


def paths(rows, counts):
    return SimpleNamespace(path=zeros(rows, 1), num_accepted=zeros(counts))


def read_only(tensor):
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


# What is changed in the good arguments (a; k and v are the cache's), and the message.
SPOILT = [
    (lambda a, k, v: {"features": a["features"].double()}, "features: .*float32, got|features.*dtype"),
    (
        lambda a, k, v: {"features": a["features"].bfloat16()},
        "features: expected dtype float32, got bfloat16",
    ),
    (lambda a, k, v: {"features": a["features"][:, 0]}, "features: expected 3 dimensions, got 2"),
    (lambda a, k, v: {"features": a["features"][..., :95]}, r"features: expected shape \[-1, -1, 96\]"),
    (lambda a, k, v: {"features": a["features"].repeat(1, 1, 2)[..., ::2]}, "features: .*contiguous"),
    (lambda a, k, v: {"features": a["features"][:, :0], "target_tokens": zeros(2, 0)}, "features: .*1 node"),
    (lambda a, k, v: {"target_tokens": a["target_tokens"].long()}, "target_tokens: .*int32"),
    (lambda a, k, v: {"target_tokens": zeros(2, 2)}, "target_tokens: expected shape"),
    (
        lambda a, k, v: {"features": a["features"].repeat(1, 2, 1), "target_tokens": zeros(2, 4)[:, ::2]},
        "target_tokens: .*contig",
    ),
    (lambda a, k, v: {"accepted": paths(3, 2)}, r"path: expected shape \[2, -1\]"),
    (lambda a, k, v: {"accepted": paths(2, 3)}, r"num_accepted: expected shape \[2\], got \[3\]"),
    (lambda a, k, v: {"seq_lens": a["seq_lens"].float()}, "seq_lens: expected dtype int32"),
    (lambda a, k, v: {"seq_lens": a["seq_lens"][:1]}, r"seq_lens: expected shape \[2\], got \[1\]"),
    (lambda a, k, v: {"caches": []}, "caches: expected 1"),
    (lambda a, k, v: {"caches": [KVCache(k, v)] * 2}, "caches: expected 1 .*got 2"),
    (lambda a, k, v: {"caches": [KVCache(k.half(), v.half())]}, "k_cache: expected dtype float32"),
    (
        lambda a, k, v: {"caches": [KVCache(k[:, :, :1], v[:, :, :1])]},
        "caches: expected 2 heads of size 64, got 1",
    ),
    (lambda a, k, v: {"caches": [KVCache(k[:1], v[:1])]}, "k_cache"),
    (lambda a, k, v: {"caches": [KVCache(k, v[:, :8])]}, "v_cache"),
    (lambda a, k, v: {"caches": [KVCache(k[:1].expand(k.shape), v)]}, "k_cache: .*overlapping"),
    (lambda a, k, v: {"caches": [KVCache(k, read_only(v))]}, "v_cache: .*read-only"),
    (lambda a, k, v: {"top_k": 0}, "top_k: expected 1 to 32, got 0"),
    (lambda a, k, v: {"top_k": 33}, "top_k: expected 1 to 32, got 33"),
    (lambda a, k, v: {"levels": 0}, "levels: expected at least 1, got 0"),
    (lambda a, k, v: {"levels": 32}, "levels: expected at most 31"),
    (lambda a, k, v: {"top_k": 32, "levels": 9}, "exceeds 8192"),
    (lambda a, k, v: {"max_nodes": 0}, "max_nodes: expected 1 to 256, got 0"),
    (lambda a, k, v: {"max_nodes": 257}, "max_nodes: expected 1 to 256, got 257"),
    (lambda a, k, v: {"max_nodes": None}, "max_nodes"),
    (lambda a, k, v: {"order": "depth"}, "order: expected path or candidate, got depth"),
    (lambda a, k, v: {"tau": 0.0}, "tau: expected a finite number > 0"),
    (lambda a, k, v: {"tau": float("nan")}, "tau: expected a finite number > 0"),
    (lambda a, k, v: {"temperature": torch.ones(2)}, "seeds: expected a tensor"),
    (lambda a, k, v: {"temperature": torch.ones(2), "seeds": zeros(2)}, "seeds: expected dtype int64"),
    (lambda a, k, v: {"temperature": torch.ones(1), "seeds": zeros(2).long()}, "temperature: expected shape"),
    (lambda a, k, v: {"node_limit": torch.ones(2)}, "node_limit: expected dtype int32"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT, ids=[message for _, message in SPOILT])
def test_wrong_arguments_are_refused_by_name(rig, spoil, message):
    good = arguments(rig)
    cache = [(k.clone(), v.clone()) for k, v, *_ in rig.caches]
    with pytest.raises(ValueError, match=message):
        draft(rig.head, **{**good, **spoil(good, *rig.caches[0][:2])})
    for (k, v, *_), (old_k, old_v) in zip(rig.caches, cache):
        assert torch.equal(k, old_k)
        assert torch.equal(v, old_v)
    draft(rig.head, **good)


@pytest.mark.parametrize("field", DraftTree._fields)
def test_wrong_outputs_are_refused_by_name(rig, field):
    good = arguments(rig)
    out = draft(rig.head, **good)
    value = getattr(out, field)
    for wrong in (
        value.long(),
        torch.cat([value, value]),
        value.repeat(*[2] * value.dim())[(slice(None, None, 2),) * value.dim()],
    ):
        with pytest.raises(ValueError, match=rf"tree\.{field}"):
            draft(rig.head, **good, out=out._replace(**{field: wrong}))
    with pytest.raises(ValueError, match="max_nodes"):
        draft(rig.head, **{**good, "max_nodes": 9}, out=out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_offsets": [0, 2]}, "row_offsets: expected 3 entries"),
        ({"row_offsets": [1, 2, 4]}, "row_offsets: expected to start at 0, got 1"),
        ({"row_offsets": [0, 5, 4]}, "row_offsets: expected a non-decreasing list, got 4 after 5"),
        ({"row_offsets": [0, 2, 3]}, "row_offsets: expected to end at 4"),
        ({"tokens": zeros(3)}, r"tokens: expected shape \[4\]"),
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, "tokens: .*int32"),
        ({"features": torch.zeros(4, 95)}, "features: .*96"),
        ({"hidden": torch.zeros(4, 31)}, "hidden"),
        ({"hidden": torch.zeros(4, 32).half()}, "hidden"),
        ({"hidden": torch.zeros(8, 32)[::2]}, "hidden: .*contiguous"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens: .*int32"),
    ],
)
def test_extend_draft_refuses_by_name(rig, change, message):
    good = {
        "features": rig.features(4), "tokens": zeros(4), "row_offsets": [0, 1, 4],
        "seq_lens": rig.lengths, "caches": rig.caches,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        extend_draft(rig.head, **{**good, **change})
    extend_draft(rig.head, **good)


def test_nothing_is_written_behind_the_outputs():
    rig = Rig.random(HEADS[0], torch.float32, batch=3)
    cycle = rig.fill([3, 9, 4])
    want = rig.draft_rows(*cycle, max_nodes=11, top_k=4, levels=3)
    guards = Guards()
    out = DraftTree(*(guards.new(*field.shape, dtype=field.dtype) for field in want))
    got = rig.draft_rows(*cycle, again=True, max_nodes=11, top_k=4, levels=3, out=out)
    assert got is out
    guards.check()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    trees_of(got)


def test_strides_of_the_features_are_free():
    rig = Rig.random(HEADS[0], torch.float32, batch=3)
    features, tokens = rig.fill([3, 9, 4])
    want = rig.draft_rows(features, tokens, **OPTIONS)
    wide = torch.full((3, 5, features.shape[1] + 8), float("nan"))
    wide[:, 2, : features.shape[1]] = features
    roots = accepted(zeros(3))
    got = rig.draft(wide[:, 2:3, : features.shape[1]], tokens[:, None], roots, again=True, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    rows = torch.full((6, features.shape[1] + 3), float("nan"))
    rows[::2, : features.shape[1]] = features
    hidden = [torch.empty(3, 32) for _ in range(2)]
    for out, source in zip(hidden, (features, rows[::2, : features.shape[1]])):
        extend_draft(rig.head, source, tokens, [0, 1, 2, 3], rig.lengths, rig.caches, hidden=out)
    assert torch.equal(*hidden)


def test_numpy_in_numpy_out():
    rig = Rig.random(HEADS[1], torch.float32, batch=2)
    features, tokens = rig.fill([4, 6])
    want = rig.draft_rows(features, tokens, **OPTIONS)
    roots = SimpleNamespace(path=zeros(2, 1).numpy(), num_accepted=zeros(2).numpy())
    caches = [KVCache(cache.k.numpy(), cache.v.numpy()) for cache in rig.caches]
    got = draft(
        rig.head,
        features[:, None].numpy(),
        tokens[:, None].numpy(),
        roots,
        rig.before.numpy(),
        caches,
        **OPTIONS,
    )
    for a, b in zip(got, want):
        assert isinstance(a, np.ndarray)
        np.testing.assert_array_equal(a, b.numpy())


# ---- DraftHead


def parts(kind="eagle3", /, **change):
    """Keyword arguments of a small DraftHead, some of them changed."""
    H, D, V, heads, kv, inner, F = 32, 64, 48, 2, 1, 40, 96
    first = 2 * H if kind == "eagle3" else H
    layer = {
        "qkv": pack_weight(torch.ones((heads + 2 * kv) * D, first)),
        "o": pack_weight(torch.ones(H, heads * D)),
        "gate_up": pack_weight([torch.ones(inner, H)] * 2, paired=True),
        "down": pack_weight(torch.ones(H, inner)),
        "post_norm": torch.ones(H),
    }
    if kind == "eagle3":
        layer |= {"input_norm": torch.ones(H), "hidden_norm": torch.ones(H)}
    cos, sin = rope_table(16, D)
    head = {
        "kind": kind, "num_heads": heads, "num_kv_heads": kv, "head_dim": D, "norm_eps": 1e-5, "embedding":
        torch.ones(V, H), "fc": pack_weight(torch.ones(H, F if kind == "eagle3" else 2 * H)), "lm_head":
        pack_weight(torch.ones(V, H)), "cos": cos, "sin": sin, "norm": torch.ones(H) if kind == "eagle3" else
        None,
    }  # fmt: skip
    inside = change.pop("layer", {})
    head["layers"] = [DraftLayer(**(layer | inside))]
    return head | change


def test_draft_head_knows_its_sizes():
    head = DraftHead(**parts())
    assert (head.kind, head.dtype, head.num_layers, head.max_positions) == ("eagle3", "float32", 1, 16)
    assert (head.hidden_size, head.feature_size, head.intermediate_size) == (32, 96, 40)
    assert (head.num_heads, head.num_kv_heads, head.head_dim, head.vocab_size, head.draft_vocab_size) == (
        2,
        1,
        64,
        48,
        48,
    )
    assert DraftHead(**parts("eagle1")).feature_size == 32


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle3", {"kind": "medusa"}, "kind: expected eagle1 or eagle3, got medusa"),
        ("eagle3", {"embedding": torch.ones(48, 32, dtype=torch.int32)}, "embedding"),
        ("eagle3", {"embedding": torch.ones(48, 31)}, r"fc|norm"),
        (
            "eagle3",
            {"embedding": torch.ones(48, 32).bfloat16(), "norm": torch.ones(32).bfloat16()},
            "layers|fc",
        ),
        ("eagle3", {"num_heads": 3}, r"layers\[0\]\.qkv: expected a packed \[320, 64\], got \[256, 64\]"),
        ("eagle3", {"num_heads": 3, "num_kv_heads": 2}, "num_heads"),
        ("eagle3", {"head_dim": 48}, "head_dim|cos"),
        ("eagle3", {"norm": None}, "norm"),
        ("eagle3", {"norm": torch.ones(31)}, "norm"),
        ("eagle3", {"fc": None}, "fc: expected a PackedWeight"),
        ("eagle3", {"fc_norm": torch.ones(3, 31)}, "fc_norm: expected 96 elements"),
        ("eagle3", {"fc_bias": torch.ones(31)}, "fc_bias"),
        ("eagle3", {"lm_head": pack_weight(torch.ones(20, 32))}, "draft_to_target: expected a map"),
        ("eagle3", {"lm_head": pack_weight(torch.ones(20, 31))}, "lm_head"),
        ("eagle3", {"lm_head": pack_weight(torch.ones(50, 32))}, "lm_head"),
        (
            "eagle3",
            {"draft_to_target": torch.arange(47, dtype=torch.int32)},
            "draft_to_target: expected shape",
        ),
        ("eagle3", {"draft_to_target": torch.arange(48)}, "draft_to_target: .*int32"),
        (
            "eagle3",
            {"draft_to_target": torch.arange(48, dtype=torch.int32).flip(0)},
            "draft_to_target: .*increasing",
        ),
        (
            "eagle3",
            {"draft_to_target": torch.arange(1, 49, dtype=torch.int32)},
            "draft_to_target: .*got 48 at 47",
        ),
        ("eagle3", {"cos": torch.ones(16, 31)}, "cos"),
        ("eagle3", {"sin": torch.ones(15, 32)}, "sin"),
        ("eagle3", {"layers": []}, "layers|intermediate"),
        ("eagle3", {"layer": {"post_norm": None}}, r"layers\[0\]\.post_norm"),
        ("eagle3", {"layer": {"hidden_norm": None}}, r"layers\[0\]\.hidden_norm"),
        ("eagle3", {"layer": {"input_norm": None}}, r"layers\[0\]\.input_norm"),
        ("eagle3", {"layer": {"q_norm": torch.ones(64)}}, "q_norm, k_norm"),
        ("eagle3", {"layer": {"qkv_bias": torch.ones(255)}}, r"layers\[0\]\.qkv_bias"),
        (
            "eagle3",
            {"layer": {"gate_up": pack_weight(torch.ones(80, 32))}},
            r"layers\[0\]\.gate_up: expected paired",
        ),
        (
            "eagle3",
            {"layer": {"down": pack_weight(torch.ones(32, 40).bfloat16())}},
            r"layers\[0\]\.down: .*float32",
        ),
        ("eagle3", {"norm_eps": -1.0}, "norm_eps"),
        ("eagle1", {"norm": torch.ones(32)}, "norm"),
        ("eagle1", {"feedback_post_norm": True}, "feedback_post_norm"),
        ("eagle1", {"layer": {"input_norm": torch.ones(32)}}, "input_norm: expected None"),
        ("eagle1", {"fc": pack_weight(torch.ones(32, 96))}, "fc"),
    ],
)
def test_draft_head_refuses_by_name(kind, change, message):
    with pytest.raises(ValueError, match=message):
        DraftHead(**parts(kind, **change))


def test_a_head_keeps_its_tensors_alive():
    rig = Rig.random(HEADS[1], torch.float32)
    config, tensors = random_head("eagle3", draft_vocab=40)
    loaded = head_from_tensors(config, tensors, target_config=random_target()[0])
    head = loaded.to_draft_head()
    want = rig.draft_rows(*rig.fill([6]), **OPTIONS)
    del loaded, config, tensors
    _ = [torch.full((n,), float("nan")) for n in range(0, 20000, 7)]  # would land in freed memory
    other = Rig(head)
    got = other.draft_rows(*other.fill([6]), **OPTIONS)
    assert other.head.draft_vocab_size == 40
    assert got.num_nodes.tolist() == want.num_nodes.tolist()


# ---- the head of the training recipe


def test_the_torch_head_of_the_training_recipe_gives_the_same_output():
    config = HeadConfig(
        hidden_size=48, intermediate_size=72, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
        vocab_size=96, draft_vocab_size=40, rms_norm_eps=1e-5, rope_theta=1000.0, feature_layers=(2, 6, 9),
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    trained = EagleHead(config)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        trained.feature_scale.copy_(torch.rand_like(trained.feature_scale) + 0.5)
        trained.draft_ids.copy_(torch.randperm(96)[:40].sort().values)
    target_config, target_tensors = random_target(hidden=48)
    loaded = head_from_tensors(
        head_config(config), head_tensors(trained, torch.float32),
        target_config=target_config, target_tensors=target_tensors,
    )  # fmt: skip
    assert loaded.feature_layers == (2, 6, 9)
    rig = Rig(loaded.to_draft_head(torch.float32))
    features, tokens = rig.pairs(20)
    got = rig.prompt(0, features, tokens)
    embeddings = target_tensors["model.embed_tokens.weight"][tokens.long()]
    with torch.no_grad():
        mask = torch.ones(20, 20, dtype=torch.bool).tril()
        want, _ = trained.step(
            embeddings[None], trained.fuse(features)[None], torch.arange(20)[None], None, mask[None, None]
        )
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
    # One level of drafting: the best child of the root, and its best child from the head's own output.
    tree = rig.draft_last(*(x[0] for x in rig.pairs(1)), max_nodes=3, top_k=1, levels=2)
    follow, last = rig.history[0][1], rig.history[0][0]
    with torch.no_grad():
        embeddings = target_tensors["model.embed_tokens.weight"][follow.long()]
        mask = torch.ones(21, 21, dtype=torch.bool).tril()
        hidden, cache = trained.step(
            embeddings[None], trained.fuse(last)[None], torch.arange(21)[None], None, mask[None, None]
        )
        first = trained.draft_ids[trained.logits(hidden[:, -1]).argmax(-1)]
        embedding = target_tensors["model.embed_tokens.weight"][first]
        hidden, _ = trained.step(embedding[None], hidden[:, -1:], torch.tensor([[21]]), cache, None)
        second = trained.draft_ids[trained.logits(hidden[:, -1]).argmax(-1)]
    assert tree.tokens[0].tolist() == [int(follow[-1]), int(first), int(second)]
