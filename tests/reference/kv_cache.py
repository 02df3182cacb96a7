"""Naive compaction: gather first, then write."""

from __future__ import annotations


def compact(rows: list, seq_len: int, path: list[int], num_accepted: int, max_nodes: int) -> list:
    """The request's rows (index = cache row) after acceptance; rows that are None or beyond the list do not
    exist."""
    result = list(rows)
    for i in range(1, min(num_accepted, len(path) - 1) + 1):
        if path[i] < i or path[i] >= max_nodes:
            break
        source, to = max(seq_len, 0) + path[i], max(seq_len, 0) + i
        if source < len(rows) and rows[source] is not None and rows[to] is not None:
            result[to] = rows[source]
    return result
