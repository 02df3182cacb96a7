"""Where an op makes its own outputs it looks at its inputs first, and refuses by name, as the op does."""

from __future__ import annotations

import pytest
import torch

import eagle_cuda as e
from eagle_cuda.kv_cache import KVCache

WEIGHT = e.pack_weight(torch.zeros(6, 4))
TREE = e.tree_from_parents([[1, 2], [1, 2]], [[-1, 0], [-1, 0]])
CACHE = KVCache.empty(2, 8, 1, 64)
NONE = torch.zeros(2, dtype=torch.int32)
SEEDS = torch.zeros(2, dtype=torch.int64)
CANDIDATES, _ = e.empty_candidates(2, 2, 1)


def sample(logits):
    return e.sample_tokens(
        logits, temperature=torch.ones(2), seeds=SEEDS, positions=torch.zeros(2, 3, dtype=torch.int32)
    )


def attention(q):
    mask = torch.ones(2, 3, 1, dtype=torch.int32)
    return e.tree_attention(q, CACHE, seq_lens=NONE, num_nodes=NONE, mask=mask)


def reject(tokens):
    tree, p = TREE._replace(tokens=tokens), torch.ones(2, 2, 5)
    return e.verify_rejection(tree, p, NONE, scheme="point_mass", seeds=SEEDS)


def append(q):
    k = torch.zeros(2, 3, 1, 64)
    depths = torch.zeros(2, 3, dtype=torch.int32)
    return e.append_kv(q, k, k, CACHE, seq_lens=NONE, depths=depths, num_nodes=NONE)


# By the op's name: the call with one argument left open, that argument's name and a good value of it.
OPEN = {
    "linear": (lambda x: e.linear(x, WEIGHT), "x", torch.zeros(3, 4)),
    "rms_norm": (lambda x: e.rms_norm(x, torch.ones(4)), "x", torch.zeros(3, 4)),
    "lm_head_topk": (lambda x: e.lm_head_topk(x, WEIGHT, 2), "x", torch.zeros(3, 4)),
    "append_kv": (append, "q", torch.zeros(2, 3, 2, 64)),
    "tree_attention": (attention, "q", torch.zeros(2, 3, 2, 64)),
    "sample_tokens": (sample, "logits", torch.zeros(2, 3, 5)),
    "gumbel_noise": (lambda x: e.gumbel_noise(x, NONE, 4), "seeds", SEEDS),
    "verify_rejection": (reject, "tokens", TREE.tokens),
    "verify": (lambda x: e.verify(TREE._replace(tokens=x), TREE.tokens, NONE), "tokens", TREE.tokens),
    "build_tree": (lambda x: e.build_tree(x, CANDIDATES, max_nodes=3), "root_tokens", NONE),
    "retrieve_indices": (lambda x: e.retrieve_indices(TREE._replace(parents=x)), "parents", TREE.parents),
}


@pytest.mark.parametrize("name", OPEN)
def test_wrong_rank_and_no_tensor_are_refused_by_name(name):
    call, argument, good = OPEN[name]
    call(good)
    for wrong in (good.flatten()[0], good[0], good[None]):
        with pytest.raises(ValueError, match=f"{argument}: expected .*, got"):
            call(wrong)
    for wrong in (None, "x", 1, [1.0, 2.0]):
        with pytest.raises(TypeError, match=f"{argument}: expected a tensor, got {type(wrong).__name__}"):
            call(wrong)


def test_an_empty_head_is_refused_by_name():
    with pytest.raises(ValueError, match=r"k_cache: expected shape \[-1, -1, -1, 0\]"):
        attention(torch.zeros(2, 3, 2, 0))


@pytest.mark.parametrize("wrong", [-1, 2.5, "a"])
def test_sizes_are_refused_by_name(wrong):
    for argument, call in {
        "k": lambda n: e.lm_head_topk(torch.zeros(3, 4), WEIGHT, n),
        "vocab_size": lambda n: e.gumbel_noise(SEEDS, NONE, n),
        "max_path": lambda n: e.verify(TREE, TREE.tokens, NONE, max_path=n),
        "batch": lambda n: e.empty_draft_tree(n, 4),
        "max_nodes": lambda n: e.empty_draft_tree(2, n),
        "top_k": lambda n: e.empty_candidates(2, n, 2),
        "levels": lambda n: e.empty_candidates(2, 2, n),
        "max_leaves": lambda n: e.retrieve_indices(TREE, max_leaves=n),
        "max_positions": lambda n: e.rope_table(n, 64),
    }.items():
        with pytest.raises(ValueError, match=f"{argument}: expected .*, got {wrong!r}"):
            call(wrong)


