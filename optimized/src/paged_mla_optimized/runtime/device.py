"""Facts about the device that runs the kernels."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from paged_mla_optimized.planning.families import ARCHS, INTERPRETER
from paged_mla_optimized.runtime.conditions import keep_conditions
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.provenance import commit_of

_WHEN_IMPORTED = (not isinstance(tl.softmax, JITFunction), bool(triton.knobs.runtime.interpret))
"""Whether Triton's own functions are the interpreter's, and those imported with this file."""


@dataclass(frozen=True)
class DeviceFacts:
    """An architecture as ``planning/families.py`` names it, and its multiprocessors."""

    arch: str
    num_sms: int


def is_interpreting() -> bool:
    """Return whether Triton was imported with ``TRITON_INTERPRET=1``."""
    return bool(triton.knobs.runtime.interpret)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph records the current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of `device`; raises ``Unsupported`` where no kernel can run."""
    interprets = is_interpreting()
    if device.type not in ({"cuda", "cpu"} if interprets else {"cuda"}):
        raise Unsupported(f"device {device}: needs CUDA, or TRITON_INTERPRET=1 for a CPU")
    if {interprets} != {*_WHEN_IMPORTED}:
        raise Unsupported(
            f"TRITON_INTERPRET={int(interprets)}, which has changed since Triton was imported: "
            "set it where Python is started, or before anything imports Triton"
        )
    if interprets:
        _prepare_interpreter()
        return DeviceFacts(INTERPRETER, 1)
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHS:
        raise Unsupported(f"compute capability {capability}: known are {sorted(ARCHS)}")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceFacts(ARCHS[capability], num_sms)


def check_computes(arch: str, dtype: torch.dtype) -> None:
    """Raise ``Unsupported`` if no kernel computes in `dtype` on an architecture."""
    if arch == INTERPRETER and dtype is torch.bfloat16:
        raise Unsupported(
            f"dtype {dtype}: Triton's interpreter computes on its raw bits; "
            "allowed there: float32, float16"
        )


def _prepare_interpreter() -> None:
    """Refuse versions whose interpreter cannot run these kernels, and mend that of Triton 3.9.

    With NumPy 2.4, that of Triton 3.6 reads no bound of a loop (triton#9171).
    """
    triton_release = _release(triton.__version__)
    if triton_release < (3, 7) and _release(np.__version__) >= (2, 4):
        raise Unsupported(
            f"the interpreter of Triton {triton.__version__} with NumPy {np.__version__}: "
            "allowed: NumPy < 2.4, or Triton >= 3.7"
        )
    if triton_release >= (3, 10):
        raise Unsupported(
            f"the interpreter of Triton {triton.__version__}: allowed: that of Triton 3.6 to 3.9"
        )
    if triton_release == (3, 9):
        keep_conditions()


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def device_record() -> dict[str, str]:
    """Return what a report of measurements says of the device, the versions and the code."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit_of(__file__),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
