"""The GPUs of this machine, as ``nvidia-smi`` lists them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from paged_mla_optimized.config.architectures import ARCHS

_QUERY = ["--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, described by the output of ``nvidia-smi``.

    Parameters
    ----------
    name : str
    capability : str
        The compute capability, for example "9.0".
    memory : str
        The size of the memory with its unit, for example "81559 MiB".
    driver : str
        The version of the driver.
    """

    name: str
    capability: str
    memory: str
    driver: str

    @property
    def arch(self) -> str | None:
        """The architecture, for example "sm90"; ``None`` if no kernel supports this GPU."""
        return next((arch for key, arch in ARCHS.items() if self.capability == _text(key)), None)


def find_gpus() -> list[Gpu]:
    """Return all GPUs of this machine; the list is empty if ``nvidia-smi`` is not installed.

    Raises
    ------
    OSError
        ``nvidia-smi`` fails, takes more than a minute, or prints unexpected lines.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired as error:
        raise OSError("nvidia-smi did not finish within a minute") from error
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).splitlines()
    rows = [line.split(", ") for line in lines]
    if done.returncode != 0 or any(len(row) != 4 for row in rows):
        raise OSError(f"nvidia-smi failed: {' '.join(lines) or 'it printed nothing'}")
    return [Gpu(*row) for row in rows]


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
