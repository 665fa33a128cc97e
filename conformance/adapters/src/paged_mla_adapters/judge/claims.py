"""The claims file: a TOML file that describes how a function is called and what it supports.

Probing writes the file once. Later runs read it and test the function against it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_mla_adapters.judge.roles import ALIASES
from paged_mla_shared.backend import PRODUCTS, Capabilities
from paged_mla_shared.documents import read_toml, take_version
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build

VERSION = 1
FACTORY = "paged_mla_adapters.judge.backend:create"
_NONE = "given_none"  # the key of parameters whose value is None, which TOML cannot express

DTYPES = ("bfloat16", "float16", "float32")
QUERY_LAYOUTS = ("[T, H, D]", "[B, Q, H, D]")
CACHE_LAYOUTS = (
    "[blocks, size, D]",
    "[blocks, size, 1, D]",
    "[slots, D]",
    "[slots, 1, D]",
    "[blocks, 1, size, D]",
)
OUT_LAYOUTS = ("[T, H]", "[H, T]", "[B, Q, H]", "[B, H, Q]")  # outputs have a last axis R as well
LSES = ("natural", "base 2", "none")


NARROWING = ("dtypes", "cache_formats", "num_heads", "block_sizes", "head_dims")
"""Fields for which probing tries many values, or only the claims' values if there are any."""


@dataclass(frozen=True)
class Served:
    """The values that a function accepts without an error.

    Parameters
    ----------
    dtypes, cache_formats, masks : tuple of str
    num_heads, block_sizes : tuple of int
    head_dims : tuple of (int, int)
        Pairs of ``kv_lora_rank`` (R) and ``qk_rope_head_dim`` (P).
    max_query_len : int
        The largest number of query tokens of a row.
    mixed : bool
        Whether the rows of one call may have different numbers of query tokens.
    padding : bool
        Whether a step may contain rows without keys.
    strided_cache : bool
        Whether the cache may have gaps between its tokens and its blocks.
    products : {"exact", "fast"}
        "fast" if the function may round queries and weights to 8 bits when the cache has 8 bits.
    """

    dtypes: tuple[str, ...] = ()
    cache_formats: tuple[str, ...] = ()
    masks: tuple[str, ...] = ("causal",)
    num_heads: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    head_dims: tuple[tuple[int, int], ...] = ()
    max_query_len: int = 1
    mixed: bool = False
    padding: bool = True
    strided_cache: bool = True
    products: str = "exact"

    @property
    def is_whole(self) -> bool:
        """Whether every field of :data:`NARROWING` has values, so that probing can skip them."""
        return all(getattr(self, name) for name in NARROWING)

    def with_these(self, values: Mapping[str, Any]) -> Served:
        """Return a copy in which the user's values replace some fields.

        Parameters
        ----------
        values : dict of str to Any
            Values by the name of the field. Where the field is a tuple, a value that is no tuple
            becomes its only element.

        Raises
        ------
        InvalidArgument
            A field does not exist, a value has a wrong type, or a number is less than 1.
        """
        fields = asdict(self)
        many = {name for name, value in fields.items() if isinstance(value, tuple)}
        for name, value in values.items():
            fields[name] = [value] if name in many and not isinstance(value, tuple) else value
        made: Served = build(Served, json.loads(json.dumps(fields)), "--served")
        made.check("--served ")
        return made

    def check(self, where: str) -> None:
        """Check that all sizes are at least 1; `where` precedes a field's name in an error.

        Raises
        ------
        InvalidArgument
            A number is less than 1.
        """
        dims = tuple(number for pair in self.head_dims for number in pair)
        numbers = {name: getattr(self, name) for name in ("num_heads", "block_sizes")}
        numbers |= {"head_dims": dims, "max_query_len": (self.max_query_len,)}
        for name, found in numbers.items():
            if min(found, default=1) < 1:
                raise InvalidArgument(f"{where}{name}", min(found), "numbers >= 1")


