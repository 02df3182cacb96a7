"""Threads: results and errors depend neither on their number nor on who else calls, on fork, or on the end of
the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch

import eagle_cuda
from eagle_cuda._extension import _C

ROWS, COLUMNS = 64, 1024


@pytest.fixture(autouse=True)
def _restore_threads():
    before = eagle_cuda.num_threads()
    yield
    eagle_cuda.set_num_threads(before)


def rms_norm(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A small op that is cut into pieces for several threads."""
    return eagle_cuda.rms_norm(x, torch.ones(x.shape[1]), eps=1e-6, out=out)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` in a fresh interpreter with the native module as `C`, since importing torch takes long."""
    load = f"""
        import importlib.util, os, sys, threading, time
        import numpy as np
        spec = importlib.util.spec_from_file_location("eagle_cuda._C", {_C.__file__!r})
        C = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(C)
    """
    program = textwrap.dedent(load) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_set_num_threads(n):
    eagle_cuda.set_num_threads(n)
    assert eagle_cuda.num_threads() == n
    assert eagle_cuda.build_info()["num_threads"] == n


@pytest.mark.parametrize("n", [0, -1, 257])
def test_wrong_number_is_refused_and_changes_nothing(n):
    eagle_cuda.set_num_threads(2)
    with pytest.raises(ValueError, match=f"num_threads: expected 1 to 256, got {n}"):
        eagle_cuda.set_num_threads(n)
    assert eagle_cuda.num_threads() == 2


def test_default_is_the_environment_or_the_affinity():
    code = "print(C.num_threads())"
    assert run_python(code, EAGLE_NUM_THREADS="3").stdout.strip() == "3"
    assert int(run_python(code, EAGLE_NUM_THREADS="").stdout) <= len(os.sched_getaffinity(0))
    pinned = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + code
    assert run_python(pinned, EAGLE_NUM_THREADS="").stdout.strip() == "1"


@pytest.mark.parametrize("value", ["0", "two", "257", "2x"])
def test_wrong_environment_is_an_error_that_names_it(value):
    done = run_python("C.num_threads()", EAGLE_NUM_THREADS=value)
    assert done.returncode == 1
    assert f"ValueError: EAGLE_NUM_THREADS: expected 1 to 256, got {value}" in done.stderr


def test_same_bits_with_any_number_of_threads():
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    results = []
    for n in (1, 2, 3, 5):
        eagle_cuda.set_num_threads(n)
        results.append(rms_norm(x, torch.empty_like(x)))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_many_python_threads_at_once():
    # One caller gets the workers, the others run alone: nobody waits for a lock, results are the same.
    eagle_cuda.set_num_threads(2)
    inputs = [torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    want = [rms_norm(x, torch.empty_like(x)) for x in inputs]
    wrong: list[str] = []

    def work(index: int) -> None:
        out = torch.empty_like(inputs[index])
        for _ in range(50):
            out.fill_(float("nan"))
            rms_norm(inputs[index], out)
            if not torch.equal(out, want[index]):
                wrong.append(f"caller {index}")

    callers = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


def test_resizing_while_others_call():
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    want = rms_norm(x, torch.empty_like(x))
    stop = threading.Event()
    wrong: list[bool] = []

    def work() -> None:
        while not stop.is_set():
            wrong.append(not torch.equal(rms_norm(x, torch.empty_like(x)), want))

    caller = threading.Thread(target=work)
    caller.start()
    for i in range(100):
        eagle_cuda.set_num_threads(1 + i % 4)
    stop.set()
    caller.join(timeout=60)
    assert not caller.is_alive()
    assert wrong
    assert not any(wrong)


def test_the_gil_is_released_while_an_op_runs():
    # Nobody is asked to give the GIL up, so the counter, which gives it up by itself, gets on only while the
    # op does without it.
    x = torch.randn(4096, 4096)
    out = torch.empty_like(x)
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    before = sys.getswitchinterval()
    counter.start()
    try:
        sys.setswitchinterval(100)
        start = counted[0]
        for _ in range(3):
            rms_norm(x, out)
        during = counted[0] - start
    finally:
        stop.set()
        sys.setswitchinterval(before)
        counter.join()
    assert during > 10


def test_forked_child_computes_the_same():
    code = """
        C.set_num_threads(2)
        x = np.random.default_rng(0).standard_normal((64, 1024), dtype=np.float32)
        ones, want, got = np.ones(1024, np.float32), np.empty_like(x), np.empty_like(x)
        C.rms_norm(x, ones, 1e-6, want)

        def same():
            got.fill(np.nan)
            C.rms_norm(x, ones, 1e-6, got)
            return np.array_equal(got, want)

        for _ in range(3):
            child = os.fork()
            if child == 0:
                good = all(same() for _ in range(20))
                C.set_num_threads(3)
                os._exit(0 if good and same() and C.num_threads() == 3 else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert same()
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_process_ends_while_an_op_runs():
    code = """
        C.set_num_threads(2)
        x = np.ones((4096, 4096), np.float32)
        ones, out = np.ones(4096, np.float32), np.empty_like(x)
        runs = [0]

        def work():
            while True:
                C.rms_norm(x, ones, 1e-6, out)
                runs[0] += 1

        threading.Thread(target=work, daemon=True).start()
        while runs[0] < 3:
            time.sleep(0.001)
        print("leaving", flush=True)
    """
    for _ in range(3):
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "leaving\n"


def test_numpy_inputs_use_the_same_threads():
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    out = np.empty_like(x)
    eagle_cuda.rms_norm(x, np.ones(COLUMNS, np.float32), eps=1e-6, out=out)
    assert np.array_equal(out, rms_norm(torch.from_numpy(x), torch.empty(ROWS, COLUMNS)).numpy())
