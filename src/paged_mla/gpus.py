"""The GPUs of this machine, as ``nvidia-smi`` lists them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from paged_mla_optimized.config.architectures import ARCHS

_QUERY = ["--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Parameters
    ----------
    name : str
    capability : str
        Its compute capability, "9.0".
    memory : str
        With its unit.
    driver : str
        Version of the driver.
    """

    name: str
    capability: str
    memory: str
    driver: str

    @property
    def arch(self) -> str | None:
        """The architecture that kernels are made for, as "sm90"; ``None`` without one."""
        return next((arch for key, arch in ARCHS.items() if self.capability == _text(key)), None)


def find_gpus() -> list[Gpu]:
    """Return every GPU of the machine; none without ``nvidia-smi``.

    Raises
    ------
    OSError
        ``nvidia-smi`` fails, or prints something else.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired as error:
        raise OSError("nvidia-smi does not answer within a minute") from error
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).splitlines()
    rows = [line.split(", ") for line in lines]
    if done.returncode != 0 or any(len(row) != 4 for row in rows):
        raise OSError(f"nvidia-smi fails: {' '.join(lines) or 'it prints nothing'}")
    return [Gpu(*row) for row in rows]


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
