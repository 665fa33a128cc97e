"""A dump: what one step of an implementation was given, and what it made of it, as a file.

``shared/docs/dump.md`` says what each field decides. A file is one of
:mod:`paged_mla_shared.safetensors` whose texts are ``paged_mla_dump`` (the version), ``problem``
(the fields of a :class:`~paged_mla_shared.problem.Problem` as JSON) and, where they are not the
default, ``origin``, ``lse_base``, ``products`` and ``views``.
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
"""What files say; one is written as the earliest version that has its fields."""
LSE_BASES = ("e", "2")

_VERSION_KEY = "paged_mla_dump"
Shape = tuple[str | int, ...]  # axes by letter, where the problem does not fix them


@dataclass(frozen=True)
class Field:
    """One tensor that a dump may have.

    Parameters
    ----------
    what : str
    axes : callable
        Returns its axes for a problem; ``None`` where such a problem has no such tensor.
    dtype : callable
        Returns its element type for a problem, by name.
    since : str
        The version of the format that brought it.
    """

    what: str
    axes: Callable[[Problem], Shape | None]
    dtype: Callable[[Problem], str]
    since: str = VERSIONS[0]

    def shape(self, problem: Problem) -> Shape | None:
        """Return its axes; ``None`` where such a problem has no such tensor."""
        return self.axes(problem)

    def numpy_dtype(self, problem: Problem) -> np.dtype[Any]:
        """Return its element type."""
        name = self.dtype(problem)
        return NUMPY_DTYPES.get(name) or np.dtype(name)


def _fixed(what: str, dtype: str, *axes: str | int) -> Field:
    return Field(what, lambda _: axes, lambda _: dtype)


def _of_heads(what: str, *axes: str, dtype: str | None = None) -> Field:
    """Return a field whose last axes are attributes of the dims, or letters."""

    def shape(problem: Problem) -> Shape:
        return tuple(getattr(problem.dims, axis, axis) for axis in axes)

    return Field(what, shape, lambda problem: dtype or problem.dtype)


def _cache(when: str) -> dict[str, Field]:
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
            f"their scales {when} the append, where the format keeps some beside them",
            scales,
            lambda _: "float32",
        ),
        f"bytes_{when}": Field(
            "instead of both: raw blocks, gaps included, each with its scales behind it",
            lambda problem: ("N", problem.layout.block_bytes),
            lambda _: "uint8",
        ),
    }


def _lines(dims: MlaDims) -> int:
    """Return lines of kv_b_proj."""
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
    "query_scale": _fixed("what all queries were told to be divided by", "float32"),
    "query_codes": Field(
        "queries as e4m3 codes",
        lambda problem: ("T", problem.dims.num_heads, problem.dims.cached_dim),
        lambda _: "uint8",
    ),
    "query_scales": _of_heads("what codes are multiplied by", *_QUERY, dtype="float32"),
    "prefill_cu_seqlens_q": _fixed("prefix sums of a prefill's queries", "int32", "Bp+1"),
    "prefill_cu_seqlens_k": _fixed("prefix sums of its keys", "int32", "Bp+1"),
    "prefill_causal": _fixed("whether it is masked", "bool"),
    "prefill_q_nope": _of_heads("its queries", *_PREFILL_QUERY, "qk_nope_head_dim"),
    "prefill_q_pe": _of_heads("their rotated part", *_PREFILL_QUERY, "qk_rope_head_dim"),
    "prefill_k_nope": _of_heads("its keys", *_KEY, "qk_nope_head_dim"),
    "prefill_k_pe": _of_heads("their rotated part", "Tk", "qk_rope_head_dim"),
    "prefill_v": _of_heads("its values", *_KEY, "v_head_dim"),
    "prefill_out": _of_heads("its answer", *_PREFILL_QUERY, "v_head_dim"),
    "prefill_lse": _of_heads("its lse", *_PREFILL_QUERY, dtype="float32"),
}

_OF_VERSION_3 = {
    "ckv_left": _of_heads("latents of the step after the append", "T", "kv_lora_rank"),
    "k_pe_left": _of_heads("its keys after the append", "T", "qk_rope_head_dim"),
    "layer_q_nope": _of_heads("queries of a layer, not absorbed", *_QUERY, "qk_nope_head_dim"),
    "kv_b_proj": Field(
        "its weights between latents and heads, of keys and values head by head",
        lambda problem: (_lines(problem.dims), problem.dims.kv_lora_rank),
        lambda problem: problem.dtype,
    ),
    "absorbed_rows": _fixed("leading rows that are attended to absorbed", "int32"),
    "workspace": _fixed("keys that are materialized at a time", "int64"),
    "layer_out": _of_heads("its answer", *_QUERY, "v_head_dim"),
    "layer_lse": _of_heads("its lse", *_QUERY, dtype="float32"),
}

FIELDS: dict[str, Field] = {
    "cu_seqlens_q": _fixed("prefix sums of query lengths", "int32", "B+1"),
    "seq_lens": _fixed("tokens of each row, this step's included", "int32", "B"),
    "block_table": _fixed("block ids of each row", "int32", "B", "M"),
    "mask": Field("draft trees, in the problem's spelling", _mask_shape, _mask_dtype),
    "slot_mapping": _fixed("where the append was told to write; -1 for nowhere", "int64", "T"),
    "q_nope": _of_heads("absorbed queries", *_QUERY, "kv_lora_rank"),
    "q_pe": _of_heads("rotated part of the queries", *_QUERY, "qk_rope_head_dim"),
    "ckv": _of_heads("latents of the step", "T", "kv_lora_rank"),
    "k_pe": _of_heads("rotated keys of the step", "T", "qk_rope_head_dim"),
    "block_ids": _fixed("the blocks that the dump lists, each once", "int64", "N"),
    **_cache("before"),
    **_cache("after"),
    "unlisted": _fixed("bytes that all other blocks repeat", "uint8", "P"),
    "positions": _fixed("positions that the implementation derived", "int64", "T"),
    "slots": _fixed("slots that it derived, -1 for none", "int64", "T"),
    "out": _of_heads("the answer", *_QUERY, "kv_lora_rank"),
    "lse": _of_heads("its log of the sum of exponentials", *_QUERY, dtype="float32"),
    "partial_out": _of_heads(
        "answers over parts of the keys", "S", *_QUERY, "kv_lora_rank", dtype="float32"
    ),
    "partial_lse": _of_heads("lse of the parts", "S", *_QUERY, dtype="float32"),
    "gathered_ckv": _of_heads("cached latents, row after row", "K", "kv_lora_rank"),
    "gathered_k_pe": _of_heads("cached keys, row after row", "K", "qk_rope_head_dim"),
    **{name: replace(each, since="2") for name, each in _OF_VERSION_2.items()},
    **{name: replace(each, since="3") for name, each in _OF_VERSION_3.items()},
}


@dataclass(frozen=True)
class _View:
    """How a tensor that is written as its memory lies there; strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> _View:
        return cls(array.shape, tuple(stride // array.itemsize for stride in array.strides))


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What is known of one step.

    Parameters
    ----------
    problem : Problem
    arrays : mapping of str to array
        Tensors by the names of :data:`FIELDS`, each of them optional.
    origin : str
        Where it is from, in the words of who wrote it.
    lse_base : {"e", "2"}
        Base of the logarithm that every lse is meant to be in.
    products : {"exact", "fast"}
        As a backend declares them (:class:`~paged_mla_shared.backend.Capabilities`).
    """

    problem: Problem
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    origin: str = ""
    lse_base: str = "e"
    products: str = "exact"

    def check(self) -> None:
        """Hold every tensor against its field.

        Raises
        ------
        InvalidArgument
            One is of another type or shape, or two do not agree on an axis.
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
            raise InvalidArgument(repr(name), "no field of a dump", ", ".join(FIELDS))
        shape = FIELDS[name].shape(self.problem)
        if shape is None:
            given = f"a tensor, with {self.problem.cache_format} and mask {self.problem.mask}"
            raise InvalidArgument(name, given, "none")
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
                raise InvalidArgument(name, "no entry", written)
            known, value = sizes.setdefault(letter, (name, size - less))
            if value != size - less:
                allowed = f"{value}, as {known} has it"
                raise InvalidArgument(name, f"{letter} = {size - less}", allowed)


def save_dump(dump: Dump, path: Path) -> None:
    """Write a dump, arrays that are views with what lies between their elements.

    Raises
    ------
    InvalidArgument
        As of :meth:`Dump.check`.
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
        The file is no dump of this version, or damaged (:meth:`Dump.check`).
    """
    arrays, texts = read_tensors(path)
    version = texts.pop(_VERSION_KEY, "")
    if version not in VERSIONS:
        allowed = " or ".join(map(repr, VERSIONS))
        raise InvalidArgument(f"{path}: {_VERSION_KEY}", reprlib.repr(version), allowed)
    if "problem" not in texts:
        raise InvalidArgument(f"{path}: problem", "nothing", "a text: it is required")
    where = f"{path}: problem"
    problem = build(Problem, parse_object(texts.pop("problem"), where), where)
    views = parse_object(texts.pop("views", "{}"), f"{path}: views")
    for name, view in build(dict[str, _View], views, f"{path}: views").items():
        if name not in arrays or version != VERSIONS[-1]:
            allowed = f"of a tensor that there is, in a file of version {VERSIONS[-1]}"
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
