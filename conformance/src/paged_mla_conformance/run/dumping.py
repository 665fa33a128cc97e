"""The dump of the step at which a test failed, for ``paged-mla explain``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from paged_mla_conformance.runners.recording_runner import RecordingBackend
from paged_mla_shared.dump import save_dump
from paged_mla_shared.errors import InvalidArgument


@dataclass(frozen=True)
class Dumping:
    """A backend whose steps are recorded, and where the step goes at which a test fails.

    Parameters
    ----------
    backend : RecordingBackend
    path : Path
    """

    backend: RecordingBackend
    path: Path

    def write(self, test: str) -> None:
        """Write the step that was asked last; an answer that no file may hold is left out."""
        runner = self.backend.last
        if runner is None or self.path.exists():
            return
        origin = f"{self.backend.name} {self.backend.version}, {test}"
        products = self.backend.capabilities.products
        with suppress(InvalidArgument):
            save_dump(replace(runner.dump, origin=origin, products=products), self.path)


DUMPING = pytest.StashKey[Dumping]()