@dataclass(frozen=True)
class Claims:
    """A description of a function: how it is called, and what it supports.

    Parameters
    ----------
    target : str
        ``module:function``, ``file.py:function`` or a solution ``file.json``. The name may be that
        of a class with the methods ``plan`` and ``run``.
    kind : {"attend", "append", "merge", "csr"}
        The operation: attention, a write to the cache, a merge of two partial results, or the
        conversion of a block table to page lists.
    device : {"cuda", "cpu"}
    like : str
        The name of the function's known signature in
        :data:`~paged_mla_adapters.judge.like.LIKE`. With "", the names of the parameters determine
        their roles.
    profile : str
        The profiles of the suite, separated by commas.
    roles : dict of str to str
        The role of each parameter, by the parameter's name.
    given : dict of str to Any
        Values of parameters without a role, by the parameter's name.
    query : str
        The layout of the queries, one of :data:`QUERY_LAYOUTS`.
    cache : str
        The layout of the cache, one of :data:`CACHE_LAYOUTS`.
    out, lse_layout : str
        The layouts of output and lse, each one of :data:`OUT_LAYOUTS`.
    lse : str
        The base of the lse, one of :data:`LSES`; "none" if the function returns no lse.
    softmax_scale : float or None
        The fixed scale of a function that has no parameter for the scale; otherwise ``None``.
    served : Served

    Raises
    ------
    InvalidArgument
        `kind`, `device`, `lse`, a layout, the products or a role have a word that is not allowed.
    """

    target: str
    kind: str = "attend"
    device: str = "cpu"
    like: str = ""
    profile: str = "kernel"
    roles: dict[str, str] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    query: str = QUERY_LAYOUTS[0]
    cache: str = CACHE_LAYOUTS[0]
    out: str = OUT_LAYOUTS[0]
    lse_layout: str = OUT_LAYOUTS[0]
    lse: str = "natural"
    softmax_scale: float | None = None
    served: Served = field(default_factory=Served)

    def __post_init__(self) -> None:
        """Check the sizes, and the fields that allow only certain words."""
        self.served.check("served.")
        words = {
            "kind": ("attend", "append", "merge", "csr"),
            "device": ("cuda", "cpu"),
            "query": QUERY_LAYOUTS,
            "cache": CACHE_LAYOUTS,
            "out": OUT_LAYOUTS,
            "lse_layout": OUT_LAYOUTS,
            "lse": LSES,
        }
        found = {name: getattr(self, name) for name in words} | {"products": self.served.products}
        for name, allowed in {**words, "products": PRODUCTS}.items():
            if found[name] not in allowed:
                raise InvalidArgument(name, repr(found[name]), ", ".join(allowed))
        for name, role in self.roles.items():
            if role not in ALIASES:
                raise InvalidArgument(f"roles.{name}", repr(role), ", ".join(ALIASES))

    @property
    def knows_lengths(self) -> bool:
        """Whether a call passes the number of keys of each row, not only its number of pages.

        It is true for functions that append or merge, whose calls have no rows.
        """
        said = {"seq_lens", "prefix_lens", "kv_last_page_len"} & set(self.roles.values())
        known = bool(self.like) and not self.roles
        return bool(said) or known or self.kind in {"append", "merge"}

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that the suite tests."""
        served = self.served
        features = {"replay", "explicit_slots"}
        features |= {
            name for name in ("mixed", "padding", "strided_cache") if getattr(served, name)
        }
        if self.device == "cuda":
            features.add("large_offsets")
        ops = {"append": {"plan", "append"}, "merge": {"merge"}}
        return Capabilities(
            ops=frozenset(ops.get(self.kind, {"plan", "append", "attend"})),
            dtypes=frozenset(served.dtypes),
            cache_formats=frozenset(served.cache_formats),
            block_sizes=frozenset(served.block_sizes),
            num_heads=frozenset(served.num_heads),
            head_dims=frozenset(served.head_dims),
            masks=frozenset(served.masks),
            features=frozenset(features),
            max_query_len=served.max_query_len,
            products=served.products,
            softmax_scale=self.softmax_scale,
        )


def write(claims: Claims, path: Path) -> None:
    """Write claims as a TOML file that ``paged-mla conformance --backend`` accepts.

    Missing folders of the path are created, and a file that exists is replaced.
    """
    document = asdict(claims)
    lines = [
        "# Probing found these values. The suite tests whether they hold. Edit wrong values.",
        f"version = {VERSION}",
        f"factory = {json.dumps(FACTORY)}",
    ]
    tables = {name: document.pop(name) for name in ("roles", "given", "served")}
    if unset := [name for name, value in claims.given.items() if value is None]:
        document[_NONE] = unset
    lines += _lines(document.items())
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_lines(table.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]))


def _lines(items: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a line of TOML, with the value as JSON, for each item that is not ``None``."""
    return [f"{_key(name)} = {_value(value)}" for name, value in items if value is not None]


def _key(name: str) -> str:
    return name if name.isascii() else _value(name)


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML does not allow JSON's escapes of emojis


def can_be_written(value: Any) -> bool:
    """Return whether a claims file can contain a value."""
    try:
        tomllib.loads(f"value = {_value(value)}")
    except (TypeError, ValueError):
        return value is None
    return True


def read(path: Path) -> Claims:
    """Return the claims of a file.

    Raises
    ------
    InvalidArgument
        The file cannot be read, has another version, or has a field or a value that
        :class:`Claims` does not allow.
    """
    document = read_toml(path)
    take_version(document, "version", VERSION, str(path))
    document.pop("factory", None)
    unset = build(tuple[str, ...], document.pop(_NONE, []), f"{path}: {_NONE}")
    claims: Claims = build(Claims, document, str(path))
    claims.given.update(dict.fromkeys(unset))
    return claims
