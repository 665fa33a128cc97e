"""These tests need a CUDA device; without one each is skipped, and says so."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
