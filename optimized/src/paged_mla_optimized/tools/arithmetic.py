"""The floating-point instructions that compiled kernels may contain, by architecture.

``python -m paged_mla_optimized.tools.arithmetic --page optimized/docs/arithmetic.md`` writes them
as a table. In the ahead-of-time compilation (``aot.py``) a variant with another instruction fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paged_mla_optimized.config.architectures import ROUNDING_E4M3_ONCE, SHARED_MEMORY, WITH_E4M3
from paged_mla_optimized.tools.aot_job import Job
from paged_mla_optimized.triton_compat.kernels import name_of

EVERY = frozenset(SHARED_MEMORY)
"""All architectures."""

_INSTRUCTION = re.compile(r"(?:^|[{;])\s*(?:@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)+)", re.MULTILINE)
"""Names in PTX, at the start of a line or inside the braces of inline assembly."""
_ARITHMETIC = re.compile(
    r"cvt\.|cp\.reduce\.|(?:mma|wmma)\.|wgmma\.mma|tcgen05\.mma|(?:ex2|lg2|rcp|sqrt|rsqrt|sin|cos|tanh)\."
    r"|.*\.(?:ftz|approx|full|sat|relu|(?:u?e\dm\d|ue8m0|tf32|bf16|f16)(?:x\d)?|f32|f32x2|f64)\b"
)
_NO_ARITHMETIC = re.compile(r"(?:ld|st|mov|selp|cp(?!\.reduce)|shfl)\b(?!.*\.ftz)")

_WEIGHING = "attention, prefill, joins, merges"
"""Kernels that compute and merge outputs, whose tolerances allow approximations."""
_KERNELS = {
    "all": re.compile(r"\w+"),
    _WEIGHING: re.compile(
        r"attend_kernel|(?:hopper_)?prefill_kernel|combine_kernel|merge_\w+|decode_\w+"
    ),
    "attention over `fp8_ds_mla`": re.compile("attend_kernel"),
    "decode on Hopper": re.compile(r"decode_\w+"),
    "`decode_tile_fp8`": re.compile("decode_tile_fp8_kernel"),
}
"""Patterns of the kernels' names, by their description on the page."""
_COLUMNS = ("what", "PTX", "rounding", "subnormal", "kernels", "architectures", "rules")
_HEAD = f"| {' | '.join(_COLUMNS)} |"


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """A group of instructions that kernels may contain.

    Parameters
    ----------
    what : str
        A description of their computation.
    names : str
        A pattern of their names in PTX.
    rounding : str
        The rounding and the saturation of their results.
    subnormal : str
        The treatment of subnormal numbers.
    why : str
        The requirement of the rules, and the reason why the instructions satisfy it.
    archs : frozenset of str
        The architectures with these instructions; :data:`EVERY` by default.
    kernels : str
        The kernels that may contain them, a key of ``_KERNELS``.
    dtypes : frozenset of str
        The dtypes of queries and new latents of these kernels, in the spelling of
        ``runtime/kernel_spec.py``; empty for all.
    constants : dict
        Constants that these kernels are compiled with.
    """

    what: str
    names: str
    rounding: str
    subnormal: str
    why: str
    archs: frozenset[str] = EVERY
    kernels: str = "all"
    dtypes: frozenset[str] = frozenset()
    constants: Mapping[str, str] = field(default_factory=dict)

    def allows(self, name: str, job: Job, arch: str) -> bool:
        """Return whether the kernel of `job` for `arch` may contain the instruction `name`."""
        return (
            arch in self.archs
            and re.fullmatch(self.names, name) is not None
            and _KERNELS[self.kernels].fullmatch(name_of(job.kernel)) is not None
            and (not self.dtypes or job.dtype in self.dtypes)
            and self.constants.items() <= job.constants.items()
        )


_TO_NEAREST, _EXACT, _KEPT = "to nearest even", "exact", "kept"

