"""Properties of the device that runs the kernels."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import torch
import triton

from paged_mla_optimized.config.architectures import ARCHS, INTERPRETER
from paged_mla_optimized.triton_compat.interpreter import check_interpreter, is_interpreting
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.provenance import commit_of


@dataclass(frozen=True)
class DeviceFacts:
    """The name of an architecture as in ``planning/families.py``, and its multiprocessors."""

    arch: str
    num_sms: int


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures the current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of `device`; raise ``Unsupported`` if no kernel runs on it."""
    interprets = is_interpreting()
    if device.type not in ({"cuda", "cpu"} if interprets else {"cuda"}):
        raise Unsupported(
            f"device {device} is not supported; use CUDA, or TRITON_INTERPRET=1 for a CPU"
        )
    check_interpreter()
    if interprets:
        return DeviceFacts(INTERPRETER, 1)
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHS:
        raise Unsupported(
            f"compute capability {capability} is not supported; supported are {sorted(ARCHS)}"
        )
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceFacts(ARCHS[capability], num_sms)


def check_computes(arch: str, dtype: torch.dtype) -> None:
    """Raise ``Unsupported`` if no kernel supports `dtype` on an architecture."""
    if arch == INTERPRETER and dtype is torch.bfloat16:
        raise Unsupported(
            f"dtype {dtype} is not supported by Triton's interpreter, which computes wrong results "
            "in it; use float32 or float16"
        )


def device_record() -> dict[str, str]:
    """Return the device, the versions, the commit and the date, for reports of measurements."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit_of(__file__),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
