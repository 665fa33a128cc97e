"""Write the last step of a failed test to a dump, for ``paged-mla explain``."""

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
    """A backend that records its steps, and the file for the step of a failed test.

    Parameters
    ----------
    backend : RecordingBackend
    path : Path
        The dump to write.
    """

    backend: RecordingBackend
    path: Path

    def write(self, test: str) -> None:
        """Write the last recorded step of a test.

        The file is not written if it exists, if no step was recorded, or if the output of the step
        has a form that a dump cannot hold.

        Parameters
        ----------
        test : str
            The id of the test; the dump contains it.
        """
        runner = self.backend.last
        if runner is None or self.path.exists():
            return
        origin = f"{self.backend.name} {self.backend.version}, {test}"
        products = self.backend.capabilities.products
        with suppress(InvalidArgument):
            save_dump(replace(runner.dump, origin=origin, products=products), self.path)


DUMPING = pytest.StashKey[Dumping]()