ALLOWED = (
    Allowed(
        what="integers of other widths",
        names=r"cvt(\.sat)?\.[us](8|16|32|64)\.[us](8|16|32|64)",
        rounding="none",
        subnormal="none",
        why="S-1: slots and offsets have 64 bits.",
    ),
    Allowed(
        what="fp16 or bf16 to float32, float32 to float64",
        names=r"cvt\.(f32\.(f16|bf16)|f64\.f32)",
        rounding=_EXACT,
        subnormal=_KEPT,
        why="The wider type represents every number.",
    ),
    Allowed(
        what="float32 to fp16 or bf16, float64 to float32",
        names=r"cvt\.rn\.((f16|f16x2|bf16|bf16x2)\.f32|f32\.f64)",
        rounding=f"{_TO_NEAREST}; infinite above the largest number",
        subnormal=_KEPT,
        why="S-11, S-12: stored values and outputs are rounded once, to the problem's dtype.",
    ),
    Allowed(
        what="float32 to e4m3",
        names=r"cvt\.rn\.satfinite\.e4m3x2\.f32",
        rounding=f"{_TO_NEAREST}; at most 448, NaN is 0x7f",
        subnormal=_KEPT,
        why="S-11: one rounding. Other architectures round with integers.",
        archs=ROUNDING_E4M3_ONCE,
    ),
    Allowed(
        what="e4m3 to fp16",
        names=r"cvt\.rn\.f16x2\.e4m3x2",
        rounding=_EXACT,
        subnormal=_KEPT,
        why="S-11: codes are read exactly. Other architectures shift bits and multiply by 256.",
        archs=WITH_E4M3,
    ),
    Allowed(
        what="e4m3 in fp16 to bf16",
        names=r"cvt(\.rn)?\.bf16\.f16",
        rounding=_EXACT,
        subnormal=_KEPT,
        why="S-11: an e4m3 number has 4 significant bits, and bf16 has 8.",
        archs=WITH_E4M3 - {"sm89"},
    ),
    Allowed(
        what="integers to float32",
        names=r"cvt\.rn\.f32\.[us](8|16|32)",
        rounding=_TO_NEAREST,
        subnormal="none",
        why="Exponents and eighths, all below 2^24, are exact.",
        kernels=_WEIGHING,
    ),
    Allowed(
        what="float32 to the next integer above, in float32",
        names=r"cvt\.rpi\.ftz\.f32\.f32",
        rounding="up",
        subnormal="flushed to 0",
        why="S-5: the softmax may subtract any number near the largest score.",
        archs=frozenset({"sm90"}),
        kernels="decode on Hopper",
    ),
    Allowed(
        what="sums, differences and products of float32",
        names=r"(add|sub|mul)(\.rn)?\.f32(x2)?|add\.rn\.f32\.(f16|bf16)|fma\.rn\.f32(x2)?",
        rounding=f"{_TO_NEAREST}; a product and a sum may be one fma, see below",
        subnormal=_KEPT,
        why="S-5, S-12: the tolerances count one rounding for each. S-11: kernels call `fma` by "
        "name.",
    ),
    Allowed(
        what="sums, differences and products of float64",
        names=r"(add|sub|mul)(\.rn)?\.f64|fma\.rn\.f64|neg\.f64",
        rounding=_TO_NEAREST,
        subnormal=_KEPT,
        why="S-12: float32 rows are rotated in float64 and are exact to their last bit.",
        dtypes=frozenset({"fp32"}),
    ),
    Allowed(
        what="products of fp16",
        names=r"mul(\.rn)?\.f16(x2)?",
        rounding=f"{_TO_NEAREST}; exact for the decoding of codes by powers of two",
        subnormal=_KEPT,
        why="S-11: e4m3 codes as bits of fp16 are 2^8 too small. S-5: ratios of scales on Hopper.",
    ),
    Allowed(
        what="quotients of float32",
        names=r"div\.rn\.f32",
        rounding=_TO_NEAREST,
        subnormal=_KEPT,
        why="S-11: scales, and the values before their conversion to codes, are quotients.",
    ),
    Allowed(
        what="quotients, powers of two and logarithms, approximately",
        names=r"div\.full\.f32|ex2\.approx(\.ftz)?\.f32|fma\.rn\.ftz\.f32",
        rounding="within 2 ulp",
        subnormal="flushed to 0 by `.ftz`",
        why="S-5, S-7, S-8: the errors are within the tolerances of weights and of the lse. "
        "S-11 and S-12 do not use them.",
        kernels=_WEIGHING,
    ),
    Allowed(
        what="products of matrices of fp16 or bf16",
        names=r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(f16\.f16|bf16\.bf16)\.f32"
        r"|wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(f16\.f16|bf16\.bf16)"
        r"|tcgen05\.mma\.cta_group::1\.kind::f16",
        rounding="exact products, summed in float32",
        subnormal=_KEPT,
        why="S-5: the tolerance counts the roundings of the sum.",
        dtypes=frozenset({"fp16", "bf16"}),
        kernels=_WEIGHING,
    ),
    Allowed(
        what="products of matrices of tf32",
        names=r"mma\.sync\.aligned\.m16n8k(4|8)\.row\.col\.f32\.tf32\.tf32\.f32"
        r"|wgmma\.mma_async\.sync\.aligned\.m64n\d+k8\.f32\.tf32\.tf32",
        rounding="exact products of fp16 queries and bf16 keys, summed in float32",
        subnormal=_KEPT,
        why="S-11: `fp8_ds_mla` stores k_pe in bf16. tf32 represents fp16 and bf16 exactly. "
        "Products of float32 do not use tf32: they are sums of `fma.rn.f32`.",
        kernels="attention over `fp8_ds_mla`",
        dtypes=frozenset({"fp16"}),
        constants={"SCALES": "inline"},
    ),
    Allowed(
        what="products of matrices of e4m3",
        names=r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
        rounding="exact products, summed in fewer bits than float32 has",
        subnormal=_KEPT,
        why='S-5: only for `products="fast"`, which has its own tolerance.',
        archs=frozenset({"sm90"}),
        kernels="`decode_tile_fp8`",
    ),
    Allowed(
        what="signs, comparisons, maxima and minima",
        names=r"(abs|neg|min|max|redux\.sync\.max|redux\.sync\.min)(\.NaN)?\.(f16|bf16|f32|f16x2|bf16x2)"
        r"|setp\.\w+(\.(and|or|xor))?\.(f16|bf16|f32)",
        rounding=_EXACT,
        subnormal=_KEPT,
        why="Without `.NaN` a maximum ignores NaN.",
    ),
)
"""All allowed instructions that compute with floating-point numbers or convert numbers."""


