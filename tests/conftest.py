"""Shared by every test: the backend, hypothesis without chance, threads that leave each other alone."""

from __future__ import annotations

import os

# Before torch is imported: its workers sleep between operations instead of spinning against ours
# (CONTRIBUTING.md, threads).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest

# Failures must come back: the same examples on every run, and no time limit per example on a shared machine.
hypothesis.settings.register_profile("eagle", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("eagle")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="cpu",
        choices=["cpu", "simt", "cuda"],
        help="which implementation of the ops the tests run (simt: CUDA sources under the emulator)",
    )


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("--backend")
    if backend != "cpu":
        raise pytest.UsageError(
            f"--backend {backend}: this version has no CUDA kernels yet; use --backend cpu"
        )


def pytest_report_header(config: pytest.Config) -> str:
    try:
        import eagle_cuda
    except ImportError as error:  # the tests that only read sources run all the same
        return f"eagle_cuda: {error}"
    return f"eagle_cuda: {eagle_cuda.build_info()}"


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    return request.config.getoption("--backend")


@pytest.fixture
def one_and_two_threads():
    """Calls a function with one thread and with two and returns both results; then restores the number."""
    import eagle_cuda

    before = eagle_cuda.num_threads()

    def run(function):
        results = []
        for threads in (1, 2):
            eagle_cuda.set_num_threads(threads)
            results.append(function())
        return tuple(results)

    yield run
    eagle_cuda.set_num_threads(before)
