"""``paged-mla warm-up``: compile every kernel of a configuration into a folder that can be copied.

Triton finds a binary by a hash of its inputs, in the folder ``triton.knobs.cache.dir`` or
``TRITON_CACHE_DIR``. Each kernel's subfolder has a list of its files, ``__grp__*``, with absolute
paths (``put_group`` of ``FileCacheManager`` in ``triton/runtime/cache.py``, Triton 3.6.0 and
3.7.1). Therefore Triton compiles again after the folder is moved, unless the list is rewritten with
the new paths.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.commands.configuration import (
    Configuration,
    add_heads,
    add_options,
    configuration_of,
)
from paged_mla_optimized.commands.instance import config_of, current_gpu
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.tensors.latent_cache import empty_cache
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_optimized.triton_compat.settings import cache_in
from paged_mla_shared import __version__
from paged_mla_shared.documents import one_line
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.options import OneLineParser, whole

_ABOUT = """\
Compiles every kernel that plan, append, attend and gather_context of a configuration launch, so
that no request waits for a compiler where the folder is used. It needs a GPU of the same kind as
the GPU where the folder is used. The capacities are those of the instance (max_rows of MlaConfig,
and so on).
"""
_EXAMPLE = "example: paged-mla warm-up --folder /opt/paged-mla --heads 16 --max-rows 256"


def main(arguments: list[str] | None = None) -> int:
    """Compile all kernels; return 0, or 2 if that is not possible."""
    options = _parser().parse_args(arguments)
    folder = options.folder.resolve()
    used_at = (options.used_at or folder).absolute()
    try:
        if is_interpreting():
            raise Unsupported("unset TRITON_INTERPRET, since the interpreter compiles nothing")
        configuration = configuration_of(options)
        config = config_of(
            configuration,
            options.heads,
            max_rows=options.max_rows,
            max_query_tokens=options.max_query_tokens,
            max_model_len=options.max_model_len,
        )
        device = current_gpu()
        folder.mkdir(parents=True, exist_ok=True)
        seconds = compile_into(folder, config, device)
        if used_at != folder:
            name_paths(folder, used_at)
    except (InvalidArgument, Unsupported, OSError, torch.OutOfMemoryError) as error:
        print(f"paged-mla warm-up: {one_line(error)}", file=sys.stderr)
        return 2
    found = contents(folder)
    size = f"{found.binaries} binaries, {found.mib:.1f} MiB"
    print(one_line(f"{size} in {folder}, after {seconds:.1f} s"))
    print(one_line(f"To use them, set TRITON_CACHE_DIR={used_at}"))
    print("They are used, and nothing is compiled, if all of the following are the same as here:")
    for what, here in conditions(configuration, config, device, used_at):
        print(one_line(f"  {what:12} {here}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla warm-up", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder for the binaries"
    )
    parser.add_argument(
        "--used-at",
        type=Path,
        metavar="DIR",
        help="path that the folder will have where it is used (default: the path of --folder)",
    )
    add_options(parser)
    add_heads(parser)
    for name, default, what in (
        ("rows", 256, "rows of a step"),
        ("query-tokens", 1024, "query tokens of a step"),
        ("model-len", 131_072, "tokens of a row"),
    ):
        parser.add_argument(
            f"--max-{name}",
            type=whole(1),
            default=default,
            metavar="N",
            help=f"largest number of {what} (default: %(default)s)",
        )
    return parser


def compile_into(folder: Path, config: MlaConfig, device: torch.device) -> float:
    """Compile the kernels of an instance that are not in `folder`; return the seconds."""
    begin = time.perf_counter()
    with cache_in(folder):
        mla = PagedMla(config, device)
        mla.warm_up(empty_cache(config, 2, device))
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def name_paths(folder: Path, used_at: Path) -> None:
    """Rewrite the lists of files with the path that `folder` will have."""
    for group in folder.glob("*/__grp__*"):
        files = json.loads(group.read_text())["child_paths"]
        paths = {name: str(used_at / group.parent.name / Path(files[name]).name) for name in files}
        group.write_text(json.dumps({"child_paths": paths}))


@dataclass(frozen=True)
class Contents:
    """The contents of a folder: the number of binaries, and the size of all files."""

    binaries: int
    mib: float


def contents(folder: Path) -> Contents:
    """Count the binaries and the size of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return Contents(sum(path.suffix == ".cubin" for path in files), size / 2**20)


def conditions(
    configuration: Configuration, config: MlaConfig, device: torch.device, used_at: Path
) -> list[tuple[str, str]]:
    """Return all properties that binaries depend on, with their values here.

    Triton's part is ``get_cache_key`` in ``triton/runtime/cache.py``: its own files, the kernel's
    source and constants, the architecture, the version of ptxas, and environment variables. The
    number of multiprocessors is a constant of the plan's kernels.
    """
    facts = device_facts(device)
    capacities = f"max_rows {config.max_rows}, max_query_tokens {config.max_query_tokens}"
    heads = f"{config.num_heads} heads, {capacities}, max_model_len {config.max_model_len}"
    gpu = torch.cuda.get_device_name(device)
    return [
        ("path", str(used_at)),
        ("paged-mla", __version__),
        ("Triton", f"{triton.__version__}, from the same wheel"),
        ("Python", f"{platform.python_version()}; another patch release is allowed"),
        ("GPU", f"{gpu}: {facts.arch}, {facts.num_sms} multiprocessors"),
        ("model", str(configuration)),
        ("instance", f"{heads}; every other field of MlaConfig has its default"),
        ("environment", "variables that change compilation, such as TRITON_PTXAS_PATH"),
    ]
