"""Acceptance length of a head, measured without an engine: teacher-forced along the target's own text.

The target writes its answer once; then drafting is replayed along it: draft a tree at the committed prefix,
walk it along the known continuation, commit what matched plus one token, repeat. The number of tokens per
cycle is that of speculative decoding, at the cost of the drafts alone: of greedy decoding, and of sampling at
temperature 1 with coupled drafts (docs/coupled_drafting.md, all of the noise).

    python -m eagle_decode.train.evaluate --target smollm2-135m --head my_head --prompts prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_cuda.sampling import gumbel_noise
from eagle_decode.train.data import read_prompts, sample_batch
from eagle_decode.train.head import EagleHead
from eagle_decode.train.target import TorchTarget


@dataclass
class Reference:
    """An answer at a temperature (0: greedy), with the noise of `seed`.

    tokens [n] int64 of prompt and answer, the prompt's length, features [n, F].
    """

    tokens: Tensor
    prompt_length: int
    features: Tensor
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class TreeShape:
    """An EAGLE-2 tree: `num_nodes` counts the root; a chain is top_k = 1 and num_nodes = levels + 1."""

    levels: int
    top_k: int
    num_nodes: int


CHAIN_4 = TreeShape(levels=4, top_k=1, num_nodes=5)
TREE_8 = TreeShape(levels=4, top_k=4, num_nodes=8)
TREE_32 = TreeShape(levels=6, top_k=8, num_nodes=32)
SHAPES = {"chain of 4": CHAIN_4, "tree of 8": TREE_8, "tree of 32": TREE_32}


@torch.inference_mode()
def write_references(
    target: TorchTarget,
    prompts: list[list[int]],
    max_new_tokens: int,
    stops: list[int],
    layers: tuple[int, ...],
    temperature: float = 0.0,
) -> list[Reference]:
    """Answers of the target to tokenised prompts, with their features; above temperature 0 the i-th one is
    what seed i decides.
    """
    references = []
    for at in range(0, len(prompts), 16):
        group = prompts[at : at + 16]
        seeds = list(range(at, at + len(group)))
        answers = sample_batch(target, group, [temperature] * len(group), max_new_tokens, stops, seeds)
        for prompt, answer, seed in zip(group, answers, seeds, strict=True):
            tokens = torch.tensor(prompt + answer)
            _, captured = target.forward(tokens[None], torch.arange(len(tokens))[None], capture=layers)
            features = torch.cat(captured, -1)[0]
            references.append(Reference(tokens, len(prompt), features, temperature, seed))
    return references


class Drafter:
    """Drafts trees with a torch head after a growing committed prefix (one request), above temperature 0
    with the target's noise.
    """

    def __init__(self, head: EagleHead, embedding: Tensor, temperature: float = 0.0, seed: int = 0):
        self.head, self.embedding = head, embedding.float()
        self.temperature, self.seed = temperature, seed
        self.cache, self.committed = None, 0

    def extend(self, next_tokens: Tensor, features: Tensor) -> None:
        """Commits Q positions: features [Q, F] with the tokens [Q] that follow each of them."""
        count = len(next_tokens)
        rows = torch.arange(self.committed, self.committed + count, device=features.device)
        mask = torch.arange(self.committed + count, device=features.device) <= rows[:, None]
        fused = self.head.fuse(features[None].float())
        embedded = self.embedding[next_tokens][None]
        output, self.cache = self.head.step(embedded, fused, rows[None], self.cache, mask[None, None])
        self.committed += count
        self.hidden = output[:, -1:]

    def _best(self, hidden: Tensor, level: int, k: int) -> tuple[Tensor, Tensor]:
        """Of rows [1, R, H] at a level: the k best scores and their draft ids, each [R, k]."""
        logits = self.head.logits(hidden)[0].float()
        if self.temperature > 0:
            # Features of position t and the token t + 1 were committed last: the root's child is token t + 2.
            position = torch.tensor([self.committed + 1 + level], dtype=torch.int32)
            noise = gumbel_noise(torch.tensor([self.seed]), position, self.head.config.vocab_size)
            logits = logits + self.temperature * noise.to(logits.device)[0, self.head.draft_ids]
        return logits.log_softmax(-1).topk(k, -1)

    def draft(self, shape: TreeShape) -> tuple[list[int], list[int]]:
        """Returns tokens and parents (-1: the root) of the kept draft nodes, parents first.

        Method: EAGLE-2 (Li et al., arXiv 2406.16858): each level expands the `top_k` nodes of highest path
        probability, and the best `num_nodes` - 1 candidates of all levels are kept.
        """
        head, device = self.head, self.hidden.device
        k = min(shape.top_k, head.config.draft_vocab_size)
        values, ids = self._best(self.hidden, 0, k)
        tokens, scores = [head.draft_ids[ids[0]]], [values[0]]
        parents = [torch.full((k,), -1, device=device)]
        frontier = torch.arange(k, device=device)  # candidate index of each node being expanded
        hidden, cache = self.hidden.expand(1, k, -1), self.cache
        ancestors = torch.eye(k, dtype=torch.bool, device=device)
        for level in range(1, shape.levels):
            all_tokens, all_scores = torch.cat(tokens), torch.cat(scores)
            prefix = torch.ones(k, self.committed, dtype=torch.bool, device=device)
            mask = torch.cat([prefix, ancestors], 1)[None, None]
            positions = torch.full((1, k), self.committed + level - 1, device=device)
            embedded = self.embedding[all_tokens[frontier]][None]
            hidden, cache = head.step(embedded, hidden, positions, cache, mask)
            values, ids = self._best(hidden, level, k)
            level_scores = (values + all_scores[frontier][:, None]).reshape(-1)
            tokens.append(head.draft_ids[ids].reshape(-1))
            scores.append(level_scores)
            parents.append(frontier.repeat_interleave(k))
            chosen = level_scores.topk(k).indices
            row = chosen // k
            frontier, hidden = len(all_tokens) + chosen, hidden[:, row]
            ancestors = torch.cat([ancestors[row], torch.eye(k, dtype=torch.bool, device=device)], 1)
        order = torch.cat(scores).sort(descending=True, stable=True).indices[: shape.num_nodes - 1]
        kept = (
            order.sort().values.tolist()
        )  # a parent scores at least as high as its child, and stands before it
        node_of = {candidate: node for node, candidate in enumerate(kept)} | {-1: -1}
        flat_tokens, flat_parents = torch.cat(tokens).tolist(), torch.cat(parents).tolist()
        return [flat_tokens[i] for i in kept], [node_of[flat_parents[i]] for i in kept]


def accepted_length(tokens: list[int], parents: list[int], continuation: list[int]) -> int:
    """How many tokens of `continuation` the tree contains as a path from its root."""
    at, length = -1, 0
    for token in continuation:
        children = [i for i, parent in enumerate(parents) if parent == at and tokens[i] == token]
        if not children:
            break
        at, length = children[0], length + 1
    return length


@torch.inference_mode()
def acceptance(head: EagleHead, embedding: Tensor, references: list[Reference], shape: TreeShape) -> float:
    """Tokens per cycle over all references (1.0: every draft was wrong)."""
    cycles, produced = 0, 0
    for reference in references:
        tokens = reference.tokens
        drafter = Drafter(head, embedding, reference.temperature, reference.seed)
        committed, length = reference.prompt_length, len(reference.tokens)
        while committed + 1 < length:
            rows = slice(drafter.committed, committed)
            drafter.extend(tokens[rows.start + 1 : rows.stop + 1], reference.features[rows])
            continuation = tokens[committed + 1 :].tolist()
            accepted = accepted_length(*drafter.draft(shape), continuation)
            cycles += 1
            produced += min(accepted + 1, len(continuation))
            committed += accepted + 1
    return produced / max(cycles, 1)


def figures(head: EagleHead, embedding: Tensor, references: list[Reference]) -> dict[str, float]:
    """Tokens per cycle of every shape along the greedy references, and of the largest along those above."""
    greedy = [reference for reference in references if not reference.temperature]
    found = {name: acceptance(head, embedding, greedy, shape) for name, shape in SHAPES.items()}
    for temperature in sorted({reference.temperature for reference in references} - {0.0}):
        hot = [reference for reference in references if reference.temperature == temperature]
        found[f"tree of 32 at T = {temperature:g}"] = acceptance(head, embedding, hot, TREE_32)
    return {name: round(value, 3) for name, value in found.items()}


def main(arguments: list[str] | None = None) -> int:
    """Measures an exported head on a prompt file and prints one JSON object."""
    from eagle_decode.models.checkpoint import load_checkpoint
    from eagle_decode.models.tokenizer import chat_prompt, load_tokenizer, stop_token_ids
    from eagle_decode.train.export import import_head

    parser = argparse.ArgumentParser(prog="python -m eagle_decode.train.evaluate", description=main.__doc__)
    parser.add_argument("--target", required=True, help="folder, .gguf file, or smollm2-135m")
    parser.add_argument("--head", required=True, help="folder of an exported head")
    parser.add_argument("--prompts", required=True, help="prompt file, as for training")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args(arguments)
    checkpoint, tokenizer = load_checkpoint(chosen.target), load_tokenizer(chosen.target)
    target = TorchTarget(checkpoint, chosen.device)
    head = import_head(chosen.head).to(chosen.device).eval()
    prompts = [chat_prompt(tokenizer, text) for text in read_prompts(chosen.prompts)[: chosen.num_prompts]]
    stops = stop_token_ids(tokenizer, checkpoint.config)
    written = chosen.max_new_tokens, stops, head.config.feature_layers
    references = [r for heat in (0.0, 1.0) for r in write_references(target, prompts, *written, heat)]
    found = figures(head, target.embedding, references)
    print(json.dumps({"prompts": len(prompts), "tokens_per_cycle": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
