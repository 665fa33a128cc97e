"""The cases of FlashMLA's dense decode test: which there are, what they take, how one is run."""

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
_TRIES = 4  # of a case that finds too little memory: other processes give theirs back
_VARYING = 2.5  # the longest of 128 rows of varying lengths, in mean lengths


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the test: a key of :data:`DTYPES`, and the test's own ``TestParam``."""

    dtype: str
    param: Any

    def __str__(self) -> str:
        return f"{self.dtype} {self.param}"


def load(checkout: Path) -> ModuleType:
    """Import the test of a checkout, with this project's module in the place of ``flash_mla``."""
    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(checkout / TEST.parent))
    return importlib.import_module(TEST.stem)


def collect(test: ModuleType) -> list[Case]:
    """Return every case that the test's ``main`` runs, in both dtypes.

    Their performance is not measured: the test looks for FlashMLA's kernel by its name.
    """
    found: list[Case] = []
    for name, dtype in DTYPES.items():
        params: list[Any] = []
        with _defaults(), mock.patch.object(test, "test_flash_mla", params.append):
            test.main(dtype)
        found += [Case(name, dataclasses.replace(p, test_performance=False)) for p in params]
    return found


def ordered(cases: list[Case]) -> list[Case]:
    """Return the first case of each kernel, which compiles it, and all others in random order.

    Processes that take cases in this order hardly ever compile one kernel twice. The order is the
    same in every process.
    """
    first: dict[Any, Case] = {}
    for case in cases:
        first.setdefault(_kernel_of(case), case)
    chosen = set(map(id, first.values()))
    others = [case for case in cases if id(case) not in chosen]
    random.Random(0).shuffle(others)
    return [*first.values(), *others]


def _kernel_of(case: Case) -> Any:
    """Return what the kernels of a case are compiled for."""
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
    """Return about how much device memory a case takes at most.

    That is the cache and its copy; float32 keys of one row, repeated for each query head where
    there are several key heads; and what the answers are compared in.
    """
    p = case.param
    longest = p.s_k * (_VARYING if p.is_varlen else 1)
    cache = 2 * 2 * p.b * longest * p.h_kv * p.d
    of_row = 9 * longest * p.d * (p.h_q if p.h_kv > 1 else 1)
    answers = 40 * p.b * p.s_q * p.h_q * p.dv
    return int(cache + of_row + answers)


def run(test: ModuleType, case: Case) -> str:
    """Run one case; return why it failed, or nothing.

    A case that finds too little memory is tried again, since other processes share the device.
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
        gc.collect()  # outside of the handler, whose traceback holds the tensors
        torch.cuda.empty_cache()
    return message


def _failure(test: ModuleType, case: Case) -> str:
    said = io.StringIO()
    try:
        with _defaults(DTYPES[case.dtype], "cuda:0"), contextlib.redirect_stdout(said):
            test.test_flash_mla(case.param)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a case raises is its failure
        lines = said.getvalue().splitlines()
        printed = [line for line in lines if not line.startswith(("-----", "Running on"))]
        return "\n".join([f"{type(error).__name__}: {error}", *printed])
    return ""


def is_lost() -> bool:
    """Return whether this process can use the device no more, as after an illegal access."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def _defaults(dtype: torch.dtype = torch.float32, device: str | None = None) -> Iterator[None]:
    """Set torch's defaults, and take back what was set within."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