def arithmetic_of(ptx: str) -> set[str]:
    """Return the names of the PTX instructions that compute with floats or convert numbers."""
    code = re.sub(r"//.*", "", ptx)
    names = set(_INSTRUCTION.findall(code))
    return {n for n in names if _ARITHMETIC.match(n) and not _NO_ARITHMETIC.match(n)}


def unlisted(ptx: str, job: Job, arch: str) -> list[str]:
    """Return, sorted, the arithmetic instructions in a kernel's PTX that :data:`ALLOWED` lacks."""
    return [
        name
        for name in sorted(arithmetic_of(ptx))
        if not any(allowed.allows(name, job, arch) for allowed in ALLOWED)
    ]


def table() -> str:
    """Return :data:`ALLOWED` as a table of Markdown."""
    lines = [_HEAD, f"|{'---|' * len(_COLUMNS)}"]
    for row in ALLOWED:
        archs = [arch for arch in SHARED_MEMORY if arch in row.archs]
        names = ", ".join(f"`{name}`" for name in _spelled(row.names))
        dtypes = f" of {', '.join(sorted(row.dtypes))}" if row.dtypes else ""
        served = "all" if row.archs == EVERY else ", ".join(archs)
        cells = (
            row.what,
            names,
            row.rounding,
            row.subnormal,
            row.kernels + dtypes,
            served,
            row.why,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spelled(names: str) -> list[str]:
    """Return the patterns in readable form: without escapes, and with alternatives as a/b."""
    for pattern, plain in (("\\.", "."), ("\\w+", "*"), ("\\d+", "*"), ("[us]", "(u|s)")):
        names = names.replace(pattern, plain)
    depth, parts = 0, [""]
    for letter in names:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += "/" if letter == "|" else letter
    return parts


def main(arguments: list[str] | None = None) -> int:
    """Replace the table at the end of a Markdown page; return the exit status."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.arithmetic")
    parser.add_argument("--page", type=Path, metavar="MARKDOWN", required=True)
    path = parser.parse_args(arguments).page
    if not path.is_file():
        parser.error(f"--page: got {path}; allowed: an existing file")
    path.write_text(path.read_text().partition(_HEAD)[0] + table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
