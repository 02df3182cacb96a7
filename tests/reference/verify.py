"""The accepting walks in plain Python, from the comments of verify.h and docs/rejection.md."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

from reference.sampling import philox


def verify(
    tokens, first_child, next_sibling, num_nodes, targets, seq_len, *, stop=(), budget=None, max_path=1 << 30
):
    """One request. Returns (path, num_accepted, next_token, finished, new_seq_len)."""
    nodes = min(num_nodes, len(tokens))
    if nodes <= 0:
        return [], -1, 0, 0, seq_len
    if budget is not None and budget <= 0:
        return [], -1, 0, 2, seq_len
    path, node, token, finished = [], 0, 0, 0
    while True:
        path.append(node)
        token = targets[node]
        if token in [s for s in stop if s != -1]:
            finished = 1
            break
        if budget is not None and len(path) == budget:
            finished = 2
            break
        if len(path) == max_path:
            break
        siblings, child = [], first_child[node]
        while 0 <= child < nodes and child not in siblings:
            siblings.append(child)
            child = next_sibling[child]
        matching = [s for s in siblings if tokens[s] == token]
        if not matching:
            break
        node = matching[0]
    return path, len(path) - 1, token, finished, seq_len + len(path)


def accept_by_paths(tokens, retrieve_indices, targets):
    """EAGLE's greedy rule on retrieve_indices rows: the first row with most leading matches. Returns (path,
    bonus)."""
    best, length = retrieve_indices[0], 0
    for row in retrieve_indices:
        matches = 0
        while matches + 1 < len(row) and tokens[row[matches + 1]] == targets[row[matches]]:
            matches += 1
        if matches > length:
            best, length = row, matches
    path = best[: length + 1]
    return path, targets[path[-1]]


# ---- verify_rejection: one request with the uniforms given, in exact integers -----------------------


def masses(row) -> list[int]:
    """Probabilities as whole numbers of `unit`: the largest one's last place, split 2^(38 - bits of V) times;
    rounded down."""
    usable = [x if 0 <= x < math.inf else 0.0 for x in row]  # NaN compares false
    exponent = max(math.frexp(max(usable))[1], -125) if max(usable) > 0 else -125
    unit = Fraction(2) ** (exponent - 24 - (38 - len(row).bit_length()))
    return [math.floor(Fraction(x) / unit) for x in usable]


def not_probabilities(row) -> bool:
    return any(not 0 <= x < math.inf for x in row)


def part_of(x: int, total: int) -> int:
    """x * 2^62 / total as verify.h rounds it: by a reciprocal of 64 bits."""
    high = total.bit_length() - 1
    reciprocal = (2 ** (64 + high) - 1) // total
    return (x << (62 - high)) * reciprocal >> 64


def coin(value: float) -> Fraction:
    value = min(value, 1 - 2.0**-24) if value > 0 else 0.0
    return Fraction(math.floor(Fraction(value) * 2**64), 2**64)


def fixed(threshold: float) -> Fraction:
    return Fraction(math.floor(Fraction(threshold) * 2**64), 2**64)


def noise_coin(seed: int, index: int, position: int, stream: int) -> Fraction:
    high, low, *_ = philox(seed, (index & 0xFFFFFFFF, position & 0xFFFFFFFF, stream, 0))
    return Fraction(high << 32 | low, 2**64)


def children_of(first_child, next_sibling, node: int, nodes: int) -> list[int]:
    """In rank order, each place once per time that the links lead there, at most `nodes` of them."""
    found, child = [], first_child[node]
    while 0 <= child < nodes and len(found) < nodes:
        found.append(child)
        child = next_sibling[child]
    return found


class Coins:
    """Where the uniforms of one request come from: its own coins, or noise."""

    def __init__(self, seq_len, *, coins=None, final_coin=None, seed=None):
        self.seq_len, self.coins, self.final_coin, self.seed = seq_len, coins, final_coin, seed

    def test(self, node: int, index: int, visited: int) -> Fraction:
        if self.coins is not None:
            return coin(self.coins[node])
        return noise_coin(self.seed, index, self.seq_len + visited, 1)

    def last(self, visited: int) -> Fraction:
        if self.coins is not None:
            return coin(self.final_coin)
        return noise_coin(self.seed, 0, self.seq_len + visited, 2)


def choose(scheme, tokens, children, node, p, q, coins: Coins, visited, single, acc):
    """(token, child that carries it or None, flags) of one visited node."""
    w = masses(p)
    left, vocab = list(w), len(w)
    flags = (1 if not_probabilities(p) or (q is not None and not_probabilities(q)) else 0) | (
        0 if sum(w) else 2
    )
    v = None if q is None else masses(q)
    passed, seen, before = None, set(), 0
    for child in children[:1] if scheme == "chain" else children:
        x = tokens[child]
        if not 0 <= x < vocab or (v is not None and v[x] == 0):  # v: of what was tried before, 0
            flags |= 4
            continue
        if x in seen or sum(left) == 0:
            continue
        seen.add(x)
        if scheme == "point_mass":
            passes = coins.test(child, x, visited) * sum(left) < left[x]
        elif scheme == "coin_walk":
            before += w[x]
            u = coins.test(node, 0, visited)
            reached = math.floor(u * sum(w)) * fixed(acc)
            passes = w[x] > 0 and (
                math.floor(reached) < before or (single < 1 and w[x] >= fixed(single) * sum(w))
            )
        else:
            a = [part_of(m, sum(left)) for m in left]
            b = [part_of(m, sum(v)) for m in v]
            passes = coins.test(child, x, visited) * b[x] < a[x]
            rest = [max(m - n, 0) for m, n in zip(a, b)]
            passes = passes or sum(rest) == 0
            if not passes:
                left, v[x] = rest, 0
        if passes:
            passed = child
            break
        left[x] = 0
    if passed is not None:
        return tokens[passed], passed, flags
    target, reached = coins.last(visited) * sum(left), 0
    for token, mass in enumerate(left):
        reached += mass
        if target < reached:
            return token, None, flags
    return 0, None, flags


def verify_rejection(
    scheme, tokens, first_child, next_sibling, num_nodes, p, q, coins: Coins, *, stop=(), budget=None,
    max_path=1 << 30, single=1.0, acc=1.0,
):  # fmt: skip
    """One request. Returns (path, num_accepted, next_token, finished, new_seq_len, emitted, flags)."""
    nodes, seq_len = min(num_nodes, len(tokens)), coins.seq_len
    if nodes <= 0:
        return [], -1, 0, 0, seq_len, [], 0
    if budget is not None and budget <= 0:
        return [], -1, 0, 2, seq_len, [], 0
    path, emitted, flags, finished, node = [], [], 0, 0, 0
    while node is not None and len(path) < max_path:
        path.append(node)
        children = children_of(first_child, next_sibling, node, nodes)
        rows = p[node], None if q is None else q[node]
        token, child, found = choose(scheme, tokens, children, node, *rows, coins, len(path), single, acc)
        flags |= found
        emitted.append(token)
        if token in [s for s in stop if s != -1]:
            finished = 1
            break
        if budget is not None and len(path) == budget:
            finished = 2
            break
        node = child
    return path, len(path) - 1, emitted[-1], finished, seq_len + len(path), emitted, flags


# ---- verify_rejection: the law of what a request emits, by enumeration -------------------------------


def acceptance(scheme, children, p, q=None, *, wrong=None):
    """(probability that each child is accepted, that each token is drawn instead), written from
    docs/rejection.md. Rows of fractions that sum to 1. `wrong`: a rule that was in use somewhere and is not
    exact."""
    accept, reached, left, rest = [], Fraction(1), list(p), q and list(q)
    if scheme == "coin_walk":
        return [p[x] for x in children], [0 if x in children else p[x] for x in range(len(p))]
    for x in children:
        if scheme == "point_mass":
            passes = left[x]
        elif wrong == "unmodified p and q":
            passes = min(Fraction(1), p[x] / q[x])
        else:
            passes = min(Fraction(1), left[x] / rest[x])
        accept.append(reached * passes)
        reached *= 1 - passes
        if reached == 0:
            return accept + [Fraction(0)] * (len(children) - len(accept)), [Fraction(0)] * len(p)
        if scheme == "point_mass":
            if wrong != "not zeroed":
                left[x] = Fraction(0)
            if wrong not in ("not zeroed", "not renormalised"):
                left = [m / sum(left) for m in left]
        elif wrong == "unmodified p and q":
            left = [max(a - b, Fraction(0)) for a, b in zip(p, q)]
        else:
            left = [max(a - b, Fraction(0)) for a, b in zip(left, rest)]
            left = [m / sum(left) for m in left]
            rest[x] = Fraction(0)
            rest = [m / sum(rest) for m in rest] if sum(rest) else rest
    return accept, [reached * m / sum(left) for m in left]


def law(scheme, shape, p, q=None, *, chosen=None, wrong=None, prefix=()) -> dict[tuple[int, ...], Fraction]:
    """Probability of every emitted sequence. `shape`: the tree, a tuple of the children's shapes; p and q:
    the distributions after a prefix of tokens; `chosen`: the children's tokens after a prefix, where they are
    not drawn from q."""
    found: dict[tuple[int, ...], Fraction] = {}
    row, draft, count = p(prefix), q and q(prefix), len(shape)
    below: dict[tuple[int, int], dict] = {}
    for children in [chosen(prefix)[:count]] if chosen else permutations(range(len(row)), count):
        drawn, mass = Fraction(1), Fraction(1)
        for x in () if chosen else children:
            drawn, mass = drawn * draft[x] / mass if mass else Fraction(0), mass - draft[x]
        if drawn == 0:
            continue
        accept, rest = acceptance(scheme, children, row, draft, wrong=wrong)
        for x, probability in enumerate(rest):
            found[(x,)] = found.get((x,), 0) + drawn * probability
        for i, (x, probability) in enumerate(zip(children, accept)):
            if probability == 0:
                continue
            if (i, x) not in below:
                options = {"chosen": chosen, "wrong": wrong, "prefix": (*prefix, x)}
                below[i, x] = law(scheme, shape[i], p, q, **options)
            for tail, part in below[i, x].items():
                key = (x, *tail)
                found[key] = found.get(key, 0) + drawn * probability * part
    return {key: value for key, value in found.items() if value}
