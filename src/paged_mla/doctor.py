"""``paged-mla doctor``: show installed packages, GPUs, and the kernels that serve a step."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from paged_mla.engines import ENGINES, Engine
from paged_mla.gpus import Gpu, find_gpus
from paged_mla.requirements import Requirement, installed_version, requirements
from paged_mla_optimized.commands.configuration import (
    Configuration,
    add_options,
    configuration_of,
)
from paged_mla_optimized.commands.kernels import RULE, reasons_against, served_by
from paged_mla_optimized.config.architectures import SHARED_MEMORY
from paged_mla_optimized.config.limits import MAX_HEADS
from paged_mla_shared import __version__
from paged_mla_shared.documents import one_line, printable
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.options import OneLineParser, one_of, whole

_ABOUT = """\
Prints the installed packages and whether their versions are supported, the GPUs of this machine,
the kernel that serves each kind of step and the reason, and the option of each serving engine that
selects this package.
"""
_EXAMPLE = "example: paged-mla doctor --heads 128 --cache-format fp8_e4m3 --arch sm90"
_PACKAGES = (  # names, packages, and the extras that install them
    ("NumPy", "numpy", ""),
    ("PyTorch", "torch", "optimized"),
    ("Triton", "triton", "optimized"),
)
_STEPS = {  # the largest number of query tokens of a row, by kind of step
    "decode, 1 token for each row": 1,
    "verify, 4 drafts and 1 token for each row": 5,
    "prefill, a chunk of 512 tokens": 512,
    "mixed, decode rows with this chunk": 512,
}
_USUAL_ARCH = "sm90"


def main(arguments: list[str] | None = None) -> int:
    """Print all sections.

    Parameters
    ----------
    arguments : list of str or None
        The options; ``None`` uses the arguments of the process.

    Returns
    -------
    int
        0, or 2 for options that do not fit together or a size that is too large. The parser ends
        the process with status 2 for other wrong options.
    """
    options = _parser().parse_args(arguments)
    try:
        configuration = configuration_of(options)
        if max(options.heads) > MAX_HEADS:
            raise InvalidArgument("--heads", max(options.heads), f"1 to {MAX_HEADS}")
    except InvalidArgument as error:
        print(f"paged-mla doctor: {one_line(error)}", file=sys.stderr)
        return 2
    try:
        gpus, problem = find_gpus(), ""
    except OSError as error:
        gpus, problem = [], str(error)
    found = sorted({gpu.arch for gpu in gpus if gpu.arch})
    archs = [options.arch] if options.arch else found or [_USUAL_ARCH]
    sections = [_installation(), _gpus(gpus, problem)]
    sections += [_kernels(configuration, arch, options.heads) for arch in archs]
    sections.append(_engines())
    print(printable("\n\n".join("\n  ".join(section) for section in sections)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla doctor", description=_ABOUT, epilog=_EXAMPLE)
    add_options(parser)
    parser.add_argument(
        "--heads",
        type=whole(1),
        nargs="+",
        default=[16, 128],
        metavar="H",
        help="the query heads on one GPU (default: 16 and 128)",
    )
    parser.add_argument(
        "--arch",
        type=one_of(SHARED_MEMORY),
        metavar="NAME",
        help=f"the GPU architecture: {', '.join(SHARED_MEMORY)} (default: the architectures of "
        f"this machine's GPUs, or {_USUAL_ARCH} without a GPU)",
    )
    return parser


def _installation() -> list[str]:
    allowed = requirements()
    place = Path(__file__).parent
    lines = ["Installation", _line("paged-mla", __version__, f"in {place}")]
    if not allowed:
        lines.append(_line("", "", "The package is not installed: pip install paged-mla"))
    lines.append(_version("Python", platform.python_version(), allowed.get("python"), ""))
    for name, package, extra in _PACKAGES:
        lines.append(_version(name, installed_version(package), allowed.get(package), extra))
    return lines


def _gpus(gpus: list[Gpu], problem: str) -> list[str]:
    if problem:
        return ["GPUs", problem]
    if not gpus:
        return ["GPUs", "No GPU was found. TRITON_INTERPRET=1 runs the kernels on the CPU, slowly."]
    lines = ["GPUs"]
    for gpu in gpus:
        arch = gpu.arch or f"compute capability {gpu.capability}, which no kernel supports"
        lines.append(f"{gpu.name}, {arch}, {gpu.memory}, driver {gpu.driver}")
    if installed_version("torch") and not importlib.import_module("torch").cuda.is_available():
        lines.append(
            "PyTorch cannot use these GPUs. Install a build of torch for the driver's CUDA version."
        )
    return lines


def _kernels(configuration: Configuration, arch: str, heads: list[int]) -> list[str]:
    stored, dims = FORMATS[configuration.cache_format], configuration.dims
    block = stored.block_bytes(dims, configuration.block_size)
    lines = [f"Kernels on {arch} (change with --arch)", *str(configuration).split("; ")]
    lines[-1] += f", {block:,} bytes for each block and layer"
    lines.append(RULE)
    for num_heads in heads:
        demand = configuration.demand(arch, num_heads)
        lines.append(f"{num_heads} heads")
        for step, query_len in _STEPS.items():
            pairs = f"{num_heads * query_len} pairs"
            lines.append(f"  {step:42} {pairs:12} {served_by(demand, query_len)}")
        lines += [f"  {reason}" for reason in reasons_against(demand, _STEPS.values())]
    return lines + list(_elsewhere(configuration, arch, heads))


def _elsewhere(configuration: Configuration, arch: str, heads: list[int]) -> Iterator[str]:
    """Yield a line for each set of kernels, with the other architectures that they serve."""
    archs: dict[str, list[str]] = {}
    for other in SHARED_MEMORY:
        served = {
            served_by(configuration.demand(other, num_heads), query_len)
            for num_heads in heads
            for query_len in _STEPS.values()
        }
        if other != arch:
            archs.setdefault(", ".join(sorted(served)), []).append(other)
    for kernels, names in archs.items():
        yield f"On {', '.join(names)}: {kernels}"


def _engines() -> list[str]:
    allowed = requirements()
    lines = ["Engines (vLLM and SGLang pin torch, so install each in its own environment)"]
    for engine in ENGINES:
        version = installed_version(engine.package)
        lines.append(_version(engine.name, version, allowed.get(engine.package), engine.package))
        if version is not None:
            lines += [_line("", "", text) for text in _plugin(engine)]
    return lines


def _plugin(engine: Engine) -> Iterator[str]:
    if engine.group:
        state = "is" if engine.is_registered else "is not"
        yield f"The plugin {state} registered (entry point of {engine.group})."
        if not engine.is_registered:
            yield "pip install --force-reinstall --no-deps paged-mla"
    selected = engine.selected_by()
    if selected is not None:
        yield f"Selected by: {selected}"


def _version(name: str, version: str | None, allowed: Requirement | None, extra: str) -> str:
    """Return the line of a package.

    Parameters
    ----------
    name : str
        The name to print.
    version : str or None
        The installed version; ``None`` if the package is not installed.
    allowed : Requirement or None
        The supported versions; ``None`` if they are unknown.
    extra : str
        The extra of paged-mla that installs the package; "" for none.
    """
    bounds = f" ({allowed})" if allowed else ""
    install = f'pip install "paged-mla[{extra}]"' if extra else "pip install paged-mla"
    if version is None:
        return _line(name, "-", f"not installed{bounds}: {install}")
    if allowed is None:
        return _line(name, version, "")
    if allowed.allows(version):
        return _line(name, version, f"supported{bounds}")
    return _line(name, version, f"not supported{bounds}: {install}")


def _line(name: str, version: str, said: str) -> str:
    return f"{name:14} {version:16} {said}".rstrip()
