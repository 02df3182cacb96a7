"""The acceptance that the recipe measures, without an engine and against one."""

from __future__ import annotations

import pytest
import torch

from eagle_decode import Engine, SamplingParams
from eagle_decode.heads import load_head
from eagle_decode.models.llama import LlamaTarget
from eagle_decode.train.evaluate import (
    SHAPES,
    TREE_8,
    Drafter,
    Reference,
    TreeShape,
    acceptance,
    accepted_length,
    figures,
    write_references,
)
from eagle_decode.train.export import export_head, import_head
from eagle_decode.train.target import TorchTarget
from train_rig import VOCAB, random_head, tiny_checkpoint


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(tiny_checkpoint(), dtype=torch.float32)


def test_draft_tree_holds_the_most_probable_paths(target):
    """Against all paths by brute force: with top_k = Vd nothing is pruned, so the best nodes are known."""
    head = random_head(draft_vocab_size=4)
    features, tokens = torch.randn(3, 96), torch.tensor([5, 6, 7])
    drafter = Drafter(head, target.embedding)
    with torch.inference_mode():
        drafter.extend(tokens, features)
        got_tokens, got_parents = drafter.draft(TreeShape(levels=2, top_k=4, num_nodes=9))
        first = head.logits(drafter.hidden)[0, 0].log_softmax(-1)
        scores = {(i,): first[i].item() for i in range(4)}
        for i in range(4):
            embedded = target.embedding[head.draft_ids[i]][None, None]
            hidden, _ = head.step(embedded, drafter.hidden, torch.tensor([[3]]), drafter.cache, None)
            second = head.logits(hidden)[0, 0].log_softmax(-1)
            scores |= {(i, j): (first[i] + second[j]).item() for j in range(4)}
    best = sorted(scores, key=scores.get, reverse=True)[:8]
    expected = {tuple(head.draft_ids[list(path)].tolist()) for path in best}
    paths = []
    for token, parent in zip(got_tokens, got_parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == expected


def test_a_draft_vocabulary_smaller_than_top_k_is_all_tried(target):
    features, tokens = torch.randn(3, 96), torch.tensor([5, 6, 7])
    trees = []
    for top_k in (3, 8):
        torch.manual_seed(0)
        drafter = Drafter(random_head(draft_vocab_size=3), target.embedding)
        with torch.inference_mode():
            drafter.extend(tokens, features)
            trees.append(drafter.draft(TreeShape(levels=2, top_k=top_k, num_nodes=9)))
    assert trees[0] == trees[1]


def test_accepted_length_walks_the_tree():
    tokens, parents = [5, 9, 7, 9], [-1, -1, 0, 2]
    assert accepted_length(tokens, parents, [5, 7, 9, 1]) == 3
    assert accepted_length(tokens, parents, [9, 7]) == 1
    assert accepted_length(tokens, parents, [4]) == 0


def test_acceptance_counts_the_tokens_of_a_cycle(target):
    """A tree that holds every token is always right at each of its levels; an empty vocabulary match is 1 a
    cycle.
    """
    prompt = [3, 4, 5]
    references = write_references(target, [prompt], 11, [VOCAB + 1], (2, 3, 4))
    assert len(references[0].tokens) == 14
    everything = random_head(draft_vocab_size=VOCAB)
    wide = TreeShape(levels=1, top_k=VOCAB, num_nodes=VOCAB + 1)
    assert acceptance(everything, target.embedding, references, wide) == 2.0  # 10 tokens in cycles of 2
    reference = Reference(torch.tensor([3, 4, 5, *[9] * 8]), 3, references[0].features[:11])
    hot = write_references(target, [prompt] * 2, 11, [VOCAB + 1], (2, 3, 4), temperature=1.0)
    assert [(reference.temperature, reference.seed) for reference in hot] == [(1.0, 0), (1.0, 1)]
    found = figures(everything, target.embedding, references + hot)
    assert list(found) == [*SHAPES, "tree of 32 at T = 1"]
    assert found["tree of 8"] == round(acceptance(everything, target.embedding, references, TREE_8), 3)
    never = random_head(draft_vocab_size=8)
    never.draft_ids.copy_(torch.arange(20, 28))
    assert acceptance(never, target.embedding, [reference], TreeShape(3, 4, 8)) == 1.0


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Of every node its tokens from the root on, which is not among them; parents first, -1 for the root."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_measured_is_what_the_engine_does(temperature, tmp_path):
    """Text and every tree: with the engine's noise, under the reference's seed, all of it in the draft."""
    checkpoint = tiny_checkpoint(head_dim=64)
    target = TorchTarget(checkpoint, dtype=torch.float32)
    head = random_head(draft_vocab_size=40, head_dim=64)
    head.norm.weight.data *= 0.2  # unsure, so that trees are wide: a random head is seldom right
    export_head(head, tmp_path)
    head = import_head(tmp_path)  # its weights rounded to bfloat16
    shape, trees = TreeShape(levels=3, top_k=6, num_nodes=30), []
    engine = Engine(
        LlamaTarget(checkpoint, torch.float32),
        load_head(tmp_path, target_config=checkpoint.config, target_tensors=checkpoint.tensors),
        levels=shape.levels, draft_top_k=shape.top_k, max_nodes=shape.num_nodes, coupling=1.0,
        observer=lambda batch, rows, tree, positions: trees.append(
            paths(tree.tokens[0, 1 : tree.num_nodes[0]].tolist(),
                  (tree.parents[0, 1 : tree.num_nodes[0]] - 1).tolist())
        ),
    )  # fmt: skip
    prompts = [[3, 4, 5], [7, 9], [11, 12, 13, 14], [20, 21]]
    references = write_references(target, prompts, 48, [VOCAB + 1], (2, 3, 4), temperature)
    compared = accepted = 0
    for prompt, reference in zip(prompts, references, strict=True):
        trees.clear()
        sampling = SamplingParams(
            temperature=temperature, seed=reference.seed, max_new_tokens=56, ignore_eos=True
        )
        (result,) = engine.generate([prompt], sampling)
        tokens, committed = reference.tokens.tolist(), len(prompt)
        assert result.tokens[:48] == tokens[committed:]
        drafter = Drafter(head, target.embedding, temperature, reference.seed)
        with torch.inference_mode():
            for tree in trees[1:]:  # the prompt's pass has none
                if committed + 1 >= len(tokens):
                    break
                rows = slice(drafter.committed, committed)
                drafter.extend(reference.tokens[rows.start + 1 : rows.stop + 1], reference.features[rows])
                nodes = drafter.draft(shape)
                assert paths(*nodes) == tree
                length = accepted_length(*nodes, tokens[committed + 1 :])
                committed, compared, accepted = committed + length + 1, compared + 1, accepted + (length > 0)
    assert compared > 100
    assert accepted > 2
