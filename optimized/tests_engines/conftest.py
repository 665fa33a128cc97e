"""The kernels run in Triton's interpreter here, which must be chosen before Triton is imported."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from paged_mla_optimized.triton_compat.unseen_work import leave_out_unseen_work

leave_out_unseen_work()


@pytest.fixture(name="model")
def _model():
    from hf_models import TINY, Kind, build  # noqa: PLC0415 - skipped where there is no library

    return build(Kind("v3"), TINY)


def pytest_configure(config):
    """Let the name of the cache's argument pass that every release has; 5.24 prefers another."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`past_key_values` is deprecated:FutureWarning"
    )
