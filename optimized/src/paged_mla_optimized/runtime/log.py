"""The logger of the package, and the environment variable that enables it."""

from __future__ import annotations

import logging
import os

from paged_mla_shared.errors import InvalidArgument

LOGGER = logging.getLogger("paged_mla")
LOGGER.addHandler(logging.NullHandler())

LEVEL_VARIABLE = "PAGED_MLA_LOG"
"""A level of :mod:`logging`. If it is set, messages go to stderr without any configuration."""


def log_to_stderr(level: str) -> None:
    """Print the package's messages of `level` and above.

    Raises
    ------
    InvalidArgument
        `level` is not a level of :mod:`logging`; the error names the environment variable.
    """
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise InvalidArgument(LEVEL_VARIABLE, level, "one of " + ", ".join(levels).lower())
    LOGGER.setLevel(level.upper())
    LOGGER.addHandler(logging.StreamHandler())


if os.environ.get(LEVEL_VARIABLE):
    log_to_stderr(os.environ[LEVEL_VARIABLE])