def test_what_is_no_packed_weight_is_refused_by_name():
    for call in (lambda w: e.linear(torch.zeros(3, 4), w), e.unpack_weight):
        with pytest.raises(TypeError, match="weight: expected a PackedWeight, got Tensor"):
            call(torch.zeros(6, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"theta": 0.0}, "theta: expected a finite number > 0, got 0"),
        ({"theta": float("nan")}, "theta: expected a finite number > 0, got nan"),
        ({"scaling": "linear"}, "scaling: expected a mapping or None, got 'linear'"),
        ({"scaling": {"type": "linear", "factor": 0}}, "finite number > 0 for factor, got 0"),
        ({"scaling": {"type": "linear", "factor": "x"}}, "finite number > 0 for factor, got 'x'"),
    ],
)
def test_rope_settings_without_meaning_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        e.rope_table(4, 64, **arguments)


def test_trees_that_no_tensor_can_hold_are_refused():
    with pytest.raises(ValueError, match=r"tokens\[0\]\[0\]: expected"):
        e.tree_from_parents([[2**31]], [[-1]])
    with pytest.raises(ValueError, match="tokens: expected 2 dimensions"):
        e.tree_from_parents([1, 2], [-1, 0])


def test_the_norms_weight_has_one_name():
    for wrong in (torch.zeros(4).double(), torch.zeros(3)):
        with pytest.raises(ValueError, match="rms_norm: expected"):
            e.linear(torch.zeros(3, 4), WEIGHT, rms_norm=wrong)


# ---- outputs that share memory -------------------------------------------------------------------


def test_outputs_are_apart():
    tokens = torch.zeros(2, 3, dtype=torch.int32)
    logits = torch.zeros(2, 3, 7)
    options = {"temperature": torch.ones(2), "seeds": SEEDS, "positions": tokens.clone()}
    with pytest.raises(ValueError, match="^flags: expected memory of its own, got that of tokens$"):
        e.sample_tokens(logits, **options, out=e.Sampled(tokens, None, tokens))
    halves = torch.zeros(2 * 2 * 3, dtype=torch.int32)
    first, second = halves[:6].view(2, 3), halves[6:].view(2, 3)
    e.sample_tokens(logits, **options, out=e.Sampled(first, None, second))  # neighbours are apart
    with pytest.raises(ValueError, match=r"^flags: expected memory of its own, got that of tokens$"):
        e.sample_tokens(logits, **options, out=e.Sampled(first, None, halves[5:11].view(2, 3)))

    tree = e.empty_draft_tree(2, 3)
    with pytest.raises(
        ValueError, match=r"^tree\.parents: expected memory of its own, got that of tree\.tok"
    ):
        e.build_tree(NONE, CANDIDATES, out=tree._replace(parents=tree.tokens))
    candidates, beam = e.empty_candidates(2, 2, 1)
    with pytest.raises(ValueError, match="^beam_rows: expected memory of its own, got that of beam_tokens$"):
        e.expand_tree(
            torch.zeros(2, 1, 2, dtype=torch.int32), torch.zeros(2, 1, 2), candidates,
            beam._replace(rows=beam.tokens), level=1, levels=1,
        )  # fmt: skip
    accepted = e.verify(TREE, torch.zeros(2, 2, dtype=torch.int32), NONE)
    with pytest.raises(ValueError, match="^finished: expected memory of its own, got that of next_tokens$"):
        e.verify(
            TREE, torch.zeros(2, 2, dtype=torch.int32), NONE,
            out=accepted._replace(finished=accepted.next_tokens),
        )  # fmt: skip
    lengths = NONE.clone()  # an output may be an input of the same meaning
    e.verify(TREE, torch.zeros(2, 2, dtype=torch.int32), lengths, out=accepted._replace(new_seq_lens=lengths))


def test_a_cache_is_compacted_once():
    path, none = torch.zeros(2, 1, dtype=torch.int32), NONE
    for caches in ([CACHE, CACHE], [KVCache(CACHE.k, CACHE.k)]):
        with pytest.raises(ValueError, match="expected every cache once, got two that begin at the same"):
            e.compact_kv(caches, path, none, none, max_nodes=4)
    both = torch.zeros(2, 2, 8, 1, 64)
    e.compact_kv([KVCache(both[:, 0], both[:, 1])], path, none, none, max_nodes=4)  # interleaved is apart

    table = torch.zeros(2, 1, dtype=torch.int32)
    layers = [KVCache(torch.zeros(2, 8, 1, 64), torch.zeros(2, 8, 1, 64), t) for t in (table, table[:])]
    e.compact_kv(layers, path, none, none, max_nodes=4)  # the same memory in another object
    layers[1] = layers[1]._replace(page_table=table.clone())
    with pytest.raises(ValueError, match=r"^caches\[1\]\.page_table: expected that of caches\[0\]"):
        e.compact_kv(layers, path, none, none, max_nodes=4)
    e.compact_kv(layers, path, none, none, page_table=table, max_nodes=4)
