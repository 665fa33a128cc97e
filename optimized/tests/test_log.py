import logging

import pytest

from paged_mla_optimized.runtime.log import LOGGER, log_to_stderr
from paged_mla_shared.errors import InvalidArgument


@pytest.fixture(autouse=True)
def _as_it_was():
    level, handlers = LOGGER.level, LOGGER.handlers.copy()
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers


def test_messages_go_to_stderr(capsys):
    """From the level on, and none below it."""
    log_to_stderr("info")
    LOGGER.info("planned")
    LOGGER.debug("hidden")
    assert capsys.readouterr().err == "planned\n"
    assert LOGGER.level == logging.INFO


@pytest.mark.parametrize("level", ["1", "loud"])
def test_a_level_that_is_none(level):
    """The error names the variable, which is read when the package is imported."""
    with pytest.raises(InvalidArgument, match="PAGED_MLA_LOG"):
        log_to_stderr(level)
    assert LOGGER.level == logging.NOTSET
