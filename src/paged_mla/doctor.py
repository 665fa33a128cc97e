"""``paged-mla doctor``: what is installed, which GPUs are here, and which kernels serve a step."""

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
Prints what is installed and whether its version is supported, which GPUs this machine has, which
kernel serves each kind of step and why, and how each serving engine selects this package.
"""
_EXAMPLE = "example: paged-mla doctor --heads 128 --cache-format fp8_e4m3 --arch sm90"
_PACKAGES = (  # names, packages, and the extras that bring them
    ("NumPy", "numpy", ""),
    ("PyTorch", "torch", "optimized"),
    ("Triton", "triton", "optimized"),
)
_STEPS = {  # the longest query of each
    "decode, 1 token for each row": 1,
    "verify, 4 drafts and 1 token for each row": 5,
    "prefill, a chunk of 512 tokens": 512,
    "mixed, decode rows beside such a chunk": 512,
}
_USUAL_ARCH = "sm90"


def main(arguments: list[str] | None = None) -> int:
    """Print the sections; return 0, or 2 for a wrong option."""
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
        help=f"the GPU's architecture: {', '.join(SHARED_MEMORY)} (default: that of the GPUs here, "
        f"and {_USUAL_ARCH} without one)",
    )
    return parser


def _installation() -> list[str]:
    allowed = requirements()
    place = Path(__file__).parent
    lines = ["Installation", _line("paged-mla", __version__, f"in {place}")]
    if not allowed:
        lines.append(_line("", "", "The distribution is not installed: pip install paged-mla"))
    lines.append(_version("Python", platform.python_version(), allowed.get("python"), ""))
    for name, package, extra in _PACKAGES:
        lines.append(_version(name, installed_version(package), allowed.get(package), extra))
    return lines


def _gpus(gpus: list[Gpu], problem: str) -> list[str]:
    if problem:
        return ["GPUs", problem]
    if not gpus:
        return ["GPUs", "no GPU found: TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"]
    lines = ["GPUs"]
    for gpu in gpus:
        arch = gpu.arch or f"compute capability {gpu.capability}, for which there is no kernel"
        lines.append(f"{gpu.name}, {arch}, {gpu.memory}, driver {gpu.driver}")
    if installed_version("torch") and not importlib.import_module("torch").cuda.is_available():
        lines.append(
            "PyTorch can use none of them: install a build of torch for this driver's CUDA"
        )
    return lines


def _kernels(configuration: Configuration, arch: str, heads: list[int]) -> list[str]:
    stored, dims = FORMATS[configuration.cache_format], configuration.dims
    block = stored.block_bytes(dims, configuration.block_size)
    lines = [f"Kernels on {arch} (--arch names another)", *str(configuration).split("; ")]
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
    """Yield a line for all other architectures on which the same kernels serve these steps."""
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
    lines = ["Engines (vLLM and SGLang pin torch: give each an environment of its own)"]
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
    """Return the line of a package; `extra` is that of the distribution which installs it."""
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
