"""Find with small calls how a function is called and what it supports.

A Python error means that the function does not support the call. A wrong output does not: the tests
of the suite find it later.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from paged_mla_adapters.judge import csr
from paged_mla_adapters.judge.claims import (
    CACHE_LAYOUTS,
    DTYPES,
    NARROWING,
    QUERY_LAYOUTS,
    Claims,
    Served,
    read,
    write,
)
from paged_mla_adapters.judge.like import LIKE
from paged_mla_adapters.judge.probes import LostDevice, Probe, probe
from paged_mla_shared.cases import CASES, Case
from paged_mla_shared.cases.case import Row
from paged_mla_shared.dims import DEEPSEEK_V3, MISTRAL_SMALL_4, SMALL, MlaDims
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Mask

_CASES = [case for cases in CASES.values() for case in cases]
HEADS = tuple(sorted({case.num_heads for case in _CASES if case.num_heads} | {4, 128}))
BLOCK_SIZES = tuple(sorted({case.block_size for case in _CASES}))
QUERY_LENS = (2, 3, 4, 5, 8, 16, 64, 128, 256, 1024)
DIMS = (DEEPSEEK_V3, MISTRAL_SMALL_4, SMALL)
_DIGITS = 2  # decimals of a distance: layouts that differ by rounding errors alone are equal
DECODE = (Row(5, 1), Row(40, 1), Row(128, 1), Row(19, 1))  # one row ends with its block
ALIKE = (Row(257, 1), *(Row(257, 1, shares_prefix_of=0) for _ in range(3)))
"""Rows that differ in one key of 257 if the block size divides 256. A function that reads the table
or the length of another row is nearly right for them, so its layouts can be found."""
_RIGHT = 0.5  # a distance below it is a right layout, which a bug may make inexact
ANYTHING = Served(
    dtypes=DTYPES,
    cache_formats=(*PLAIN_FORMAT_OF_DTYPE.values(), "fp8_e4m3"),
    masks=("causal", "non_causal"),
    num_heads=HEADS,
    block_sizes=BLOCK_SIZES,
    head_dims=tuple((dims.kv_lora_rank, dims.qk_rope_head_dim) for dims in DIMS),
    max_query_len=1 << 30,
    mixed=True,
)


class Ask(Protocol):
    """A function that makes a probe."""

    def __call__(
        self, key: str, claims: Claims, case: Case, dims: MlaDims, dtype: str, *, measured: bool
    ) -> Probe:
        """Call the judged function. See :func:`probes.probe`.

        `key` identifies the call, and `measured` requests the distance from the exact output.
        """


NOT_CALLABLE, LOST = 4, 3
"""Exit statuses: no call returned a result; a call lost the device, so a new process continues."""
TIMED_OUT = "Timeout ("
"""The start of the text that a process prints before it ends because a call did not return."""


class NotCallable(Exception):
    """No call of the function returned a result; the text has the first errors."""


def find(claims: Claims, ask: Ask) -> Claims:
    """Return the claims, completed by layouts and by all values that the function supports.

    Claims that have all values already get only layouts and the base of the lse. Claims of a merge
    get these too. Without a probe they also get the values of :data:`ANYTHING`, except for the
    products and the fields of :data:`NARROWING` that have values.

    Parameters
    ----------
    claims : Claims
        Claims with target, kind, device and roles.
    ask : Ask
        Makes each probe.

    Raises
    ------
    NotCallable
        Every call raised, or there is no call to try; the text has the first five errors.
    LostDevice
        `ask` raised it.
    """
    is_known = claims.served.is_whole  # a solution's definition fixes all values
    free = claims if is_known else replace(claims, served=_asked(claims))
    causes: dict[str, str] = {}
    for case, dims, dtype in beginnings(free):
        found = []
        for candidate in _candidates(free):
            what = f"{dtype}, {_dims_name(dims)}, {case.num_heads} heads, blocks of "
            what += f"{case.block_size}, queries {candidate.query}, cache {candidate.cache}"
            what += f", lse {candidate.lse_layout}"
            probed = ask(f"begin: {what}", candidate, case, dims, dtype, measured=True)
            if probed.why_not:
                causes.setdefault(probed.why_not, what)
            else:
                found.append((candidate, probed))
        if found:
            if claims.kind == "attend" and min(p.error for _, p in found) > _RIGHT:
                alike = replace(case, rows=ALIKE)
                found += [
                    (c, ask(f"alike: {c.query}, {c.cache}", c, alike, dims, dtype, measured=True))
                    for c, _ in found
                ]
            chosen, probed = min(found, key=lambda entry: round(entry[1].error, _DIGITS))
            if claims.kind == "merge" or is_known:
                return _answered(chosen, probed)
            return _served(_answered(chosen, probed), case, dims, dtype, ask)
    if not causes:
        raise NotCallable(_no_call(free.served))
    lines = [f"{what}: {why}" for why, what in itertools.islice(causes.items(), 5)]
    raise NotCallable("\n".join(lines))


def _no_call(served: Served) -> str:
    """Return the error for values of which no step of the suite can be made."""
    dims = ", ".join(_dims_name(each) for each in DIMS)
    return (
        f"no step has head_dims {served.head_dims} and dtypes {served.dtypes}; allowed: at least "
        f"one of the head_dims {dims} and one of the dtypes {', '.join(DTYPES)}"
    )


def beginnings(claims: Claims) -> Iterator[tuple[Case, MlaDims, str]]:
    """Yield case, dims and dtype of first calls, the most likely to be supported first."""
    on_gpu, served = claims.device == "cuda", claims.served
    dims: tuple[MlaDims, ...] = DIMS if on_gpu else DIMS[::-1]
    dtypes = DTYPES if on_gpu else DTYPES[::-1]
    sizes = block_sizes(claims, _those((64, 16, 1, 128), served.block_sizes))
    heads_first = _those((16, 128, 4, 8, 64), served.num_heads)
    for size, heads, at, dtype in itertools.product(sizes, heads_first, dims, dtypes):
        if (at.kv_lora_rank, at.qk_rope_head_dim) in served.head_dims and dtype in served.dtypes:
            is_plain = PLAIN_FORMAT_OF_DTYPE[dtype] in served.cache_formats
            cached = None if is_plain else served.cache_formats[0]
            yield _case(num_heads=heads, block_size=size, cache_format=cached), at, dtype


def _those(likely: tuple[int, ...], served: tuple[int, ...]) -> tuple[int, ...]:
    """Return the likely numbers that are among `served`, or `served` if there are none."""
    return tuple(number for number in likely if number in served) or served


def block_sizes(claims: Claims, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return `sizes`, or only 1 if a call has neither lengths nor a block size.

    If a call passes no lengths, each entry of ``kv_indices`` is the slot of one key. A function
    without a parameter for the block size can then only read blocks of one token.
    """
    knows = claims.knows_lengths or "block_size" in claims.roles.values()
    return sizes if knows else (1,)


