"""The accepting walk in plain Python, from the comments of verify.h and SEMANTICS.md 2.9."""

from __future__ import annotations


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
