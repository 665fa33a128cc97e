"""Scenes of a command, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run_apart(
    module: str, name: str, folder: Path, options: list[str], deadline: float
) -> list[dict[str, Any]]:
    """Run a command's scene; return what it had found when it ended.

    Parameters
    ----------
    module : str
        The command: it writes ``FOLDER/NAME.json`` after each of its runs.
    name : str
        Of the scene.
    folder : Path
        What the process says goes to ``NAME.log`` in it.
    options : list of str
    deadline : float
        Of ``time.monotonic``; then the process is ended.
    """
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, name, "--folder", str(folder), *options]
    left = max(deadline - time.monotonic(), 1)
    with (folder / f"{name}.log").open("w") as log:
        try:
            subprocess.run(command, stdout=log, stderr=log, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: ended, out of time")
    return json.loads(path.read_text()) if path.exists() else []
