"""A pytest plugin that runs the op tests as --backend cuda does, with the CPU in the place of the GPU:
`PYTHONPATH=tests pytest -p gpu.rehearsal tests/test_verify.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import on_device


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # As late as --backend cuda can be: the tests are imported by now.
    from eagle_cuda._extension import _C

    on_device.install(_C, "cpu")
    items[:] = [item for item in items if item.get_closest_marker("op")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    before = on_device.calls.total()
    result = yield
    if on_device.calls.total() == before:
        pytest.fail("expected a call on copies, got none", pytrace=False)
    return result
