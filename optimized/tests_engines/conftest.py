"""The kernels run in Triton's interpreter here, which must be chosen before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from paged_mla_optimized.triton_compat.unseen_work import leave_out_unseen_work

leave_out_unseen_work()


def pytest_configure(config):
    """Let the name of the cache's argument pass that every release has; 5.24 prefers another."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`past_key_values` is deprecated:FutureWarning"
    )
