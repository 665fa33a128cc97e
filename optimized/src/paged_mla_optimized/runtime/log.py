"""The logger of the package, and the variable that turns it on."""

from __future__ import annotations

import logging
import os

from paged_mla_shared.errors import InvalidArgument

LOGGER = logging.getLogger("paged_mla")
LOGGER.addHandler(logging.NullHandler())

LEVEL_VARIABLE = "PAGED_MLA_LOG"
"""Names a level of :mod:`logging`; messages go to stderr then, also without a set-up engine."""


def log_to_stderr(level: str) -> None:
    """Print the package's messages from `level` on.

    Raises
    ------
    InvalidArgument
        No level of :mod:`logging` is called so; names the variable.
    """
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise InvalidArgument(LEVEL_VARIABLE, level, "one of " + ", ".join(levels).lower())
    LOGGER.setLevel(level.upper())
    LOGGER.addHandler(logging.StreamHandler())


if os.environ.get(LEVEL_VARIABLE):
    log_to_stderr(os.environ[LEVEL_VARIABLE])
