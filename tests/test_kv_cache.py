"""compact_kv against a naive gather."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from compare import assert_same_bits
from eagle_cuda.kv_cache import KVCache, compact_kv
from reference import kv_cache as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def numbered_cache(
    batch, rows, *, page_size=None, heads=2, dim=4, dtype=torch.float32, generator=None, strided=False
):
    """A cache whose rows all differ, pages in random order, with spare pages and padded strides."""
    if page_size is None:
        shape, table = (batch + 1, rows, heads, dim), None
    else:
        pages = -(-rows // page_size)
        shape = (batch * pages + 3, page_size, heads, dim)
        order = torch.randperm(shape[0], generator=generator)[: batch * pages]
        table = order.view(batch, pages).int()
    count = shape[0] * shape[1] * heads * dim
    k = (torch.arange(count) % 2039).view(shape).to(dtype)
    v = (torch.arange(count) % 1021).view(shape).to(dtype)
    if strided:
        k = torch.stack([k, -k], dim=3)[:, :, :, 0]
        v = torch.stack([v, -v], dim=1)[:, 0]
    return KVCache(k, v, table)


def locate(cache: KVCache, b: int, row: int) -> tuple[int, int]:
    if cache.page_table is None:
        return b, row
    size = cache.k.shape[1]
    return int(cache.page_table[b, row // size]), row % size


def expected(cache: KVCache, path, num_accepted, seq_lens, max_nodes) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = cache.k.clone(), cache.v.clone()
    rows = cache.k.shape[1] * (1 if cache.page_table is None else cache.page_table.shape[1])
    for b in range(path.shape[0]):
        where = [locate(cache, b, row) for row in range(rows)]
        moved = reference.compact(where, int(seq_lens[b]), path[b].tolist(), int(num_accepted[b]), max_nodes)
        for to, source in zip(where, moved):
            k[to] = cache.k[source]
            v[to] = cache.v[source]
    return k, v


def check(caches, path, num_accepted, seq_lens, max_nodes) -> None:
    path, num_accepted, seq_lens = int32(path), int32(num_accepted), int32(seq_lens)
    want = [expected(c, path, num_accepted, seq_lens, max_nodes) for c in caches]
    pointers = [(c.k.data_ptr(), c.v.data_ptr()) for c in caches]
    compact_kv(caches, path, num_accepted, seq_lens, max_nodes=max_nodes)
    for cache, (k, v), pointer in zip(caches, want, pointers):
        assert_same_bits(cache.k, k)
        assert_same_bits(cache.v, v)
        assert (cache.k.data_ptr(), cache.v.data_ptr()) == pointer


@st.composite
def cases(draw):
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = 20 + nodes
    paths, counts, lengths = [], [], []
    width = draw(st.integers(1, nodes))
    for _ in range(batch):
        chosen = sorted(draw(st.sets(st.integers(1, max(nodes - 1, 1)), max_size=width - 1)))
        chosen = [c for c in chosen if c < nodes]
        paths.append([0, *chosen] + [-1] * (width - 1 - len(chosen)))
        counts.append(len(chosen))
        lengths.append(draw(st.integers(0, 20)))
    return {
        "batch": batch,
        "rows": rows,
        "path": paths,
        "num_accepted": counts,
        "seq_lens": lengths,
        "max_nodes": nodes,
        "page_size": draw(st.sampled_from([None, 1, 4, 16, 64])),
        "strided": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layers": draw(st.integers(1, 3)),
    }


@hypothesis.given(case=cases())
def test_compact_kv_matches_a_naive_gather(case):
    generator = torch.Generator().manual_seed(1)
    caches = [
        numbered_cache(
            case["batch"],
            case["rows"],
            page_size=case["page_size"],
            dtype=case["dtype"],
            generator=generator,
            strided=case["strided"] and layer == 0,
        )
        for layer in range(case["layers"])
    ]
    caches = [c._replace(page_table=caches[0].page_table) for c in caches]
    check(caches, case["path"], case["num_accepted"], case["seq_lens"], case["max_nodes"])


@pytest.mark.parametrize(
    ("path", "num_accepted"),
    [
        ([0, 2, 3, 5], 3),  # FAULTS K3: sources and destinations overlap
        ([0, 1, 2, 3], 3),  # in place already
        ([0, 3, 1, -1], 2),  # unsorted: the entry below its index stops the walk
        ([0, 2, 99, 3], 3),  # beyond max_nodes
        ([0, -1, 2, 3], 3),
        ([0, 2, 3, 5], 0),
        ([0, 2, 3, 5], -7),
        ([0, 2, 3, 5], 1000),
        ([0, 7, 7, 7], 3),  # repeated: each is read before it is overwritten
        ([2147483647, 2147483647, 0, 0], 3),
    ],
)
@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_paths_of_every_kind(path, num_accepted, page_size):
    generator = torch.Generator().manual_seed(2)
    check([numbered_cache(1, 16, page_size=page_size, generator=generator)], [path], [num_accepted], [5], 8)


def test_the_check_can_fail():
    """A compaction that reads rows after overwriting them differs from the naive one on the paths above."""
    rows, seq_len, path = list(range(16)), 5, [0, 2, 3, 5]
    wrong = list(rows)
    for i in (3, 2, 1):  # descending
        wrong[seq_len + i] = wrong[seq_len + path[i]]
    assert reference.compact(rows, seq_len, path, 3, 8) != wrong


def test_rows_outside_the_pages_are_left_alone():
    cache = numbered_cache(2, 16, page_size=4, generator=torch.Generator().manual_seed(3))
    cache.page_table[0] = int32([0, -1, 2**31 - 1, 3])
    cache.page_table[1] = int32([4, 5, 6, 10**6])
    k, v = cache.k.clone(), cache.v.clone()
    compact_kv([cache], int32([[0, 3, 5, 7]] * 2), int32([3, 3]), int32([3, 12]), max_nodes=8)
    # Request 0: rows 4 .. 7 are on page -1. Request 1: rows from 12 on lie on no page.
    assert_same_bits(cache.k, k)
    assert_same_bits(cache.v, v)
    for length in (2**31 - 1, -5, 10**6):
        compact_kv([cache], int32([[0, 1, 2, 3]] * 2), int32([3, 3]), int32([length, length]), max_nodes=8)
    assert_same_bits(cache.k, k)


def test_batches_and_threads_do_not_matter(one_and_two_threads):
    path, counts, lengths = (
        int32([[0, 2, 5, 6], [0, 1, 3, -1], [0, -1, -1, -1]]),
        int32([3, 2, 0]),
        int32([9, 0, 20]),
    )

    def run():
        caches = [
            numbered_cache(3, 40, page_size=4, generator=torch.Generator().manual_seed(i)) for i in range(40)
        ]
        caches = [c._replace(page_table=caches[0].page_table) for c in caches]
        compact_kv(caches, path, counts, lengths, max_nodes=8)
        return torch.stack([c.k for c in caches] + [c.v for c in caches])

    one, two = one_and_two_threads(run)
    assert_same_bits(one, two)
    caches = [
        numbered_cache(3, 40, page_size=4, generator=torch.Generator().manual_seed(i)) for i in range(40)
    ]
    table = caches[0].page_table
    for b in (2, 0, 1):
        compact_kv(
            caches,
            path[b : b + 1],
            counts[b : b + 1],
            lengths[b : b + 1],
            page_table=table[b : b + 1],
            max_nodes=8,
        )
    assert_same_bits(torch.stack([c.k for c in caches] + [c.v for c in caches]), one)


def test_nothing_to_do():
    empty = torch.zeros((0, 3), dtype=torch.int32)
    cache = numbered_cache(0, 8)
    compact_kv([cache], empty, int32([]), int32([]), max_nodes=4)
    compact_kv([], int32([[0, 1]]), int32([1]), int32([0]), max_nodes=4)


def test_compact_kv_refuses_wrong_arguments():
    def call(cache=None, path=((0, 2),), num_accepted=(1,), seq_lens=(3,), max_nodes=4):
        path, num_accepted, seq_lens = (
            x if isinstance(x, torch.Tensor) else int32(x) for x in (path, num_accepted, seq_lens)
        )
        compact_kv([cache or numbered_cache(1, 8)], path, num_accepted, seq_lens, max_nodes=max_nodes)

    call()
    with pytest.raises(ValueError, match=r"num_accepted: expected shape \[1\], got \[2\]"):
        call(num_accepted=(1, 1))
    with pytest.raises(ValueError, match="path: expected dtype int32, got int64"):
        call(path=torch.zeros((1, 2), dtype=torch.int64))
    with pytest.raises(ValueError, match="path: expected 2 dimensions, got 1"):
        call(path=(0, 1))
    with pytest.raises(ValueError, match="max_nodes: expected 1 to 256, got 257"):
        call(max_nodes=257)
    cache = numbered_cache(1, 8)
    with pytest.raises(ValueError, match=r"v_cache: expected shape \[2, 8, 2, 4\], got \[2, 8, 2, 3\]"):
        call(cache=cache._replace(v=cache.v[..., :3]))
    with pytest.raises(ValueError, match="k_cache: expected the last dimension to be contiguous"):
        call(cache=KVCache(cache.k.transpose(2, 3), cache.v.transpose(2, 3)))
    with pytest.raises(ValueError, match="page_table: expected dtype int32, got int64"):
        call(cache=cache._replace(page_table=torch.zeros((1, 2), dtype=torch.int64)))
    with pytest.raises(ValueError, match="k_cache: expected a dtype of float32, bfloat16, float16"):
        call(cache=KVCache(cache.k.long(), cache.v.long()))
    with pytest.raises(ValueError, match="k_cache: expected a page for each of 3 requests"):
        call(path=((0, 1),) * 3, num_accepted=(1,) * 3, seq_lens=(0,) * 3)
