"""A dump: the inputs and the results of one step of an implementation, as a file.

``shared/docs/dump.md`` documents the use of each field. A dump is a file of
:mod:`paged_mla_shared.safetensors`. Its texts are ``paged_mla_dump`` (the version), ``problem``
(the fields of a :class:`~paged_mla_shared.problem.Problem` as JSON) and, optionally, ``origin``,
``lse_base``, ``products`` and ``views``.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.backend import PRODUCTS
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.documents import parse_object
from paged_mla_shared.dtypes import NUMPY_DTYPES, dtype_name
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import check_format
from paged_mla_shared.problem import Mask, MaskSpelling, Problem
from paged_mla_shared.safetensors import read_tensors, write_tensors
from paged_mla_shared.strides import is_spread, laid_out, memory_of
from paged_mla_shared.typed import build

VERSIONS = ("1", "2", "3")
"""Versions of the format; a file gets the earliest version that has all its fields and texts."""
LSE_BASES = ("e", "2")

_VERSION_KEY = "paged_mla_dump"
Shape = tuple[str | int, ...]  # lengths of axes; a letter if the problem does not fix a length


@dataclass(frozen=True)
class Field:
    """A tensor that a dump may contain.

    Parameters
    ----------
    what : str
        A description of the tensor.
    axes : callable
        Takes a problem and returns the tensor's axes; ``None`` if the tensor is not allowed with
        this problem.
    dtype : callable
        Takes a problem and returns the name of the tensor's element type.
    since : str
        The first version of the format that has the tensor.
    """

    what: str
    axes: Callable[[Problem], Shape | None]
    dtype: Callable[[Problem], str]
    since: str = VERSIONS[0]

    def shape(self, problem: Problem) -> Shape | None:
        """Return the axes; ``None`` if the tensor is not allowed with this problem."""
        return self.axes(problem)

    def numpy_dtype(self, problem: Problem) -> np.dtype[Any]:
        """Return the element type."""
        name = self.dtype(problem)
        return NUMPY_DTYPES.get(name) or np.dtype(name)


def _fixed(what: str, dtype: str, *axes: str | int) -> Field:
    """Return a field with the same type and axes for every problem."""
    return Field(what, lambda _: axes, lambda _: dtype)


def _of_heads(what: str, *axes: str, dtype: str | None = None) -> Field:
    """Return a field whose axes are names of attributes of the dims, or letters."""

    def shape(problem: Problem) -> Shape:
        return tuple(getattr(problem.dims, axis, axis) for axis in axes)

    return Field(what, shape, lambda problem: dtype or problem.dtype)


def _cache(when: str) -> dict[str, Field]:
    """Return the fields of the cache "before" or "after" the append, by name."""

    def rows(problem: Problem) -> Shape:
        return "N", problem.block_size, problem.layout.format.row(problem.dims)[1]

    def scales(problem: Problem) -> Shape | None:
        groups = problem.layout.format.scales_per_block(problem.block_size)
        return ("N", groups) if groups else None

    return {
        f"cache_{when}": Field(
            f"the listed blocks {when} the append",
            rows,
            lambda problem: problem.layout.format.row(problem.dims)[0],
        ),
        f"scales_{when}": Field(
            f"scales of the listed blocks {when} the append, if the format has separate scales",
            scales,
            lambda _: "float32",
        ),
        f"bytes_{when}": Field(
            "instead of both: raw blocks with their gaps, each followed by its scales",
            lambda problem: ("N", problem.layout.block_bytes),
            lambda _: "uint8",
        ),
    }


def _lines(dims: MlaDims) -> int:
    """Return the number of lines of kv_b_proj."""
    return dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)


def _mask_shape(problem: Problem) -> Shape | None:
    if problem.mask is not Mask.TREE:
        return None
    return ("T", "W") if problem.mask_spelling is MaskSpelling.PACKED else ("X",)


def _mask_dtype(problem: Problem) -> str:
    return "uint8" if problem.mask_spelling is MaskSpelling.PACKED else "bool"


_QUERY = ("T", "num_heads")
_KEY = ("Tk", "num_heads")  # of a prefill
_PREFILL_QUERY = ("Tq", "num_heads")

_OF_VERSION_2 = {
    "query_scale": _fixed("scale by which all queries are divided", "float32"),
    "query_codes": Field(
        "queries as e4m3 codes",
        lambda problem: ("T", problem.dims.num_heads, problem.dims.cached_dim),
        lambda _: "uint8",
    ),
    "query_scales": _of_heads("scales by which the codes are multiplied", *_QUERY, dtype="float32"),
    "prefill_cu_seqlens_q": _fixed("prefix sums of a prefill's queries", "int32", "Bp+1"),
    "prefill_cu_seqlens_k": _fixed("prefix sums of a prefill's keys", "int32", "Bp+1"),
    "prefill_causal": _fixed("whether a prefill is causal", "bool"),
    "prefill_q_nope": _of_heads("queries of a prefill", *_PREFILL_QUERY, "qk_nope_head_dim"),
    "prefill_q_pe": _of_heads("their rotated part", *_PREFILL_QUERY, "qk_rope_head_dim"),
    "prefill_k_nope": _of_heads("keys of a prefill", *_KEY, "qk_nope_head_dim"),
    "prefill_k_pe": _of_heads("rotated keys of a prefill", "Tk", "qk_rope_head_dim"),
    "prefill_v": _of_heads("values of a prefill", *_KEY, "v_head_dim"),
    "prefill_out": _of_heads("output of a prefill", *_PREFILL_QUERY, "v_head_dim"),
    "prefill_lse": _of_heads("lse of a prefill", *_PREFILL_QUERY, dtype="float32"),
}

_OF_VERSION_3 = {
    "ckv_left": _of_heads("latents of the step after the append", "T", "kv_lora_rank"),
    "k_pe_left": _of_heads("keys of the step after the append", "T", "qk_rope_head_dim"),
    "layer_q_nope": _of_heads("queries of a layer, not absorbed", *_QUERY, "qk_nope_head_dim"),
    "kv_b_proj": Field(
        "weights of a layer from latents to keys and values, head by head",
        lambda problem: (_lines(problem.dims), problem.dims.kv_lora_rank),
        lambda problem: problem.dtype,
    ),
    "absorbed_rows": _fixed("number of leading rows with absorbed attention", "int32"),
    "workspace": _fixed("number of keys materialized at a time", "int64"),
    "layer_out": _of_heads("output of a layer", *_QUERY, "v_head_dim"),
    "layer_lse": _of_heads("lse of a layer", *_QUERY, dtype="float32"),
}

FIELDS: dict[str, Field] = {
    "cu_seqlens_q": _fixed("prefix sums of query lengths", "int32", "B+1"),
    "seq_lens": _fixed("tokens of each row, including this step's", "int32", "B"),
    "block_table": _fixed("block ids of each row", "int32", "B", "M"),
    "mask": Field("draft trees, in the problem's mask_spelling", _mask_shape, _mask_dtype),
    "slot_mapping": _fixed("slots that the append was to write; -1 for none", "int64", "T"),
    "q_nope": _of_heads("absorbed queries", *_QUERY, "kv_lora_rank"),
    "q_pe": _of_heads("rotated part of the queries", *_QUERY, "qk_rope_head_dim"),
    "ckv": _of_heads("latents of the step", "T", "kv_lora_rank"),
    "k_pe": _of_heads("rotated keys of the step", "T", "qk_rope_head_dim"),
    "block_ids": _fixed("the blocks that the dump lists, each once", "int64", "N"),
    **_cache("before"),
    **_cache("after"),
    "unlisted": _fixed("bytes that fill all blocks that are not listed", "uint8", "P"),
    "positions": _fixed("positions that the implementation derived", "int64", "T"),
    "slots": _fixed("slots that the implementation derived; -1 for none", "int64", "T"),
    "out": _of_heads("the output", *_QUERY, "kv_lora_rank"),
    "lse": _of_heads("log of the sum of exponentials", *_QUERY, dtype="float32"),
    "partial_out": _of_heads(
        "partial results over parts of the keys", "S", *_QUERY, "kv_lora_rank", dtype="float32"
    ),
    "partial_lse": _of_heads("lse of the partial results", "S", *_QUERY, dtype="float32"),
    "gathered_ckv": _of_heads("cached latents, row after row", "K", "kv_lora_rank"),
    "gathered_k_pe": _of_heads("cached keys, row after row", "K", "qk_rope_head_dim"),
    **{name: replace(each, since="2") for name, each in _OF_VERSION_2.items()},
    **{name: replace(each, since="3") for name, each in _OF_VERSION_3.items()},
}


@dataclass(frozen=True)
class _View:
    """The shape and the strides, in elements, of a tensor whose memory is written."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> _View:
        return cls(array.shape, tuple(stride // array.itemsize for stride in array.strides))


@dataclass(frozen=True, kw_only=True)
class Dump:
    """The recorded data of one step.

    Parameters
    ----------
    problem : Problem
    arrays : mapping of str to array
        Tensors by the names of :data:`FIELDS`; each is optional.
    origin : str
        A description of the dump's origin by its writer.
    lse_base : {"e", "2"}
        The base of the logarithm of every lse.
    products : {"exact", "fast"}
        As in :class:`~paged_mla_shared.backend.Capabilities`.
    """

    problem: Problem
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    origin: str = ""
    lse_base: str = "e"
    products: str = "exact"

    def check(self) -> None:
        """Check the words of the dump, and compare every tensor with its field.

        Raises
        ------
        InvalidArgument
            The base, the products, the cache format, the dtype or the name of a tensor is unknown,
            a tensor has another type or shape, or two tensors have different lengths of the same
            axis.
        """
        _one_of("lse_base", self.lse_base, LSE_BASES)
        _one_of("products", self.products, PRODUCTS)
        check_format(self.problem.cache_format)
        if self.problem.dtype not in NUMPY_DTYPES:
            allowed = f"one of {', '.join(NUMPY_DTYPES)}"
            raise InvalidArgument("problem.dtype", repr(self.problem.dtype), allowed)
        sizes: dict[str, tuple[str, int]] = {}
        for name, array in self.arrays.items():
            self._check_array(name, array, sizes)

    def _check_array(
        self, name: str, array: NDArray[Any], sizes: dict[str, tuple[str, int]]
    ) -> None:
        if name not in FIELDS:
            raise InvalidArgument(repr(name), "an unknown field", ", ".join(FIELDS))
        shape = FIELDS[name].shape(self.problem)
        if shape is None:
            given = f"a tensor, with {self.problem.cache_format} and mask {self.problem.mask}"
            raise InvalidArgument(name, given, "no tensor")
        dtype = FIELDS[name].numpy_dtype(self.problem)
        if array.dtype != dtype:
            raise InvalidArgument(name, f"dtype {dtype_name(array.dtype)}", dtype_name(dtype))
        written = f"[{', '.join(map(str, shape))}]"
        if array.ndim != len(shape):
            raise InvalidArgument(name, f"{array.ndim} axes", written)
        for axis, size in zip(shape, array.shape, strict=True):
            if isinstance(axis, int):
                if size != axis:
                    raise InvalidArgument(name, f"shape {array.shape}", written)
                continue
            letter, less = axis.removesuffix("+1"), int(axis.endswith("+1"))
            if size < less:
                raise InvalidArgument(name, "an empty axis", written)
            known, value = sizes.setdefault(letter, (name, size - less))
            if value != size - less:
                allowed = f"{value}, as in {known}"
                raise InvalidArgument(name, f"{letter} = {size - less}", allowed)


def save_dump(dump: Dump, path: Path) -> None:
    """Write a dump; arrays that are views are written with the memory between their elements.

    Raises
    ------
    InvalidArgument
        As :meth:`Dump.check`.
    """
    dump.check()
    version = max((FIELDS[name].since for name in dump.arrays), default=VERSIONS[0])
    texts = {_VERSION_KEY: version, "problem": json.dumps(asdict(dump.problem))}
    texts |= {"origin": dump.origin, "lse_base": dump.lse_base, "products": dump.products}
    arrays = dict(dump.arrays)
    if spread := {name: array for name, array in arrays.items() if is_spread(array)}:
        arrays |= {name: memory_of(array) for name, array in spread.items()}
        texts["views"] = json.dumps({name: asdict(_View.of(x)) for name, x in spread.items()})
        texts[_VERSION_KEY] = VERSIONS[-1]
    write_tensors(path, arrays, texts)


def load_dump(path: Path) -> Dump:
    """Read a dump.

    Raises
    ------
    InvalidArgument
        The file is not a dump of a known version, or is damaged (:meth:`Dump.check`).
    """
    arrays, texts = read_tensors(path)
    version = texts.pop(_VERSION_KEY, "")
    if version not in VERSIONS:
        allowed = " or ".join(map(repr, VERSIONS))
        raise InvalidArgument(f"{path}: {_VERSION_KEY}", reprlib.repr(version), allowed)
    if "problem" not in texts:
        raise InvalidArgument(f"{path}: problem", "no text", "a text; it is required")
    where = f"{path}: problem"
    problem = build(Problem, parse_object(texts.pop("problem"), where), where)
    views = parse_object(texts.pop("views", "{}"), f"{path}: views")
    for name, view in build(dict[str, _View], views, f"{path}: views").items():
        if name not in arrays or version != VERSIONS[-1]:
            allowed = f"the name of a tensor of the file, in a file of version {VERSIONS[-1]}"
            raise InvalidArgument(f"{path}: views", reprlib.repr(name), allowed)
        arrays[name] = laid_out(f"{path}: {name}", arrays[name], view.shape, view.strides)
    if unknown := texts.keys() - {"origin", "lse_base", "products"}:
        allowed = "origin, lse_base, products, views"
        raise InvalidArgument(f"{path}: {min(unknown)!r}", "a text", allowed)
    dump = Dump(problem=problem, arrays=arrays, **texts)
    try:
        dump.check()
    except InvalidArgument as error:
        raise error.inside(str(path)) from None
    if later := [name for name in arrays if FIELDS[name].since > version]:
        given = f"a tensor, in a file of version {version}"
        raise InvalidArgument(f"{path}: {later[0]}", given, f"version {FIELDS[later[0]].since}")
    return dump


def _one_of(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise InvalidArgument(name, repr(word[:30]), f"one of {', '.join(words)}")
