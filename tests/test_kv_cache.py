"""compact_kv against a naive gather."""

from __future__ import annotations

import contextlib
import mmap

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from compare import assert_same_bits
from eagle_cuda._extension import _C
from eagle_cuda.attention import append_kv, tree_attention
from eagle_cuda.kv_cache import KVCache, compact_kv
from reference import kv_cache as reference

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
]
# How K and V lie in memory. plain: each by itself. gaps: unused elements between heads, rows and pages, other
# ones in K than in V. heads_first: [pages, heads, page_size, dim]. pool: halves of one tensor. odd_base: one
# element behind an aligned address.
LAYOUTS = ["plain", "gaps", "heads_first", "pool", "odd_base"]


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_bits(shape, dtype, generator) -> torch.Tensor:
    """Any bits, NaN among them: rows must arrive as they were."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def cache_memory(shape, dtype, layout, generator) -> tuple[torch.Tensor, torch.Tensor]:
    pages, size, heads, dim = shape
    if layout == "gaps":
        k = random_bits((pages, size + 1, heads, 2 * dim + 1), dtype, generator)[:, 1:, :, :dim]
        v = random_bits((pages, size, heads + 3, dim + 2), dtype, generator)[:, :, 1 : heads + 1, 2:]
    elif layout == "heads_first":
        k, v = (
            random_bits((pages, heads, size, dim), dtype, generator).transpose(1, 2),
            random_bits((size, pages, heads, dim), dtype, generator).transpose(0, 1),
        )
    elif layout == "pool":
        pool = random_bits((pages, size, heads, 2 * dim), dtype, generator)
        k, v = pool[..., :dim], pool[..., dim:]
    elif layout == "odd_base":
        count = pages * size * heads * dim
        k, v = (random_bits((count + 1,), dtype, generator)[1:].view(shape) for _ in "kv")
    else:
        k, v = random_bits(shape, dtype, generator), random_bits(shape, dtype, generator)
    return k, v


def random_cache(
    batch,
    rows,
    *,
    page_size=None,
    heads=2,
    dim=4,
    dtype=torch.float32,
    layout="plain",
    scales=False,
    generator=None,
) -> KVCache:
    """A cache whose rows all differ, pages in random order, with spare pages."""
    generator = generator or torch.Generator().manual_seed(0)
    if page_size is None:
        shape, table = (batch + 1, rows, heads, dim), None
    else:
        pages = -(-rows // page_size)
        shape = (batch * pages + 3, page_size, heads, dim)
        order = torch.randperm(shape[0], generator=generator)[: batch * pages]
        table = order.view(batch, pages).int()
    cache = KVCache(*cache_memory(shape, dtype, layout, generator), table)
    if not scales:
        return cache
    k_scale, v_scale = cache_memory((*shape[:2], 1, heads), torch.float32, layout, generator)
    return cache._replace(k_scale=k_scale[:, :, 0], v_scale=v_scale[:, :, 0])


def parts(cache: KVCache) -> list[torch.Tensor]:
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]


def memory(x: torch.Tensor) -> torch.Tensor:
    """All that the tensor's memory holds, between and around its elements."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def twins(caches) -> list[list[torch.Tensor]]:
    """The same views over copies of the memory, shared where it is shared."""
    copies: dict[int, torch.UntypedStorage] = {}

    def twin(x):
        storage = x.untyped_storage()
        copy = copies.setdefault(storage.data_ptr(), storage.clone() if storage.nbytes() else storage)
        return torch.empty(0, dtype=x.dtype).set_(copy, x.storage_offset(), x.shape, x.stride())

    return [[twin(x) for x in parts(cache)] for cache in caches]


