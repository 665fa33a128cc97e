"""These tests need a CUDA device; without a device they are skipped with a reason."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
