"""How linear and lm_head_topk share a product out on a GPU, as csrc/cuda/linear/plan.cuh does: for what is
printed without one. A test holds it to the kernels' own workspaces, launches and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from head_shapes import Matrix

RING_OFFSET, MAX_RING, MAX_ROW_RING = 384, 24, 16
AHEAD_BYTES, ROWS_AHEAD = 100 * 1024, 32 * 1024  # of weights, that a block should have on their way
STAGE_BYTES = 2304  # of a row tile, at most
SMALL_WARPS, LARGE_WARPS, SMALL_TOKEN_TILES, LARGE_TOKEN_TILES = 16, 12, 4, 8
PERSISTENT_OFFSET, PERSISTENT_WARPS = 12 * 1024, 8  # draft's kernel: at most so many bytes before the rings
MAX_ROWS = {"linear": 256, "lm_head_topk": 64, "draft": 64}  # that one launch takes
STEP = {  # format -> (columns of a step, bytes of 16 rows of it)
    "bf16": (64, 2048),
    "fp8": (64, 1024),
    "int8": (64, 1024),
    "int4": (64, 544),
    "int8_dynamic": (128, 2048),
}


class Device(NamedTuple):
    multiprocessors: int
    shared_bytes: int


H200 = Device(132, 227 * 1024)


class Plan(NamedTuple):
    slices: int  # parts of K
    blocks: int
    warps: int  # of a block
    pass_tiles: int  # row tiles of 16 that a block takes at a time
    stage_steps: int  # steps that come and go together
    ring: int  # stages of weights in shared memory
    row_ring: int  # stages of activations there
    ahead_bytes: int  # of weights that may be on their way to a block
    launches: int
    own_bytes: int  # of weights that a block has to read, or a step less
    x_bytes: int  # activations that all blocks load together
    partial_bytes: int  # what blocks of a launch leave for the last one


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def slices_of(tiles: int, steps: int) -> int:
    best, least = 1, 0
    for slices in range(1, min(max(steps // 4, 1), 16) + 1):
        each = ceil_div(tiles * slices, 132)
        cost = (2 * each + 1) * ceil_div(steps, slices) + (2 * each if slices > 1 else 0)
        if slices == 1 or cost * 100 < least * 97:
            best, least = slices, cost
    return best


def chunk_tiles(tiles: int) -> int:
    """Row tiles of lm_head_topk that stay in one block."""
    chunk = 2
    while chunk < 8 and tiles // (2 * chunk) >= 512:
        chunk *= 2
    return chunk


class Ring(NamedTuple):
    stage_steps: int
    ring: int
    row_ring: int
    ahead_bytes: int


def plan_ring(room: int, weights: int, rows: int, tile_bytes: int, enough: int) -> Ring:
    """Of `room` bytes, with `weights` and `rows` bytes a step. The longest stage, and as many of activations,
    with which `enough` is ahead; else what has most ahead."""
    best = Ring(1, 0, 0, -1)
    for steps in range(STAGE_BYTES // tile_bytes, 0, -1):
        wanted = min(max(2 + ceil_div(ROWS_AHEAD, steps * weights), 4), MAX_ROW_RING)
        for row_ring in range(wanted, 2, -1):
            ring = min((room - row_ring * steps * rows) // (steps * weights), MAX_RING)
            spare = (room - ring * steps * weights) // (steps * rows)
            made = Ring(steps, ring, min(spare, ring, MAX_ROW_RING), (ring - 1) * steps * weights)
            if min(made.ring, made.row_ring) < 3:
                continue
            if made.ahead_bytes >= enough:
                return made
            if made.ahead_bytes > best.ahead_bytes:
                best = made
    return best


def plan(op: str, matrix: Matrix, form: str, rows: int, top_k: int = 0, device: Device = H200) -> Plan:
    """Of one call with bf16 activations; "draft": of one phase of the persistent kernel."""
    step_k, tile_bytes = STEP[form]
    tiles = ceil_div(matrix.n // 2, 8) if matrix.paired else ceil_div(matrix.n, 16)
    steps = ceil_div(matrix.k, step_k)
    draft = op == "draft"
    topk = op == "lm_head_topk" or (draft and matrix.name.endswith("lm_head"))
    offset = PERSISTENT_OFFSET if draft else RING_OFFSET
    slices, unit = (1, chunk_tiles(tiles)) if topk else (slices_of(tiles, steps), 1)
    row_bytes = step_k * (1 if form == "int8_dynamic" else 2)

    def behind(rows: int, pass_tiles: int) -> int:
        return rows * (32 * 8 + (16 * pass_tiles + 4) * 4) if topk else 0

    def step_rows(token_tiles: int) -> int:
        return row_bytes * (8 * token_tiles + 1)

    most = MAX_ROWS[op]
    while most > 8 and (
        offset + 3 * (unit * tile_bytes + step_rows(most // 8)) + behind(most, unit) > device.shared_bytes
    ):
        most //= 2
    launches, m = ceil_div(rows, most), min(rows, most)
    token_tiles = ceil_div(m, 8)
    large = token_tiles > SMALL_TOKEN_TILES
    groups = ceil_div(token_tiles, LARGE_TOKEN_TILES) if large else 1
    tiles_per_warp, warps = (2, LARGE_WARPS) if large else (1, SMALL_WARPS)
    if draft:
        groups, tiles_per_warp, warps = 1, 1, PERSISTENT_WARPS
    units = ceil_div(tiles, unit)
    items = slices * units
    blocks = min(device.multiprocessors, items)
    each = ceil_div(items, blocks)
    passes = ceil_div(each, max(warps // groups * tiles_per_warp // unit, 1))
    own = each * unit * tile_bytes * (steps // slices)
    enough = min(AHEAD_BYTES, device.shared_bytes * 9 // 20, own)
    found, pass_units = Ring(1, 0, 0, -1), 1
    while True:  # passes of fewer tiles only where that brings more on the way
        units_then = ceil_div(each, passes)
        room = device.shared_bytes - offset - behind(m, units_then * unit)
        ring = plan_ring(room, units_then * unit * tile_bytes, step_rows(token_tiles), tile_bytes, enough)
        if ring.ahead_bytes > found.ahead_bytes:
            found, pass_units = ring, units_then
        if found.ahead_bytes >= enough or units_then == 1:
            break
        passes += 1
    x_steps = sum(
        steps * (slice_ + 1) // slices - steps * slice_ // slices
        for slice_ in walks(items, units, pass_units, blocks)
    )
    # Sums of every slice and tile, 16 bytes a lane; or a list of every block and a sum of every chunk.
    lists = m * (blocks * top_k * 8 + units * 8)
    partials = lists if topk else slices * tiles * token_tiles * 512 * (slices > 1)
    return Plan(
        slices=slices,
        blocks=blocks,
        warps=ceil_div(pass_units * unit, tiles_per_warp) * groups,
        pass_tiles=pass_units * unit,
        stage_steps=found.stage_steps,
        ring=found.ring,
        row_ring=found.row_ring,
        ahead_bytes=found.ahead_bytes,
        own_bytes=own,
        launches=launches * (2 if form == "int8_dynamic" else 1),
        x_bytes=x_steps * row_bytes * rows,
        partial_bytes=partials,
    )


def walks(items: int, units: int, pass_units: int, blocks: int) -> Iterator[int]:
    """The slice of every pass of every block."""
    for block in range(blocks):
        item, last = items * block // blocks, items * (block + 1) // blocks
        while item < last:
            run = min(last - item, units - item % units)
            yield item // units
            item += ceil_div(run, ceil_div(run, pass_units))