def locate(cache: KVCache, b: int, row: int) -> tuple[int, int] | None:
    """Page and slot, None where there is none."""
    pages, size = cache.k.shape[:2]
    if cache.page_table is None:
        return b, row
    page = int(cache.page_table[b, row // size])
    return (page, row % size) if 0 <= page < pages else None


def expected(caches, path, num_accepted, seq_lens, max_nodes) -> list[list[torch.Tensor]]:
    """What the caches' memory must hold afterwards, as views of it."""
    wanted = twins(caches)
    for cache, tensors in zip(caches, wanted):
        table = cache.page_table
        rows = cache.k.shape[1] * (1 if table is None else table.shape[1])
        for b in range(path.shape[0]):
            where = [locate(cache, b, row) for row in range(rows)]
            moved = reference.compact(
                where, int(seq_lens[b]), path[b].tolist(), int(num_accepted[b]), max_nodes
            )
            for to, source in zip(where, moved):
                if to == source:
                    continue
                for new, old in zip(tensors, parts(cache)):
                    new[to] = old[source]
    return wanted


def check(caches, path, num_accepted, seq_lens, max_nodes) -> None:
    path, num_accepted, seq_lens = int32(path), int32(num_accepted), int32(seq_lens)
    caches = [c._replace(page_table=caches[0].page_table) for c in caches]
    want = expected(caches, path, num_accepted, seq_lens, max_nodes)
    pointers = [[x.data_ptr() for x in parts(c)] for c in caches]
    compact_kv(caches, path, num_accepted, seq_lens, max_nodes=max_nodes)
    for cache, tensors in zip(caches, want):
        for x, wanted in zip(parts(cache), tensors):
            assert_same_bits(x, wanted)
            assert_same_bits(memory(x), memory(wanted))
    assert pointers == [[x.data_ptr() for x in parts(c)] for c in caches]


@st.composite
def cases(draw):
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = 20 + nodes
    paths, counts, lengths = [], [], []
    width = draw(st.integers(1, nodes))
    anything = st.integers(-1, nodes + 1) | st.sampled_from([-(2**31), 2**31 - 1])
    for _ in range(batch):
        if draw(st.integers(0, 3)) == 0:
            paths.append(draw(st.lists(anything, min_size=width, max_size=width)))
            counts.append(draw(st.integers(-1, width + 1)))
        else:
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
        "caches": draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "layout": st.sampled_from(LAYOUTS),
                        "dtype": st.sampled_from(DTYPES),
                        "heads": st.integers(1, 3),
                        "dim": st.sampled_from([1, 2, 3, 4, 7, 16]),
                        "scales": st.booleans(),
                    }
                ),
                min_size=1,
                max_size=3,
            )
        ),
    }


@pytest.mark.op("compact_kv")
@hypothesis.given(case=cases())
def test_compact_kv_matches_a_naive_gather(case):
    generator = torch.Generator().manual_seed(1)
    caches = [
        random_cache(case["batch"], case["rows"], page_size=case["page_size"], generator=generator, **cache)
        for cache in case["caches"]
    ]
    check(caches, case["path"], case["num_accepted"], case["seq_lens"], case["max_nodes"])