def _candidates(claims: Claims) -> Iterator[Claims]:
    """Yield the claims with each possible layout of queries, caches and outputs."""
    if claims.like:
        yield claims
        return
    if claims.kind == "csr":
        yield from (replace(claims, cache=layout) for layout in csr.LAYOUTS)
        return
    if claims.kind == "merge":
        yield from (replace(claims, lse_layout=layout) for layout in ("[T, H]", "[H, T]"))
        return
    queries = QUERY_LAYOUTS if claims.kind == "attend" else QUERY_LAYOUTS[:1]
    for query, cache in itertools.product(queries, CACHE_LAYOUTS):
        out = "[B, Q, H]" if query == QUERY_LAYOUTS[1] else "[T, H]"
        yield replace(claims, query=query, cache=cache, out=out, lse_layout=out)


def _answered(claims: Claims, probed: Probe) -> Claims:
    """Return the claims with the layouts of the outputs and the base of the lse."""
    if claims.kind == "append":
        return claims
    if not probed.lse_errors:
        return replace(claims, lse="none", out=probed.layouts[0])
    base = min(probed.lse_errors, key=lambda name: probed.lse_errors[name])
    out, lse = probed.layouts
    return replace(claims, lse=base, out=out, lse_layout=lse)


def _served(claims: Claims, case: Case, dims: MlaDims, dtype: str, ask: Ask) -> Claims:
    """Return the claims with all supported values, found by changing one value of a call."""

    def works(what: str, changed: Case, at: MlaDims = dims, kind: str = dtype) -> bool:
        return not ask(what, claims, changed, at, kind, measured=False).why_not

    def those(what: str, values: Iterable[Any], make: Callable[[Any], dict[str, Any]]) -> list[Any]:
        return [v for v in values if works(f"{what} {v}", replace(case, **make(v)))]

    asked = claims.served
    dtypes = [d for d in asked.dtypes if works(f"dtype {d}", case, kind=d)]
    plain = [PLAIN_FORMAT_OF_DTYPE[name] for name in dtypes]
    formats = [name for name in plain if name in asked.cache_formats]
    roles = {*claims.roles.values(), *(LIKE[claims.like].roles if claims.like else ())}
    scaled = bool(roles & {"k_scale", "k_descale"}) and "fp8_e4m3" in asked.cache_formats
    if scaled and works("cache_format fp8_e4m3", replace(case, cache_format="fp8_e4m3")):
        formats.append("fp8_e4m3")
    lens = [
        length
        for length in QUERY_LENS
        if _knows_query_lens(claims, roles)
        and works(f"query length {length}", _of_queries(case, length, length))
    ]
    longest = max(itertools.takewhile(lambda n: n in lens, QUERY_LENS), default=1)
    masks = ["causal"]
    if "causal" in roles and works("mask non_causal", replace(case, mask=Mask.NON_CAUSAL)):
        masks.append("non_causal")
    mixed = claims.kind in {"append", "csr"} or "cu_seqlens_q" in roles
    mixed = mixed and longest > 1 and works("mixed query lengths", _of_queries(case, 1, 3))
    sizes = block_sizes(claims, asked.block_sizes)
    served = Served(
        dtypes=tuple(dtypes),
        cache_formats=tuple(formats),
        masks=tuple(masks),
        num_heads=tuple(those("num_heads", asked.num_heads, lambda n: {"num_heads": n})),
        block_sizes=tuple(those("block_size", sizes, lambda n: {"block_size": n})),
        head_dims=tuple(
            (sizes.kv_lora_rank, sizes.qk_rope_head_dim)
            for sizes in DIMS
            if (sizes.kv_lora_rank, sizes.qk_rope_head_dim) in asked.head_dims
            and works(f"dims {_dims_name(sizes)}", case, at=sizes)
        ),
        max_query_len=1 << 20 if longest == QUERY_LENS[-1] else longest,
        mixed=mixed,
        padding=works("a row without keys", replace(case, rows=(*DECODE, Row(0, 1)))),
        strided_cache=works(
            "a cache with gaps between tokens", replace(case, token_padding=64, block_padding=128)
        ),
        products=asked.products,
    )
    return replace(claims, served=served)


