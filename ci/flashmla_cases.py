"""The cases of FlashMLA's dense decode test: their list, their memory, and how to run one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import io
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.drop_in import flash_mla
from paged_mla_optimized.planning.families import Demand, serving_variant

TEST = Path("tests", "test_flash_mla_dense_decoding.py")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TRIES = 4  # attempts to run a case without enough memory: other processes release theirs
_VARYING = 2.5  # the longest of 128 rows of varying lengths, divided by the mean length


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the test: a key of :data:`DTYPES`, and a ``TestParam`` of the test."""

    dtype: str
    param: Any

    def __str__(self) -> str:
        return f"{self.dtype} {self.param}"


def load(checkout: Path) -> ModuleType:
    """Import the test of a checkout, with this project's module instead of ``flash_mla``."""
    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(checkout / TEST.parent))
    return importlib.import_module(TEST.stem)


def collect(test: ModuleType) -> list[Case]:
    """Return every case that the test's ``main`` runs, in both dtypes.

    The cases do not measure performance, because the test searches for FlashMLA's kernel by name.
    """
    found: list[Case] = []
    for name, dtype in DTYPES.items():
        params: list[Any] = []
        with _defaults(), mock.patch.object(test, "test_flash_mla", params.append):
            test.main(dtype)
        found += [Case(name, dataclasses.replace(p, test_performance=False)) for p in params]
    return found


def ordered(cases: list[Case]) -> list[Case]:
    """Return the first case of each kernel, which compiles it, and then all others in random order.

    Processes that run cases in this order rarely compile a kernel twice. The order is the same in
    every process.
    """
    first: dict[Any, Case] = {}
    for case in cases:
        first.setdefault(_kernel_of(case), case)
    chosen = set(map(id, first.values()))
    others = [case for case in cases if id(case) not in chosen]
    random.Random(0).shuffle(others)
    return [*first.values(), *others]


def _kernel_of(case: Case) -> Any:
    """Return the parameters for which the kernels of a case are compiled."""
    param, dtype = case.param, DTYPES[case.dtype]
    demand = Demand(
        arch="sm90",
        dtype=DTYPE_NAMES[dtype],
        cache_format=case.dtype,
        products="exact",
        num_heads=param.h_q // param.h_kv,
        head_dims=(param.dv, param.d - param.dv),
    )
    is_causal = param.is_causal and param.s_q > 1
    return demand, param.h_kv, is_causal, serving_variant(demand, param.s_q)


def bytes_of(case: Case) -> int:
    """Return an upper estimate of the device memory that a case needs, in bytes.

    It is the sum of the cache and its copy, the float32 keys of one row (repeated for each query
    head if there are several key heads), and the tensors that compare outputs.
    """
    p = case.param
    longest = p.s_k * (_VARYING if p.is_varlen else 1)
    cache = 2 * 2 * p.b * longest * p.h_kv * p.d
    of_row = 9 * longest * p.d * (p.h_q if p.h_kv > 1 else 1)
    answers = 40 * p.b * p.s_q * p.h_q * p.dv
    return int(cache + of_row + answers)


def run(test: ModuleType, case: Case) -> str:
    """Run one case; return the reason of a failure, or "" if the case passed.

    A case without enough memory is tried again, because other processes share the device.
    """
    message = ""
    for tried in range(_TRIES):
        if tried:
            time.sleep(tried)
        try:
            message = _failure(test, case)
        except torch.OutOfMemoryError as error:
            message = f"OutOfMemoryError: {error}"
        else:
            break
        gc.collect()  # after the handler, because its traceback refers to the tensors
        torch.cuda.empty_cache()
    return message


def _failure(test: ModuleType, case: Case) -> str:
    said = io.StringIO()
    try:
        with _defaults(DTYPES[case.dtype], "cuda:0"), contextlib.redirect_stdout(said):
            test.test_flash_mla(case.param)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of a case is its failure
        lines = said.getvalue().splitlines()
        printed = [line for line in lines if not line.startswith(("-----", "Running on"))]
        return "\n".join([f"{type(error).__name__}: {error}", *printed])
    return ""


def is_lost() -> bool:
    """Return whether this process can no longer use the device, as after an illegal access."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def _defaults(dtype: torch.dtype = torch.float32, device: str | None = None) -> Iterator[None]:
    """Set torch's default dtype and device; reset them to float32 and ``None`` at the end."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
