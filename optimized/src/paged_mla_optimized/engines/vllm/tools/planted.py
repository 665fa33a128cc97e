"""Record dumps inside vLLM, with the correct adapter and with faults added to it.

    python -m paged_mla_optimized.engines.vllm.tools.planted --folder out/planted
    for dump in out/planted/*.safetensors; do paged-mla explain $dump; done

Each fault is a typical error of an adapter: it passes the kernel other values than vLLM passes to
the adapter. Every engine generates from the same prompts, eagerly. The command keeps one dump of
each engine, of a step in which all rows decode, under the name of the fault.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_mla_optimized.config.attention import MlaConfig, SoftmaxScaleWarning
from paged_mla_optimized.engines.tools.model import VOCAB, build_model
from paged_mla_optimized.engines.vllm.decode import Decode, Step
from paged_mla_optimized.engines.vllm.record import record
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import arguments, ask, prepare, run_engine

HEALTHY = "healthy"
LENGTHS = (1, 2, 17, 63, 64, 65, 66, 100, 129, 200, 300, 1200)
_LAYERS = 4
_EVERY, _TOKENS = 8, 17  # prompts are complete before step 8; step 16 is the last dump


class ShortLengths(Decode):
    """A fault: the lengths do not count the step's tokens."""

    def plan(self, step: Step) -> None:
        """Plan the step with lengths that lack its tokens."""
        super().plan(replace(step, seq_lens=step.seq_lens - step.query_start_loc.diff()))


class ScaleOfTheWidth(Decode):
    """A fault: the softmax scale is computed from the width of the absorbed queries."""

    def __init__(self, config: MlaConfig, *given: Any) -> None:
        width = config.kv_lora_rank + config.qk_rope_head_dim
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SoftmaxScaleWarning)  # it reports this very fault
            config = replace(config, softmax_scale=width**-0.5)
        super().__init__(config, *given)


class TablesOfOtherRows(Decode):
    """A fault: the rows have another order than their block tables."""

    def plan(self, step: Step) -> None:
        """Plan the step with the table of the previous row for each row."""
        super().plan(replace(step, block_table=step.block_table.roll(1, 0)))


class BinaryLse(Decode):
    """A fault: the lse has base 2 instead of base e."""

    def __init__(self, config: MlaConfig, *given: Any) -> None:
        super().__init__(replace(config, lse_base="2"), *given)


PLANTED: dict[str, type[Decode]] = {
    HEALTHY: Decode,
    "short-lengths": ShortLengths,
    "scale-of-the-width": ScaleOfTheWidth,
    "tables-of-other-rows": TablesOfOtherRows,
    "binary-lse": BinaryLse,
}
"""The class that replaces the adapter's ``Decode``, by the name of the fault."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Add the fault `name` to engines that are created inside the context."""
    from paged_mla_optimized.engines.vllm import builder  # imports vLLM

    builder.Decode = PLANTED[name]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        builder.Decode = Decode  # type: ignore[attr-defined]


def main() -> int:
    """Write a dump of an engine with each chosen fault; return 1 if an engine failed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("errors", nargs="*", help=f"faults, by default all: {', '.join(PLANTED)}")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument(
        "--layer", type=int, choices=range(_LAYERS), default=2, help="layer to dump"
    )
    parser.add_argument("--folder", type=Path, default=Path("out/planted"))
    options = parser.parse_args()
    if unknown := [name for name in options.errors if name not in PLANTED]:
        parser.error(f"unknown fault {unknown[0]}; use one of {', '.join(PLANTED)}")
    prepare()
    model = build_model(options.folder / "models", heads=options.heads, layers=_LAYERS)
    failed = 0
    for name in options.errors or PLANTED:
        try:
            path = _dump(name, model, options.layer, options.folder)
        except Exception:  # the other faults still run
            failed = 1
            print(f"{name}: {traceback.format_exc()[-1500:]}", flush=True)
            continue
        print(f"{name}: {path} of {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return failed


def _dump(name: str, model: Path, layer: int, folder: Path) -> Path:
    from paged_mla_optimized.engines.vllm.backend import PagedMlaBackend  # imports vLLM

    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in LENGTHS]
    given = arguments(
        model,
        NAME,
        "eager",
        sizes=[],
        block_size=64,
        max_model_len=4096,
        max_num_seqs=len(LENGTHS),
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 29,
        gpu_memory_utilization=0.1,
    )
    steps = folder / "steps"
    with planted(name):

        def generate(llm: Any) -> list[Path]:
            with record(PagedMlaBackend, steps, every=_EVERY, layers=(layer,)) as samples:
                ask(llm, prompts, [_TOKENS] * len(prompts))
            return samples.written

        written = run_engine(given, generate)
    path = folder / f"{name}.safetensors"
    shutil.move(written[-1], path)
    shutil.rmtree(steps)
    return path


if __name__ == "__main__":
    sys.exit(main())
