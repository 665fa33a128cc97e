"""What an adapter says of its kernel: where it runs, what it serves, which release it is."""

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
    """Return the module of another project's kernel.

    Parameters
    ----------
    *modules : str
        Where its releases have it; the first that is there is taken.

    Raises
    ------
    Unsupported
        No release of the package is installed, or one that has it nowhere there.
    ImportError
        The package is there, and what it imports is not.
    """
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
    raise not_installed(modules[0].partition(".")[0], " or ".join(modules))


def not_installed(package: str, what: str) -> Unsupported:
    """Return the error of an adapter whose package is not there."""
    return Unsupported(f"the package {package} is not installed, or has no {what}")


def mode() -> str:
    """Return "interpreter" where ``TRITON_INTERPRET=1`` asks for it, else "gpu".

    Raises
    ------
    Unsupported
        Neither a GPU nor ``TRITON_INTERPRET=1`` is there.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    if torch.cuda.is_available():
        return "gpu"
    raise Unsupported("no CUDA device")


def triton_dtypes() -> frozenset[str]:
    """Return what Triton kernels compute as the rules say: no bfloat16 in the interpreter."""
    names = {"bfloat16", "float16"} if mode() == "gpu" else {"float32"}
    return frozenset(names)


def need_gpu(what: str, *majors: int) -> None:
    """Refuse to go on where there is no GPU of these compute capabilities.

    Raises
    ------
    Unsupported
        There is none.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in majors:
        allowed = " or ".join(f"{major}.x" for major in majors)
        raise Unsupported(f"{what} needs a GPU of compute capability {allowed}")


def plain_formats(dtypes: frozenset[str]) -> frozenset[str]:
    """Return the cache formats whose elements are of these types."""
    return frozenset(PLAIN_FORMAT_OF_DTYPE[name] for name in dtypes)


def triton_formats(dtypes: frozenset[str]) -> frozenset[str]:
    """Return the plain formats, and flat e4m3 where Triton has that type: since Ada."""
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
    """Return what a kernel of these types serves; without `cache_formats`, the plain ones."""
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
    """Return the installed version, or of a bare file what identifies it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
