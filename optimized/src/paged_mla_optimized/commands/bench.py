"""``paged-mla bench``: time ``attend`` in a configuration of the user."""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
import triton

from paged_mla_optimized.commands.configuration import (
    add_heads,
    add_options,
    configuration_of,
)
from paged_mla_optimized.commands.instance import config_of, current_gpu
from paged_mla_optimized.commands.kernels import reasons_against, served_by
from paged_mla_optimized.commands.timing import Step, Timed, check_fits, gib, timed
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_shared.documents import one_line, printable
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.options import OneLineParser, whole

_ABOUT = """\
Times attend over a cache with random contents: rows of one length, blocks in random order. CUDA
events time each replay of a CUDA graph of one call; the L2 cache is cleared before each replay.
"""
_EXAMPLE = "example: paged-mla bench --heads 128 --rows 64 --seq-len 4096"


def main(arguments: list[str] | None = None) -> int:
    """Print the times; return 0, or 2 if the step cannot run."""
    options = _parser().parse_args(arguments)
    try:
        print(printable(report(options)))
    except (InvalidArgument, Unsupported) as error:
        print(f"paged-mla bench: {one_line(error)}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        print("paged-mla bench: the GPU is out of memory; use fewer --rows", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla bench", description=_ABOUT, epilog=_EXAMPLE)
    for name, what in (("rows", "rows of the step"), ("seq-len", "tokens of each row")):
        parser.add_argument(f"--{name}", type=whole(1), required=True, metavar="N", help=what)
    parser.add_argument(
        "--query-len",
        type=whole(1),
        default=1,
        metavar="N",
        help="number of query tokens of each row (default: %(default)s)",
    )
    add_heads(parser)
    add_options(parser)
    return parser


def report(options: argparse.Namespace) -> str:
    """Time the step of the options, and return the report to print.

    Raises
    ------
    InvalidArgument, Unsupported
        The step cannot run.
    torch.OutOfMemoryError
        The instance's own buffers do not fit in addition to the step.
    """
    configuration = configuration_of(options)
    step = Step(options.rows, options.seq_len, options.query_len)
    config = config_of(
        configuration,
        options.heads,
        max_rows=step.rows,
        max_query_tokens=step.num_tokens,
        max_model_len=step.seq_len,
    )
    device = torch.device("cpu") if is_interpreting() else current_gpu()
    check_fits(step, config, device)
    found = timed(step, config, device)
    demand = configuration.demand(device_facts(device).arch, config.num_heads)
    kernel = [served_by(demand, step.query_len), *reasons_against(demand, [step.query_len])]
    lines = {
        "model": str(configuration),
        "step": f"{step.rows} rows of {step.seq_len} tokens, {step.query_len} of them queries, "
        f"{config.num_heads} heads, {gib(found.nbytes)}",
        "device": f"{_name(device)}, torch {torch.__version__}, Triton {triton.__version__}",
        "kernel": "; ".join(kernel),
    }
    of_found = rates(step, config, found)
    # The interpreter's rates of memory and products do not describe a kernel.
    lines |= {"time": of_found["time"]} if device.type == "cpu" else of_found
    text = "\n".join(f"{title:9} {line}" for title, line in lines.items())
    if device.type == "cpu":
        text += "\nThese are times of the interpreter on a CPU. They do not predict times on a GPU."
    return text


def rates(step: Step, config: MlaConfig, found: Timed) -> dict[str, str]:
    """Return the time of a call, and its bytes and products per second."""
    times = found.milliseconds
    median = statistics.median(times)
    least, low, high = (1e3 * times[len(times) * part // 4] for part in (0, 1, 3))
    read = step.rows * step.seq_len * config.stored.token_bytes(config)
    widths = 2 * config.kv_lora_rank + config.qk_rope_head_dim  # products for a score and an output
    flop = 2 * step.seen * config.num_heads * widths
    return {
        "time": f"{1e3 * median:.1f} us (median of {len(times)}), least {least:.1f}, "
        f"middle half {low:.1f} to {high:.1f}",
        "cache": f"{read / median / 1e6:.1f} GB/s, each cached token read once",
        "products": f"{flop / median / 1e9:.2f} TFLOP/s",
    }


def _name(device: torch.device) -> str:
    return "Triton's interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)
