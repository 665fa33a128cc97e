"""Measure the errors of outputs over every cache format, and those of FlashMLA's FP8 decode.

``python -m paged_mla_optimized.tools.bench.accuracy [--only REGEX] [--peers DIR] [--out STEM]``
needs a GPU. It measures exact and fast products. Each output is compared with float64 twice: over
the latents that were passed to ``append``, which shows the error of the format, and over the values
in the cache, which shows the error of the kernel. Queries are bfloat16 in both.

Latents are RMS-normed, and some channels are far larger than the others. Rotated keys have no norm,
and their large channels are larger still. DeepSeek-V2 (arXiv:2405.04434, section 2.1) norms only
the latents. SnapMLA (arXiv:2602.10718) finds that quantization loses most in the rotated keys. With
"peaked" scores each query has one key with nearly all of the weight.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tools.bench import peers
from paged_mla_optimized.tools.bench.cases import Case, P, R
from paged_mla_optimized.tools.bench.formatted import FLAT, FP8_NAMES, held, written
from paged_mla_optimized.tools.bench.problem import SCALE, Tensors, attention, build
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_shared.formats import FORMATS

FORMAT_NAMES = ("bf16", *FP8_NAMES)
ROWS, KEYS = 8, 4096
SPREAD = 3.0  # the standard deviation of the scores
PEAK = 14.0  # the amount that is added to the score of the dominant key


class Step(NamedTuple):
    """One row of the table."""

    scores: str  # "spread" or "peaked"
    num_heads: int
    cache_format: str
    products: str  # those of the config, or "FlashMLA"

    @property
    def name(self) -> str:
        """The first cell."""
        return f"{self.scores}, h{self.num_heads}, {self.cache_format}, {self.products}"


def steps() -> list[Step]:
    """Return a step for each kind of scores, number of heads, format and kind of products.

    FlashMLA follows the products of flat FP8.
    """
    found = []
    for scores in ("spread", "peaked"):
        for heads in (16, 128):
            for name in FORMAT_NAMES:
                kinds = ["exact"] if FORMATS[name].is_plain else ["exact", "fast"]
                kinds += ["FlashMLA"] if name == FLAT else []
                found += [Step(scores, heads, name, kind) for kind in kinds]
    return found


def measure(step: Step, flashmla: Any) -> dict[str, Any]:
    """Return the errors of a step; no errors if the kernel cannot run."""
    tensors, latents = inputs(step.scores, step.num_heads)
    cache = write(replace(tensors.config, cache_format=step.cache_format), tensors, latents)
    found = answer(step, tensors, cache, flashmla)
    if found is None:
        return {"step": step.name}
    given = by_blocks(latents.double(), tensors)
    of_keys = {"given": given, "cached": held(cache)}
    wanted = {kind: attend(tensors, keys) for kind, keys in of_keys.items()}
    return {"step": step.name} | {kind: errors(found, want) for kind, want in wanted.items()}


def inputs(scores: str, num_heads: int, device: str = "cuda") -> tuple[Tensors, torch.Tensor]:
    """Return a case with one query per row, and its latents and keys [N * S, R + P]."""
    case = Case(scores, num_heads, 1, (KEYS,) * ROWS)
    tensors = build(case, device)  # also sets the seed
    gains = torch.randn(R + P, device=device).exp()
    gains[:R:64] *= 16  # eight channels of outliers
    gains[R::16] *= 32
    numbers = torch.randn(ROWS * KEYS, R + P, device=device) * gains
    numbers[:, :R] /= numbers[:, :R].square().mean(1, keepdim=True).sqrt()
    latents = numbers.bfloat16()
    keys = latents.float().view(ROWS, KEYS, R + P)
    q = torch.randn(ROWS, num_heads, R + P, device=device) / gains
    spread = (q @ keys.transpose(1, 2)).std(2, keepdim=True)  # [N, H, 1]
    q *= (SPREAD if scores == "spread" else 1.0) / SCALE / spread
    if scores == "peaked":
        mine = torch.randint(KEYS, (ROWS, num_heads, 1), device=device).expand(-1, -1, R + P)
        towards = keys.gather(1, mine) / gains**2
        own = (towards * keys.gather(1, mine)).sum(2, keepdim=True)
        q += PEAK / SCALE * towards / own
    q = q.bfloat16()
    return replace(
        tensors, q=q[:, None], q_nope=q[..., :R].contiguous(), q_pe=q[..., R:].contiguous()
    ), latents


def write(config: MlaConfig, tensors: Tensors, latents: torch.Tensor) -> LatentCache:
    """Return a cache with the tokens [N * S, R + P] in the slots of the block table."""
    offsets = torch.arange(config.block_size, device=latents.device)
    slots = (tensors.block_table.long()[..., None] * config.block_size + offsets).flatten()
    return written(config, latents, slots, len(tensors.cache))


def answer(step: Step, tensors: Tensors, cache: LatentCache, flashmla: Any) -> torch.Tensor | None:
    """Return out [N, H, R] of a step, or ``None`` if its kernel cannot run."""
    if step.products == "FlashMLA":
        launch = flashmla(tensors, cache.latents, cache.scales)
        return None if launch is None else launch()[:, 0]
    config = replace(tensors.config, cache_format=step.cache_format, products=step.products)
    return attention(tensors, config, cache)()


def by_blocks(latents: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Return tokens [N * S, R + P] in the order of the cache, [num_blocks, block_size, R + P]."""
    placed = latents.new_zeros(tensors.cache.shape)
    placed[tensors.block_table.flatten().long()] = latents.view(placed.shape)
    return placed


def attend(tensors: Tensors, numbers: torch.Tensor) -> torch.Tensor:
    """Return the attention outputs over `numbers` in place of the cache, float64 [N, H, R].

    All rows have the same number of keys.
    """
    keys = numbers[tensors.block_table.long()].flatten(1, 2)[:, : tensors.case.seq_lens[0]]
    scores = SCALE * tensors.q[:, 0].double() @ keys.transpose(1, 2)
    return scores.softmax(2) @ keys[..., :R]


def errors(found: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Return the relative error of all outputs, and the smallest cosine similarity of a head."""
    difference = (found.double() - want).norm() / want.norm()
    cosine = torch.cosine_similarity(found.double(), want, dim=2).min()
    return difference.item(), cosine.item()


def header() -> str:
    """Return the head of the Markdown table."""
    columns = ["scores, heads, format, products"]
    for kind in ("latents as given", "numbers of the cache"):
        columns += [f"error to {kind}", "cosine"]
    return head_of(columns)


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    cells = [row["step"]]
    for kind in ("given", "cached"):
        cells += [f"{row[kind][0]:.1e}", f"{row[kind][1]:.6f}"] if kind in row else ["-", "-"]
    return row_of(cells)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.accuracy")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder of FlashMLA")
    options = options_of(parser, steps())
    flashmla = peers.load_flashmla_fp8(options.peers)
    run(steps(), partial(measure, flashmla=flashmla), line, header(), options)


if __name__ == "__main__":
    main()
