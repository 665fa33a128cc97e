"""What a kernel is said to take and to serve: a TOML file, written once and held to afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_mla_shared.backend import Capabilities
from paged_mla_shared.documents import read_toml, take_version
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build

VERSION = 1
FACTORY = "paged_mla_adapters.judge.backend:create"
_NONE = "given_none"  # names of parameters that get None, which TOML does not have

DTYPES = ("bfloat16", "float16", "float32")
QUERY_LAYOUTS = ("[T, H, D]", "[B, Q, H, D]")
CACHE_LAYOUTS = (
    "[blocks, size, D]",
    "[blocks, size, 1, D]",
    "[slots, D]",
    "[slots, 1, D]",
    "[blocks, 1, size, D]",
)
OUT_LAYOUTS = ("[T, H]", "[H, T]", "[B, Q, H]", "[B, H, Q]")  # and, of outputs, R behind them
LSES = ("natural", "base 2", "none")


NARROWING = ("dtypes", "cache_formats", "num_heads", "block_sizes", "head_dims")
"""What is found by asking for one value after the other, unless it is said before."""


@dataclass(frozen=True)
class Served:
    """What probing found that a function takes without an error.

    Parameters
    ----------
    dtypes, cache_formats, masks : tuple of str
    num_heads, block_sizes : tuple of int
    head_dims : tuple of (int, int)
        R and P.
    max_query_len : int
        The longest query of a row.
    mixed : bool
        Whether rows of one call may have queries of different lengths.
    padding : bool
        Whether a step may hold rows without keys.
    strided_cache : bool
        Whether tokens and blocks of the cache may lie apart.
    products : {"exact", "fast"}
        "fast" if queries and weights may be rounded to 8 bits over a cache of 8 bits.
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
        """Whether everything is said, so that nothing is left to find."""
        return all(getattr(self, name) for name in NARROWING)

    def with_these(self, values: Mapping[str, Any]) -> Served:
        """Return it with some fields as a user says them.

        Parameters
        ----------
        values : dict of str to Any
            By the field's name; one value stands for a tuple of it.

        Raises
        ------
        InvalidArgument
            There is no such field, or the value is of another type.
        """
        fields = asdict(self)
        many = {name for name, value in fields.items() if isinstance(value, tuple)}
        for name, value in values.items():
            fields[name] = [value] if name in many and not isinstance(value, tuple) else value
        made: Served = build(Served, json.loads(json.dumps(fields)), "--served")
        dims = tuple(number for pair in made.head_dims for number in pair)
        numbers = {name: getattr(made, name) for name in ("num_heads", "block_sizes")}
        numbers |= {"head_dims": dims, "max_query_len": (made.max_query_len,)}
        for name, found in numbers.items():
            if min(found, default=1) < 1:
                raise InvalidArgument(f"--served {name}", min(found), "numbers >= 1")
        return made


@dataclass(frozen=True)
class Claims:
    """A function, how it is called, and what it serves.

    Parameters
    ----------
    target : str
        ``module:function`` or ``file.py:function``; a class has ``plan`` and ``run``.
    kind : {"attend", "append", "merge", "csr"}
    device : {"cuda", "cpu"}
    like : str
        The known signature that it has, a name of
        :data:`~paged_mla_adapters.judge.like.LIKE`; "" finds roles by the parameters' names.
    profile : str
        The terms in which the suite judges it.
    roles : dict of str to str
        Role by parameter.
    given : dict of str to Any
        Values of other parameters.
    query, cache, out, lse_layout, lse : str
        One of :data:`QUERY_LAYOUTS`, :data:`CACHE_LAYOUTS`, :data:`OUT_LAYOUTS` twice, and
        :data:`LSES`.
    softmax_scale : float or None
        The scale of a function without a parameter for it; ``None`` if it has one.
    served : Served
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
        """Refuse words that have no meaning.

        Raises
        ------
        InvalidArgument
        """
        words = {
            "kind": ("attend", "append", "merge", "csr"),
            "device": ("cuda", "cpu"),
            "query": QUERY_LAYOUTS,
            "cache": CACHE_LAYOUTS,
            "out": OUT_LAYOUTS,
            "lse_layout": OUT_LAYOUTS,
            "lse": LSES,
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(name, repr(getattr(self, name)), ", ".join(allowed))

    @property
    def knows_lengths(self) -> bool:
        """Whether a call says how many keys a row has, and not how many pages alone."""
        said = {"seq_lens", "prefix_lens", "kv_last_page_len"} & set(self.roles.values())
        known = bool(self.like) and not self.roles
        return bool(said) or known or self.kind in {"append", "merge"}

    @property
    def capabilities(self) -> Capabilities:
        """What the suite may ask."""
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
    """Write claims as a TOML file that ``paged-mla conformance --backend`` takes."""
    document = asdict(claims)
    lines = [
        "# What probing found. The suite holds the function to this; mend it where it is wrong.",
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
    """Return lines of TOML, which has no null and spells these values as JSON does."""
    return [f"{name} = {json.dumps(value)}" for name, value in items if value is not None]


def read(path: Path) -> Claims:
    """Return the claims of a file.

    Raises
    ------
    InvalidArgument
        It cannot be read, or says something that no claims say.
    """
    document = read_toml(path)
    take_version(document, "version", VERSION, str(path))
    document.pop("factory", None)
    unset = build(tuple[str, ...], document.pop(_NONE, []), f"{path}: {_NONE}")
    claims: Claims = build(Claims, document, str(path))
    claims.given.update(dict.fromkeys(unset))
    return claims
