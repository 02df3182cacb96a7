"""Shared by every test: the backend, hypothesis without chance, threads that leave each other alone."""

from __future__ import annotations

import os

# Before torch is imported: its workers sleep between operations instead of spinning against ours
# (CONTRIBUTING.md, threads).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Failures must come back: the same examples on every run, and no time limit per example on a shared machine.
hypothesis.settings.register_profile("eagle", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("eagle")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("backend")
    group.addoption(
        "--backend",
        default="cpu",
        choices=["cpu", "simt", "cuda"],
        help="which implementation of the ops the tests run: the CPU's; the CUDA kernels under the emulator, "
        "on CPU tensors; the CUDA kernels on a GPU. The latter two run the tests that name their ops",
    )
    group.addoption(
        "--simt",
        default="fast",
        choices=["fast", "checked"],
        help="with --backend simt: plain kernels, or kernels whose every memory access is checked",
    )
    group.addoption("--seed", type=int, default=0, help="with --backend simt: random schedules; 0: in order")
    group.addoption(
        "--preempt",
        type=int,
        default=0,
        help="with --backend simt --simt checked: a switch at about one of so many memory accesses; 0: none",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "op(*names): the ops whose kernels the test must launch; runs with --backend simt and cuda too",
    )
    config.addinivalue_line(
        "markers",
        "unchecked: under the emulator, in fast builds only, where a checked one would take too long",
    )
    config.addinivalue_line(
        "markers", "vast: memory of many GB, of which little is touched: not to be copied in rehearsals"
    )
    backend = config.getoption("--backend")
    for name, default in (("simt", "fast"), ("seed", 0), ("preempt", 0)):
        given = config.getoption(f"--{name}")
        if backend != "simt" and given != default:
            raise pytest.UsageError(f"--{name} {given}: expected --backend simt, got --backend {backend}")
    if backend == "simt":
        config.stash[SIMULATOR] = start_simulator(config)
    elif backend == "cuda":
        start_device()


# ---- --backend simt ------------------------------------------------------------------------------

SIMULATOR = pytest.StashKey[Any]()


def emulator_build() -> Path:
    """Where `make simt` puts what it builds, or the build of the emulated extension that EAGLE_CUDA_EXTENSION
    names."""
    named = os.environ.get("EAGLE_CUDA_EXTENSION")
    if named:
        build = Path(named).resolve().parent
        return build.parent if build.name.startswith("simt_") else build
    return ROOT / "build" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def emulated_extension(flavour: str) -> Path:
    path = emulator_build() / f"simt_{flavour}" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.is_file():
        raise pytest.UsageError(f"--backend simt --simt {flavour}: expected {path}; run `make simt` first")
    return path


def start_simulator(config: pytest.Config) -> Any:
    """Makes `eagle_cuda` the emulated extension, which works as long as nothing has imported it yet."""
    flavour, seed, preempt = (config.getoption(f"--{name}") for name in ("simt", "seed", "preempt"))
    if not 0 <= seed < 2**64:
        raise pytest.UsageError(f"--seed: expected 0 to 2^64 - 1, got {seed}")
    if not 0 <= preempt < 2**31:
        raise pytest.UsageError(f"--preempt: expected 0 to 2^31 - 1, got {preempt}")
    if preempt and flavour != "checked":
        raise pytest.UsageError("--preempt: expected --simt checked, got --simt fast")
    if "eagle_cuda" in sys.modules:
        raise pytest.UsageError("--backend simt: eagle_cuda was imported before the tests' configuration")
    path = emulated_extension(flavour)
    os.environ["EAGLE_CUDA_EXTENSION"] = str(path)
    import eagle_cuda  # noqa: F401
    from simulator import Simulator

    simulator = Simulator(path)
    if simulator.checked != (flavour == "checked"):
        raise pytest.UsageError(f"--simt {flavour}: {path} is not such a build; run `make simt`")
    simulator.configure(seed=seed, preempt=preempt)
    return simulator


# ---- --backend cuda ------------------------------------------------------------------------------


def start_device() -> None:
    """From here on the ops take the tests' CPU tensors to the GPU and bring the outputs back."""
    import torch

    from eagle_cuda._extension import _C

    if not _C.build_info()["cuda"]:
        raise pytest.UsageError("--backend cuda: this build has no CUDA backend; rebuild with EAGLE_CUDA=ON")
    if not torch.cuda.is_available():
        raise pytest.UsageError("--backend cuda: torch sees no CUDA device on this machine")
    import on_device

    on_device.install(_C)


# ---- which tests run, and that they ran where they should -----------------------------------------


def ops_of(item: pytest.Item) -> list[str]:
    return [name for marker in item.iter_markers("op") for name in marker.args]


LEFT_OUT = pytest.StashKey[dict[str, set[str]]]()


def leave_out(config: pytest.Config, kind: str, names: list[str]) -> None:
    config.stash.setdefault(LEFT_OUT, {"tests": set(), "files": set()})[kind].update(names)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without such a test are not even imported."""
    if config.getoption("--backend") == "cpu" or not collection_path.match("test_*.py"):
        return None
    if "mark.op(" in collection_path.read_text():
        return None
    leave_out(config, "files", [str(collection_path)])
    return True


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--backend") == "cpu":
        return
    taken = [item for item in items if ops_of(item)]
    if config.getoption("--simt") == "checked":
        taken = [item for item in taken if not item.get_closest_marker("unchecked")]
    others = [item for item in items if item not in taken]
    config.hook.pytest_deselected(items=others)
    items[:] = taken
    leave_out(config, "tests", [item.nodeid for item in others])


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str | None:
    left_out = config.stash.get(LEFT_OUT, None)
    return left_out and (
        f"--backend {config.getoption('--backend')}: {len(items)} tests name the ops whose kernels they run; "
        f"left out: {len(left_out['tests'])} others, and {len(left_out['files'])} files without such a test"
    )


def on_a_gpu(config: pytest.Config) -> bool:
    """Whether the ops run on copies on a GPU, or with tests/gpu/rehearsal.py on the CPU in its place."""
    return config.getoption("--backend") == "cuda" or config.pluginmanager.hasplugin("gpu.rehearsal")


def runs(config: pytest.Config) -> tuple[str, Callable[[str], int]] | None:
    """What an op owes to a test that names it, and how often it has done so in this process."""
    if SIMULATOR in config.stash:
        return "a launch under the emulator", config.stash[SIMULATOR].launches
    if on_a_gpu(config):
        import on_device

        return "a call on the device", on_device.calls.__getitem__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Where CUDA kernels run, a passed test must have run every op it names: one that ran on the CPU's
    kernels proves nothing."""
    wanted = runs(item.config)
    before = {op: wanted[1](op) for op in ops_of(item)} if wanted else {}
    result = yield
    for op, count in before.items():
        if wanted[1](op) == count:
            pytest.fail(f"{op}: expected {wanted[0]}, got none", pytrace=False)
    return result


# ---- for the tests -------------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> list[str]:
    try:
        import eagle_cuda
    except ImportError as error:  # the tests that only read sources run all the same
        return [f"eagle_cuda: {error}"]
    lines = [f"eagle_cuda: {eagle_cuda.build_info()}"]
    if SIMULATOR in config.stash:
        options = (f"{name} {config.getoption(f'--{name}')}" for name in ("simt", "seed", "preempt"))
        lines.append(f"emulator: {', '.join(options)}")
    return lines


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    return request.config.getoption("--backend")


@pytest.fixture
def simulator(request: pytest.FixtureRequest) -> Any:
    """The emulator (tests/simulator.py), for tests of its counters: skips where it does not run. What else a
    test has to say of the kernels it says with `kernels`, or no GPU will ever see it."""
    if SIMULATOR not in request.config.stash:
        pytest.skip("counts under --backend simt only")
    return request.config.stash[SIMULATOR]


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    """For tests of CUDA kernels against each other, which look at counters in passing where `kernels.counts`:
    the emulator, or a GPU (tests/simulator.py). Skips on the CPU backend."""
    if SIMULATOR in request.config.stash:
        return request.config.stash[SIMULATOR]
    if not on_a_gpu(request.config):
        pytest.skip("the CPU backend has no such kernels")
    from simulator import Gpu

    return Gpu()


@pytest.fixture
def draft_launches(
    backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """How many kernels each draft of the test's engines launched; stays empty where launches are not
    counted."""
    launches: list[int] = []
    if backend != "simt":
        yield launches
        return
    import eagle_decode.drafting

    simulator, draft = request.getfixturevalue("simulator"), eagle_decode.drafting.draft

    def counted(*arguments: Any, **options: Any) -> Any:
        with simulator.counting() as counters:
            tree = draft(*arguments, **options)
        launches.append(counters.launches)
        return tree

    monkeypatch.setattr(eagle_decode.drafting, "draft", counted)
    yield launches
    assert launches, "no engine drafted"


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