@pytest.mark.op("compact_kv")
@pytest.mark.parametrize(
    ("path", "num_accepted"),
    [
        ([0, 2, 3, 5], 3),  # FAULTS K3: sources and destinations overlap
        ([0, 1, 2, 3], 3),  # in place already
        ([0, 3, 1, -1], 2),  # unsorted: the entry below its index stops the walk
        ([0, 2, 99, 5], 3),  # beyond max_nodes: the good entry behind it does not count either
        ([0, 2, 8, 5], 3),
        ([0, -1, 4, 5], 3),
        ([0, 3, 1, 5], 3),
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
    check([random_cache(1, 16, page_size=page_size, generator=generator)], [path], [num_accepted], [5], 8)


def test_the_check_can_fail():
    """A compaction that reads rows after overwriting them differs from the naive one on the paths above."""
    rows, seq_len, path = list(range(16)), 5, [0, 2, 3, 5]
    wrong = list(rows)
    for i in (3, 2, 1):  # descending
        wrong[seq_len + i] = wrong[seq_len + path[i]]
    assert reference.compact(rows, seq_len, path, 3, 8) != wrong


@pytest.mark.op("compact_kv")
def test_rows_outside_the_pages_are_left_alone():
    cache = random_cache(2, 16, page_size=4, generator=torch.Generator().manual_seed(3))
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


@pytest.mark.op("compact_kv")
def test_batches_and_threads_do_not_matter(one_and_two_threads):
    path, counts, lengths = (
        int32([[0, 2, 5, 6], [0, 1, 3, -1], [0, -1, -1, -1]]),
        int32([3, 2, 0]),
        int32([9, 0, 20]),
    )

    def run():
        caches = [
            random_cache(3, 40, page_size=4, generator=torch.Generator().manual_seed(i)) for i in range(40)
        ]
        caches = [c._replace(page_table=caches[0].page_table) for c in caches]
        compact_kv(caches, path, counts, lengths, max_nodes=8)
        return torch.stack([c.k for c in caches] + [c.v for c in caches])

    one, two = one_and_two_threads(run)
    assert_same_bits(one, two)
    caches = [random_cache(3, 40, page_size=4, generator=torch.Generator().manual_seed(i)) for i in range(40)]
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


@pytest.mark.op("compact_kv")
def test_large_batches():
    """Requests of every state: padding rows of a captured batch, nothing accepted, in place, everything."""
    batch = 150
    states = [
        ([0, 2, 3, 5], 3, 7),
        ([0, -1, -1, -1], -1, 0),
        ([0, -1, -1, -1], 0, 3),
        ([0, 1, 2, 3], 3, 6),
        ([0, 1, 3, 4], 3, 2**31 - 1),
        ([0, 4, 6, 7], 2, -4),
        ([0, 7, 3, 1], 3, 1),
    ]
    path, counts, lengths = zip(*(states[b % len(states)] for b in range(batch)))
    caches = [random_cache(batch, 15, page_size=4, dtype=torch.bfloat16, scales=i == 0) for i in range(2)]
    check(caches, path, counts, lengths, 8)


@pytest.mark.op("compact_kv")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_sizes_and_bases(dtype, layout):
    """FAULTS G8: rows, strides and bases of every alignment, moved in pieces of 16 bytes down to one."""
    generator = torch.Generator().manual_seed(4)
    for heads, dim in ((1, 1), (3, 7), (2, 46), (2, 16), (1, 128)):
        cache = random_cache(
            2, 12, page_size=4, heads=heads, dim=dim, dtype=dtype, layout=layout, generator=generator
        )
        check([cache], [[0, 2, 3, 5], [0, 3, 4, -1]], [3, 2], [5, 2], 8)


@pytest.mark.op("compact_kv")
def test_wide_rows():
    """More columns than one block has threads, and odd rows that go byte by byte."""
    caches = [
        random_cache(1, 8, heads=8, dim=128, dtype=torch.float32),
        random_cache(1, 8, heads=5, dim=129, dtype=torch.uint8, layout="odd_base"),
    ]
    check(caches, [[0, 1, 3]], [2], [2], 4)


@pytest.mark.op("compact_kv")
@pytest.mark.parametrize("layers", [31, 32, 33, 300])
def test_many_layers(layers):
    """More planes than one launch takes, K, V and scales mixed."""
    generator = torch.Generator().manual_seed(5)
    caches = [
        random_cache(1, 9, page_size=2, heads=1, dim=2 + i % 3, scales=i % 4 == 1, generator=generator)
        for i in range(layers)
    ]
    check(caches, [[0, 2, 3]], [2], [3], 4)


@pytest.mark.op("compact_kv")
@pytest.mark.parametrize("max_nodes", [64, 256])
def test_the_longest_paths(max_nodes):
    """A chain of 256 nodes with one left out: every row moves by one, through many pages."""
    for page_size in (None, 1, 16):
        cache = random_cache(2, max_nodes + 9, page_size=page_size, dtype=torch.float16, heads=1)
        path = [[0, *range(2, max_nodes)], [0, *range(1, max_nodes - 1)]]
        check([cache], path, [max_nodes - 2, max_nodes - 2], [7, 7], max_nodes)
    for bad in (31, 32, 33, 62):  # where a warp's share of the path ends
        for entry in (bad - 1, max_nodes):
            path = [0, *range(2, max_nodes)]
            path[bad] = entry
            cache = random_cache(1, max_nodes + 9, page_size=16, heads=1)
            check([cache], [path], [max_nodes - 2], [7], max_nodes)


@pytest.mark.op("compact_kv")
@pytest.mark.parametrize("width", [1, 2, 33, 400])
def test_more_accepted_than_the_path_is_wide(width):
    path = [0, *range(2, width + 1)]
    check([random_cache(1, 60)], [path], [2**31 - 1], [3], 40)


@pytest.mark.op("compact_kv")
@pytest.mark.parametrize("page_size", [1, 2, 4, 7])
def test_page_edges(page_size):
    """Source and destination on either side of an edge, at it, and where the last page ends."""
    generator = torch.Generator().manual_seed(6)
    capacity = -(-20 // page_size) * page_size
    for length in (0, page_size - 1, page_size, capacity - 6, capacity - 5, capacity - 1, capacity):
        cache = random_cache(1, 20, page_size=page_size, scales=True, generator=generator)
        check([cache], [[0, 2, 3, 5]], [3], [length], 6)


@pytest.mark.op("compact_kv")
def test_missing_pages_between():
    """A row whose source or destination is missing is skipped; the others move."""
    for missing in range(5):
        for page in (-1, 8, 2**31 - 1, -(2**31)):  # of 8 pages
            cache = random_cache(1, 10, page_size=2, scales=True)
            cache.page_table[0, missing] = page
            check([cache], [[0, 2, 3, 5, 6]], [4], [1], 8)


@pytest.mark.op("compact_kv")
@pytest.mark.vast
def test_offsets_beyond_32_bits(backend):
    """FAULTS G7: pages (K) and rows (V) more than 4 GiB apart, in memory of which little is touched."""
    if backend == "cuda":
        pytest.skip("the whole memory would be copied")
    far = 2**32 + 256
    memory = torch.frombuffer(mmap.mmap(-1, far + 4096), dtype=torch.uint8)
    k = memory.as_strided((2, 2, 1, 32), (far, 32, 32, 1))
    v = memory[1024:].as_strided((2, 2, 1, 32), (32, far, 32, 1))
    for x in (k, v):
        x[:] = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)[..., None, None]
    compact_kv([KVCache(k, v, int32([[0, 1]]))], int32([[0, 2, 3]]), int32([2]), int32([0]), max_nodes=4)
    for x in (k, v):
        assert torch.equal(x[..., 0, :], int32([[1, 3], [4, 4]])[..., None].byte().expand(2, 2, 32))


@pytest.mark.op("compact_kv")
def test_rows_in_place_are_left_alone(simulator):
    """Each moved row is loaded once and stored once; rows in place cost nothing."""
    layers, heads, dim = 4, 2, 64
    caches = [
        random_cache(2, 24, page_size=8, heads=heads, dim=dim, dtype=torch.bfloat16) for _ in range(layers)
    ]
    caches = [c._replace(page_table=caches[0].page_table) for c in caches]
    row = 2 * layers * heads * dim * 2

    def move(path, accepted):
        with simulator.counting() as counters:
            compact_kv(caches, int32(path), int32(accepted), int32([5, 9]), max_nodes=12)
        assert counters.launches == 1
        return counters

    nothing = move([[0, 1, 2, 3, 4]] * 2, [4, 4])
    assert nothing.global_store_bytes == 0
    blocks = 2 * layers * 2
    assert nothing.global_load_bytes <= blocks * 4 * (32 + 32 + 5)  # counts, lengths and the path
    some = move([[0, 1, 2, 5, 6], [0, 1, 3, 9, 11]], [4, 4])
    assert some.global_store_bytes == 5 * row
    assert some.global_store_sectors * 32 == 5 * row
    entries = 2 * layers * 5 * 2  # of the page table
    assert some.global_load_bytes == nothing.global_load_bytes + 5 * row + entries * 4
    assert move([[0, 1, 2, 5, 6]] * 2, [0, -1]).global_store_bytes == 0


@pytest.mark.op("compact_kv")
def test_one_page_in_two_requests_stays_inside(backend, request):
    """The caller's error: the rows of the shared page are anyone's guess, all else is as it should be."""
    cache = random_cache(2, 16, page_size=4, scales=True)
    cache.page_table[1, 1] = cache.page_table[0, 1]
    page = int(cache.page_table[0, 1])
    (want,) = twins([cache])
    checked = backend == "simt" and request.config.getoption("--simt") == "checked"
    with pytest.raises(RuntimeError) if checked else contextlib.nullcontext() as caught:
        compact_kv([cache], int32([[0, 2, 3], [0, 1, 3]]), int32([2, 2]), int32([4, 4]), max_nodes=4)
    if checked:
        assert "race" in str(caught.value)
        assert "out-of-bounds" not in str(caught.value)
    for x, wanted in zip(parts(cache), want):
        wanted[page] = x[page]
        assert_same_bits(memory(x), memory(wanted))


def test_nothing_to_do():
    empty = torch.zeros((0, 3), dtype=torch.int32)
    cache = random_cache(0, 8)
    compact_kv([cache], empty, int32([]), int32([]), max_nodes=4)
    compact_kv([], int32([[0, 1]]), int32([1]), int32([0]), max_nodes=4)


def test_compact_kv_refuses_wrong_arguments():
    def call(cache=None, path=((0, 2),), num_accepted=(1,), seq_lens=(3,), max_nodes=4):
        path, num_accepted, seq_lens = (
            x if isinstance(x, torch.Tensor) else int32(x) for x in (path, num_accepted, seq_lens)
        )
        compact_kv([cache or random_cache(1, 8)], path, num_accepted, seq_lens, max_nodes=max_nodes)

    call()
    with pytest.raises(ValueError, match=r"num_accepted: expected shape \[1\], got \[2\]"):
        call(num_accepted=(1, 1))
    with pytest.raises(ValueError, match="path: expected dtype int32, got int64"):
        call(path=torch.zeros((1, 2), dtype=torch.int64))
    with pytest.raises(ValueError, match="path: expected 2 dimensions, got 1"):
        call(path=(0, 1))
    with pytest.raises(ValueError, match="max_nodes: expected 1 to 256, got 257"):
        call(max_nodes=257)
    cache = random_cache(1, 8)
    with pytest.raises(ValueError, match=r"v_cache: expected shape \[2, 8, 2, 4\], got \[2, 8, 2, 3\]"):
        call(cache=cache._replace(v=cache.v[..., :3]))
    with pytest.raises(ValueError, match="k_cache: expected the last dimension to be contiguous"):
        call(cache=KVCache(cache.k.transpose(2, 3), cache.v.transpose(2, 3)))
    with pytest.raises(ValueError, match="page_table: expected dtype int32, got int64"):
        call(cache=cache._replace(page_table=torch.zeros((1, 2), dtype=torch.int64)))
    with pytest.raises(ValueError, match="k_cache: expected a dtype of float32, .*, got int64"):
        call(cache=KVCache(cache.k.long(), cache.v.long()))
    with pytest.raises(ValueError, match="k_cache: expected a page for each of 3 requests"):
        call(path=((0, 1),) * 3, num_accepted=(1,) * 3, seq_lens=(0,) * 3)


def test_compact_kv_refuses_wrong_scales():
    cache = random_cache(1, 8, scales=True)

    def call(**fields):
        compact_kv([cache._replace(**fields)], int32([[0, 2]]), int32([1]), int32([3]), max_nodes=4)

    call()
    call(v_scale=None)
    call(k_scale=None)
    scale = cache.k_scale
    for name in ("k_scale", "v_scale"):
        for wrong, words in {
            r"expected shape \[2, 8, 2\], got \[2, 8, 1\]": scale[..., :1],
            "expected dtype float32, got float16": scale.half(),
            "expected the last dimension to be contiguous": scale.repeat(1, 1, 2)[..., ::2],
            "expected an output without overlapping elements": scale[:1, :1].expand(2, 8, 2),
        }.items():
            with pytest.raises(ValueError, match=f"{name}: {wrong}"):
                call(**{name: words})
        with pytest.raises(TypeError, match=rf"{name}s\[0\]: expected a tensor, got float"):
            call(**{name: 1.0})
    arguments = {"page_table": None, "path": int32([[0]]), "num_accepted": int32([0]), "seq_lens": int32([0])}
    for name in ("k_scales", "v_scales"):
        scales = {"k_scales": [], "v_scales": [], name: [None]}
        with pytest.raises(ValueError, match=f"{name}: expected 2 entries, as many as k_caches, got 1"):
            _C.compact_kv(k_caches=[cache.k] * 2, v_caches=[cache.v] * 2, max_nodes=4, **scales, **arguments)


def test_attention_refuses_what_it_cannot_read():
    """Scales where there are no codes, codes without scales, other one-byte caches: by name, not silently."""
    q, kv = torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64)
    one = int32([1])
    for cache, words in {
        random_cache(1, 8, dim=64, scales=True): "k_scale: expected none for a cache of float32",
        random_cache(1, 8, dim=64, scales=True)._replace(k_scale=None): "v_scale: expected none for a cache",
        random_cache(1, 8, dim=64, dtype=torch.float8_e4m3fn): "k_scale: expected one for a cache of float8",
        random_cache(1, 8, dim=64, dtype=torch.uint8): "k_cache: expected a dtype of float32.*uint8",
    }.items():
        with pytest.raises(ValueError, match=words):
            append_kv(q, kv, kv, cache, seq_lens=one, depths=int32([[0]]), num_nodes=one)
        with pytest.raises(ValueError, match=words):
            tree_attention(q, cache, seq_lens=one, num_nodes=one, mask=int32([[[1]]]))


def test_an_empty_one_byte_cache():
    cache = KVCache.empty(2, 8, 1, 16, page_size=4, dtype=torch.float8_e4m3fn)
    assert cache.k.dtype == torch.float8_e4m3fn
    assert cache.k_scale is None
    assert KVCache(cache.k, cache.v) == (cache.k, cache.v, None, None, None)
    cache = KVCache.empty(2, 8, 3, 16, page_size=4, dtype=torch.float8_e4m3fn, row_scales=True)
    assert cache.k_scale.shape == cache.v_scale.shape == (4, 4, 3)
    assert cache.k_scale.dtype == torch.float32
