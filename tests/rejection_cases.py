"""Trees whose law is known, drawn by the million for tests/test_rejection_law.py."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import NamedTuple

import torch

from eagle_cuda.sampling import gumbel_noise
from eagle_cuda.tree import empty_draft_tree
from eagle_cuda.verify import verify_rejection
from reference import verify as naive

SAMPLED = ("sampled_tree", "chain")
START = 5  # rows in the cache
PARTS = 64  # probabilities are whole parts of this: the same numbers as floats and as fractions


class Node(NamedTuple):
    parent: int
    rank: int  # among its siblings
    depth: int


def nodes_of(shape) -> list[Node]:
    """Nodes of a tree given as nested tuples, parents first."""
    nodes, waiting = [Node(-1, 0, 0)], [(0, shape)]
    for node, children in waiting:
        for rank, child in enumerate(children):
            waiting.append((len(nodes), child))
            nodes.append(Node(node, rank, nodes[node].depth + 1))
    return nodes


def links_of(nodes: list[Node]) -> tuple[list[int], list[int]]:
    first, sibling = [-1] * len(nodes), [-1] * len(nodes)
    for i, node in enumerate(nodes):
        for j, other in enumerate(nodes):
            if other.parent == i and other.rank == 0:
                first[i] = j
            if i and other.parent == node.parent and other.rank == node.rank + 1:
                sibling[i] = j
    return first, sibling


class Model:
    """Distributions after every prefix of at most `depth` tokens."""

    def __init__(self, seed: int, vocab: int, depth: int, *, least: int = 1):
        self.vocab, random = vocab, Random(seed)
        self.parts = [[self.row(random, least) for _ in range(vocab**d)] for d in range(depth + 1)]

    def row(self, random: Random, least: int) -> list[int]:
        """Parts of at least `least` tokens; some of the others have none."""
        some = random.sample(range(self.vocab), random.randint(max(least, self.vocab - 1), self.vocab))
        cuts = sorted(random.sample(range(1, PARTS), len(some) - 1))
        row = [0] * self.vocab
        for token, low, high in zip(some, [0, *cuts], [*cuts, PARTS]):
            row[token] = high - low
        return row

    def index(self, prefix: tuple[int, ...]) -> int:
        number = 0
        for token in prefix:
            number = number * self.vocab + token
        return number

    def __call__(self, prefix: tuple[int, ...]) -> list[Fraction]:
        return [Fraction(x, PARTS) for x in self.parts[len(prefix)][self.index(prefix)]]

    def rows(self, depth: int, index: torch.Tensor) -> torch.Tensor:
        return (torch.tensor(self.parts[depth], dtype=torch.float32) / PARTS)[index]


class Chance(NamedTuple):
    """A scheme on a tree of one shape over a small vocabulary."""

    scheme: str
    shape: tuple
    vocab: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.scheme}-V{self.vocab}-{self.seed}-{str(self.shape).replace(' ', '')}"

    @property
    def depth(self) -> int:
        return max(node.depth for node in nodes_of(self.shape))

    @property
    def target(self) -> Model:
        return Model(self.seed, self.vocab, self.depth)

    @property
    def draft(self) -> Model | None:
        widest = max(node.rank for node in nodes_of(self.shape)) + 1
        return Model(1000 + self.seed, self.vocab, self.depth, least=widest) if self.sampled else None

    @property
    def sampled(self) -> bool:
        return self.scheme in SAMPLED

    def chosen(self, prefix: tuple[int, ...]) -> list[int]:
        """The tokens of the children after a prefix, where they are not drawn: any order, zeros of p too."""
        return Random(f"{self.seed} {prefix}").sample(range(self.vocab), self.vocab)

    def law(self, **options) -> dict[tuple[int, ...], Fraction]:
        chosen = None if self.sampled else self.chosen
        return naive.law(self.scheme, self.shape, self.target, self.draft, chosen=chosen, **options)

    def draw(
        self, draws: int, *, noise: bool, reuse: bool = False, coupled: bool = False
    ) -> dict[tuple[int, ...], int]:
        """How often each sequence was emitted, over so many requests whose trees are drawn anew. `coupled`:
        drawn by the target's own noise; without `noise`, that of a child is its coin too. `reuse`: the first
        child's coin is used for the last draw as well."""
        generator = torch.Generator().manual_seed(self.seed + 17 * noise)
        nodes, vocab = nodes_of(self.shape), self.vocab
        first, sibling = links_of(nodes)
        tokens = torch.zeros(draws, len(nodes), dtype=torch.int64)
        prefix = torch.zeros(draws, len(nodes), dtype=torch.int64)
        target = torch.empty(draws, len(nodes), vocab)
        draft = torch.empty_like(target) if self.sampled else None
        uniforms = torch.rand(draws, len(nodes) + 1, generator=generator)
        seeds, children = torch.arange(draws), {}
        for i, node in enumerate(nodes):
            if node.parent >= 0:
                tokens[:, i] = children[node.parent][:, node.rank]
                prefix[:, i] = prefix[:, node.parent] * vocab + tokens[:, i]
            target[:, i] = self.target.rows(node.depth, prefix[:, i])
            if first[i] < 0 and not self.sampled:
                continue
            if self.sampled:  # the earliest of exponential clocks: draws without replacement, in order
                draft[:, i] = self.draft.rows(node.depth, prefix[:, i])
                clocks = torch.empty(draws, vocab, dtype=torch.float64).exponential_(generator=generator)
                clocks /= draft[:, i]
                if coupled:
                    positions = torch.full((draws,), START + node.depth + 1, dtype=torch.int32)
                    gumbel = gumbel_noise(seeds, positions, vocab)
                    clocks = -draft[:, i].log() - gumbel
                    for child in (j for j, other in enumerate(nodes) if other.parent == i):
                        token = clocks.argsort(1)[:, nodes[child].rank, None]
                        uniforms[:, child] = (-(-gumbel).exp()).exp().gather(1, token)[:, 0]
                children[i] = clocks.argsort(1)
            else:
                table = [self.chosen(self.prefix_of(k, node.depth)) for k in range(vocab**node.depth)]
                children[i] = torch.tensor(table)[prefix[:, i]]
        tree = empty_draft_tree(1, 1)._replace(
            tokens=tokens.int(),
            first_child=torch.tensor([first], dtype=torch.int32).expand(draws, -1).contiguous(),
            next_sibling=torch.tensor([sibling], dtype=torch.int32).expand(draws, -1).contiguous(),
            num_nodes=torch.full((draws,), len(nodes), dtype=torch.int32),
        )
        if reuse:
            uniforms[:, -1] = uniforms[:, 1]
        source = {"coins": uniforms[:, :-1].contiguous(), "final_coins": uniforms[:, -1].contiguous()}
        if noise:
            source = {"seeds": seeds}
        seq_lens = torch.full((draws,), START, dtype=torch.int32)
        out = verify_rejection(
            tree, target, seq_lens, scheme=self.scheme, draft_probs=draft, max_path=self.depth + 1, **source
        )
        assert out.flags.max() == 0
        code = torch.zeros(draws, dtype=torch.int64)
        for column in out.emitted.long().unbind(1):
            code = code * (vocab + 1) + column + 1
        found = {}
        for value, count in zip(*(t.tolist() for t in code.unique(return_counts=True))):
            digits = []
            while value:
                value, digit = divmod(value, vocab + 1)
                digits.append(digit - 1)
            found[tuple(d for d in reversed(digits) if d >= 0)] = count
        return found

    def prefix_of(self, number: int, depth: int) -> tuple[int, ...]:
        digits = []
        for _ in range(depth):
            number, digit = divmod(number, self.vocab)
            digits.append(digit)
        return tuple(reversed(digits))


def agreement(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], Fraction]) -> float:
    """The p-value of the chi-square test: 0 where something impossible was emitted. Rare sequences count
    together."""
    from scipy.stats import chi2

    total = sum(counts.values())
    if not counts.keys() <= law.keys():
        return 0.0
    cells, rare = [], [0.0, 0.0]
    for key, probability in law.items():
        expected = float(probability) * total
        if expected >= 10:
            cells.append((counts.get(key, 0), expected))
        else:
            rare = [rare[0] + counts.get(key, 0), rare[1] + expected]
    cells += [tuple(rare)] if rare[1] >= 5 else []
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
