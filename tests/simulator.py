"""The emulator behind an emulated extension (tests/simt): its schedule, its launches and its counters."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass
class Counters:
    """What kernels did, equal in every run. Global memory counts where kernels call load and store; shared
    memory in checked builds only."""

    launches: int = 0
    threads: int = 0
    global_load_bytes: int = 0
    global_load_sectors: int = 0
    global_load_requests: int = 0
    global_store_bytes: int = 0
    global_store_sectors: int = 0
    global_store_requests: int = 0
    shared_load_requests: int = 0
    shared_load_waves: int = 0
    shared_load_ideal: int = 0
    shared_store_requests: int = 0
    shared_store_waves: int = 0
    shared_store_ideal: int = 0
    barriers: int = 0
    warp_barriers: int = 0
    collectives: int = 0
    atomics: int = 0
    grid_arrivals: int = 0  # of blocks at barriers of the grid
    grid_asked_bytes: int = 0  # for copies, between arriving at such a barrier and passing it


class Traffic(NamedTuple):
    """What one line of a kernel did, each way in which it was called by itself."""

    memory: str  # "global" or "shared"
    access: str  # "load" or "store"
    requests: int  # of warps
    bytes: int  # of lanes, also where several read one word
    units: int  # sectors of 32 bytes, or wavefronts
    ideal: int  # the fewest possible
    line: str  # innermost first: "ptx.cuh:79 < tile.cuh:28 < kernel.cu:33"

    @property
    def moved(self) -> int:
        """Bytes of global memory, one word for several lanes once."""
        return min(self.bytes, 32 * self.units)


class Gpu:
    """In the place of a Simulator where the kernels run on a GPU: nothing is counted, and it is the one
    device that there is."""

    counts = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        yield None

    @contextlib.contextmanager
    def device(self, **_: int) -> Iterator[None]:
        yield


class Simulator:
    """Handle on the emulator inside the extension at `path`, which must be imported already."""

    counts = True

    def __init__(self, path: str | Path):
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, "simt_checked"):
            raise ValueError(f"path: expected an emulated extension, got {path}")
        self._library.simt_set_options.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64]
        self._library.simt_set_options.restype = None
        self._library.simt_set_device.argtypes = [ctypes.c_int, ctypes.c_int]
        self._library.simt_set_device.restype = None
        self._library.simt_launches.argtypes = [ctypes.c_char_p]
        self._library.simt_launches.restype = ctypes.c_uint64
        self._library.simt_clear_counters.restype = None
        for name in ("simt_counters", "simt_traffic_table", "simt_reports"):
            getattr(self._library, name).restype = ctypes.c_char_p

    @property
    def checked(self) -> bool:
        """Whether every memory access of the kernels is checked."""
        return bool(self._library.simt_checked())

    def configure(self, *, seed: int = 0, preempt: int = 0, max_polls: int = 20_000_000) -> None:
        """Schedules of the launches to come: in order for seed 0, else random; with `preempt`, also a switch
        at about one of so many memory accesses (checked builds)."""
        self._library.simt_set_options(seed, preempt, max_polls)

    @contextlib.contextmanager
    def device(self, *, multiprocessors: int = 132, compute_capability: int = 90) -> Iterator[None]:
        """Another device within the block; what an op computes must not depend on it. Below 90 there are no
        bulk copies, and less shared memory."""
        self._library.simt_set_device(multiprocessors, compute_capability)
        try:
            yield
        finally:
            self._library.simt_set_device(132, 90)

    def launches(self, op: str) -> int:
        """How often `op` has run under the emulator in this process."""
        return self._library.simt_launches(op.encode())

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counters]:
        """Clears the counters; after the block, the yielded object holds what the block did."""
        self._library.simt_clear_counters()
        counters = Counters()
        yield counters
        for name, value in json.loads(self._library.simt_counters()).items():
            setattr(counters, name, value)

    def traffic_table(self) -> str:
        """Requests, bytes and cost by source line since the counters were cleared, costliest first."""
        return self._library.simt_traffic_table().decode()

    def traffic(self) -> list[Traffic]:
        """`traffic_table`, to compute with."""
        rows = [line.split(maxsplit=7) for line in self.traffic_table().splitlines()[1:]]
        return [
            Traffic(memory, access, *map(int, numbers), place.partition("  <- ")[0])
            for memory, access, *numbers, _, place in rows
        ]

    def reports(self) -> str:
        """What the last op was found to do wrong; empty: nothing."""
        return self._library.simt_reports().decode()