def _asked(claims: Claims) -> Served:
    """Return the values to probe.

    Values that the claims or the known signature fix are not extended: a kernel without checks may
    accept other values and then read or write outside its memory.
    """
    said = {name: getattr(claims.served, name) for name in NARROWING}
    known = {name: value for name, value in said.items() if value}
    if claims.like:
        known = {"dtypes": LIKE[claims.like].dtypes} | known
    return replace(ANYTHING, products=claims.served.products, **known)


def _knows_query_lens(claims: Claims, roles: set[str]) -> bool:
    """Return whether rows of a call can have several tokens.

    A call that appends or passes CSR indices has separate entries for each token. Another call
    passes lengths of queries, or its queries have an axis for them.
    """
    if claims.kind in {"append", "csr"}:
        return True
    said = {"cu_seqlens_q", "query_lens", "max_query_len"} & roles
    return bool(said) or claims.query == QUERY_LAYOUTS[1]


def _case(**fields: Any) -> Case:
    given = {"rows": DECODE, "table_width": 0, **fields}
    return Case(group="decode", name="probe", why="a call", rules=("S-5",), **given)


def _of_queries(case: Case, first: int, other: int) -> Case:
    """Return the case with rows of `first` and of `other` query tokens."""
    return replace(case, rows=(Row(first + 4, first), Row(other + 39, other), Row(first, first)))


def _dims_name(dims: MlaDims) -> str:
    return f"({dims.kv_lora_rank}, {dims.qk_rope_head_dim})"


class Recorded:
    """A function that makes probes and records them.

    After a process has ended in a probe, a new process continues with the next probe.

    Parameters
    ----------
    path : Path
        A file with lines of JSON. One line has the key of a probe before its call, and another line
        has the key and the probe after the call.
    seconds : float
        The time limit of a call. After it the process prints its stack and ends.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._known: dict[str, Probe] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            # A probe that ended its process counts as supported: a test then finds the fault.
            found = line["probe"] or {"layouts": ["[T, H]", "[T, H]"], "lse_errors": {"natural": 1}}
            self._known[line["key"]] = Probe(**found)

    def __call__(
        self, key: str, claims: Claims, case: Case, dims: MlaDims, dtype: str, *, measured: bool
    ) -> Probe:
        """Return the recorded probe of a key, or call the function and record the probe."""
        if key not in self._known:
            self._note(key, None)
            faulthandler.dump_traceback_later(self._seconds, exit=True)
            try:
                self._known[key] = probe(claims, case, dims, dtype, measured=measured)
            finally:
                faulthandler.cancel_dump_traceback_later()
            self._note(key, asdict(self._known[key]))
        return self._known[key]

    def _note(self, key: str, found: dict[str, Any] | None) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "probe": found}) + "\n")


def last_call(path: Path) -> str:
    """Return the key of the last probe in the file of a :class:`Recorded`."""
    return str(json.loads(path.read_text().splitlines()[-1])["key"])


def main() -> int:
    """Complete a claims file by probing: ``python -m ...probing CLAIMS PROGRESS SECONDS``.

    Returns
    -------
    int
        0, ``NOT_CALLABLE`` or ``LOST``.
    """
    path, progress, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    try:
        write(find(read(path), Recorded(progress, seconds)), path)
    except NotCallable as error:
        sys.stderr.write(f"{error}\n")
        return NOT_CALLABLE
    except LostDevice as error:
        sys.stderr.write(f"{error}\n")
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
