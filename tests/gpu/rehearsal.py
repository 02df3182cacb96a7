"""A pytest plugin that runs the op tests as --backend cuda does, with the CPU in the place of the GPU:
`PYTHONPATH=tests pytest -p gpu.rehearsal tests/test_verify.py`. As there, a test that names an op must call
it (tests/conftest.py)."""

from __future__ import annotations

import pytest

import on_device


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # As late as --backend cuda can be: the tests are imported by now.
    from eagle_cuda._extension import _C

    on_device.install(_C, "cpu")
    items[:] = [
        item for item in items if item.get_closest_marker("op") and not item.get_closest_marker("vast")
    ]
