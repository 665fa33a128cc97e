"""Judge each kernel in its own process with a time limit, and collect the results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ci.judged.manifest import Kernel
from ci.judged.result import Result, read_all, result_of, write_all
from ci.packages import PACKAGES, ROOT


def run(
    chosen: Sequence[Kernel],
    payload: Path,
    folder: Path,
    options: Sequence[str],
    *,
    jobs: int,
    seconds: float,
    total: float = math.inf,
) -> list[Result]:
    """Judge kernels, several at a time; write ``results.json`` after each.

    Earlier results in the file remain for other kernels, and for kernels that do not start because
    the total time is over.

    Parameters
    ----------
    chosen : sequence of Kernel
    payload : Path
        The folder with the kernels' files.
    folder : Path
        The folder for reports, claims, outputs of processes and ``results.json``.
    options : sequence of str
        More options of ``paged-mla judge``.
    jobs : int
        The number of kernels that are judged at a time.
    seconds : float
        The time limit for each kernel.
    total : float
        The time limit for all kernels together, in seconds.

    Returns
    -------
    list of Result
        The results of the kernels that started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    found = {result.id: result for result in read_all(path)} if path.exists() else {}
    end, begun = time.monotonic() + total, []

    def judged(kernel: Kernel) -> Result | None:
        left = min(seconds, end - time.monotonic())
        return _judged(kernel, payload, folder, options, left) if left > 0 else None

    with ThreadPoolExecutor(jobs) as pool:
        asked = {pool.submit(judged, kernel): kernel for kernel in chosen}
        for done in as_completed(asked):
            result = done.result()
            if result is None:
                print(f"{asked[done].id}: not started, the total time is over", flush=True)
                continue
            found[result.id] = result
            begun.append(result)
            write_all(found.values(), path)
            said = f"{result.outcome}, {result.run} run, {result.failed} failed"
            print(f"{result.id}: {said}, {result.seconds:.0f} s", flush=True)
    return begun


def _judged(
    kernel: Kernel, payload: Path, folder: Path, options: Iterable[str], seconds: float
) -> Result:
    """Judge one kernel; return a result also if its process crashes or exceeds the time."""
    files = {part: folder / f"{kernel.id}.{part}" for part in ("json", "toml", "txt")}
    for file in files.values():
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "paged_mla", "judge", kernel.target_in(payload)]
    command += [*kernel.options, *options]
    command += ["--report", str(files["json"]), "--claims", str(files["toml"])]
    begun = time.monotonic()
    with files["txt"].open("w") as screen:
        status = _status(command, payload, screen.fileno(), seconds)
    report = None
    if files["json"].exists():
        with contextlib.suppress(ValueError):  # the process may have ended during the write
            report = json.loads(files["json"].read_text())
    screen_text = files["txt"].read_text(errors="replace")
    return result_of(kernel, status, report, screen_text, time.monotonic() - begun)


def _status(command: list[str], payload: Path, screen: int, seconds: float) -> int | None:
    """Return the exit status of a command, or ``None`` if it exceeds the time limit.

    All processes of the command are killed at the end.
    """
    sources = [str(ROOT / package.source) for package in PACKAGES.values()]
    paths = [str(payload), *sources, str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=screen,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
