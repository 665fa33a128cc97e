"""The kernels run in Triton's interpreter here, which must be chosen before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    """Let the name of the cache's argument pass that every release has; 5.24 prefers another."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`past_key_values` is deprecated:FutureWarning"
    )
