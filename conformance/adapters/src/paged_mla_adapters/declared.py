"""Helpers with which an adapter declares its kernel: device, capabilities and version."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

from paged_mla_shared.backend import Capabilities
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE

FEATURES = frozenset({"padding", "replay", "strided_cache", "large_offsets", "explicit_slots"})


def peer(*modules: str) -> ModuleType:
    """Return the first module that can be imported, which contains another project's kernel.

    Parameters
    ----------
    *modules : str
        The names of the module in the releases of the package.

    Raises
    ------
    Unsupported
        The package is not installed, or the installed release has none of these modules.
    ImportError
        The module exists, but a package that it imports is not installed.
    """
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
    raise not_installed(modules[0].partition(".")[0], " or ".join(modules))


def not_installed(package: str, what: str) -> Unsupported:
    """Return the error for a package that is not installed or lacks a module or file."""
    return Unsupported(f"the package {package} is not installed, or has no {what}")


def mode() -> str:
    """Return "interpreter" if the environment has ``TRITON_INTERPRET=1``, otherwise "gpu".

    Raises
    ------
    Unsupported
        There is no CUDA device, and ``TRITON_INTERPRET=1`` is not set.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    if torch.cuda.is_available():
        return "gpu"
    raise Unsupported("no CUDA device is available; set TRITON_INTERPRET=1 to run on the CPU")


def triton_dtypes() -> frozenset[str]:
    """Return the data types in which Triton kernels follow the rules.

    These are float32 in the interpreter, and bfloat16 and float16 on a GPU.

    Raises
    ------
    Unsupported
        There is no CUDA device, and ``TRITON_INTERPRET=1`` is not set.
    """
    names = {"bfloat16", "float16"} if mode() == "gpu" else {"float32"}
    return frozenset(names)


def need_gpu(what: str, *majors: int) -> None:
    """Raise an error unless the GPU has one of these major compute capabilities.

    Raises
    ------
    Unsupported
        There is no GPU, or its compute capability has another major version.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in majors:
        allowed = " or ".join(f"{major}.x" for major in majors)
        raise Unsupported(f"{what} needs a GPU of compute capability {allowed}")


def plain_formats(dtypes: frozenset[str]) -> frozenset[str]:
    """Return the cache formats whose elements have these data types."""
    return frozenset(PLAIN_FORMAT_OF_DTYPE[name] for name in dtypes)


def triton_formats(dtypes: frozenset[str]) -> frozenset[str]:
    """Return the plain formats, and "fp8_e4m3" where Triton supports it.

    Triton supports it in the interpreter and on GPUs of compute capability 8.9 and later.

    Raises
    ------
    Unsupported
        There is no CUDA device, and ``TRITON_INTERPRET=1`` is not set.
    """
    has_e4m3 = mode() == "interpreter" or torch.cuda.get_device_capability() >= (8, 9)
    return plain_formats(dtypes) | ({"fp8_e4m3"} if has_e4m3 else set())


def capabilities(
    dtypes: frozenset[str],
    *,
    cache_formats: frozenset[str] | None = None,
    products: str = "exact",
    block_sizes: Iterable[int] = range(1, 257),
    head_dims: Iterable[tuple[int, int]],
    masks: Iterable[str] = ("causal",),
    features: frozenset[str] = FEATURES,
    max_query_len: int = 1,
) -> Capabilities:
    """Return the capabilities of a kernel with plan, append and attend, and with 1 to 128 heads.

    By default `cache_formats` are the plain formats.
    """
    return Capabilities(
        ops=frozenset({"plan", "append", "attend"}),
        dtypes=dtypes,
        cache_formats=plain_formats(dtypes) if cache_formats is None else cache_formats,
        block_sizes=frozenset(block_sizes),
        num_heads=frozenset(range(1, 129)),
        head_dims=frozenset(head_dims),
        masks=frozenset(masks),
        features=features,
        max_query_len=max_query_len,
        products=products,
    )


def version_of(distribution: str, file: Path) -> str:
    """Return the version of a distribution or, if it is not installed, a digest of `file`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
