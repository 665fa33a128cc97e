"""What a case is: literal rows, the hazards around them, and why it exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.formats import FORMATS, format_of, types_id
from paged_mla_shared.problem import Mask, MaskSpelling, Problem, Rope


@dataclass(frozen=True)
class Row:
    """One request of a step: tokens in all, tokens of this step, and whose prefix it shares."""

    seq_len: int
    query_len: int
    shares_prefix_of: int | None = None

    @property
    def context_len(self) -> int:
        """Tokens cached before the step (S-2); 0 for a row with no more keys than queries."""
        return max(self.seq_len - self.query_len, 0)


class TableTail(StrEnum):
    """What stands in block-table entries that no rule lets anyone use (S-9)."""

    INT32_MAX = "int32_max"
    MINUS_ONE = "minus_one"
    FOREIGN = "foreign"  # live blocks of other rows
    ZERO = "zero"


class SlotOrder(StrEnum):
    """In which order a step names its slots."""

    SHUFFLED = "shuffled"  # any slots of live blocks, every third token without one
    SWAPPED = "swapped"  # the first slots in order, but for two in the middle
    DESCENDING = "descending"  # the last slots first, no token without one
    NONE = "none"  # no token has one
    TABLE = "table"  # every token's own one, as the block table gives it
    PERMUTED = "permuted"  # the same slots, each that of any token


class Tree(StrEnum):
    """Shape of each row's draft tree."""

    RANDOM = "random"
    CHAIN = "chain"
    STAR = "star"  # every node a child of the first
    FOREST = "forest"  # several roots: not even the first node is everybody's ancestor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named situation, free of dtype and model dims, which a run supplies.

    Parameters
    ----------
    group, name : str
        Together the stable id; never reused for another situation.
    why : str
        What breaks when an implementation fails it.
    rules : tuple of str
        Ids of the rules it exercises.
    rows : tuple of Row
    then : tuple of tuple of Row
        Further steps on the same runner, each with fresh blocks and contents.
    num_heads : int or None
        ``None`` takes the run's model dims as they are.
    cache_format : str or None
        ``None`` takes the plain format of the run's dtype.
    padded_tokens : int
        Tokens past ``cu_seqlens_q[-1]``.
    query_scale : float
        Factor on the queries; large values make scores of thousands.
    softmax_scale : float or None
        ``None`` means ``(N + P) ** -0.5``.
    table_tail : TableTail
    table_width : int
        Extra columns past the longest row.
    token_padding, block_padding : int
        Elements of the latents, not bytes, between tokens and between blocks of the cache.
    explicit_slots : bool
        The step names its slots, in `slot_order`.
    packed_padding : int
        Bytes of each line of a packed mask past those that its nodes need, full of ones.
    strided_inputs : bool
        Every array arrives as a strided view of a poisoned one.
    cache_elements, cache_blocks : int
        Lower bounds on the cache's size; live blocks are placed at its top.
    spare : int
        Capacities of the problem are this many times what the steps need, as an engine's are.
    latent_scale, key_scale : float
        Factors on the latents and on the keys, cached ones and the step's.
    quarters : tuple of float
        Factors on the four quarters of every latent; none: 1 each.
    uneven : bool
        Each quarter of a latent, and each key, is of a magnitude of its own, 2^-4 to 2^4 times.
    token_scales : tuple of float
        Factors on the latents and keys of tokens, in turn, cached ones and the step's; none: 1
        each.
    coarse : bool
        Latents and keys have the 8 bits of bfloat16 in any type: more lie halfway between codes.
    cache_scale : float
        The layer's one scale, whether the format keeps one or not.
    powers_of_two : bool
        Scales that are cached before the step are rounded up to powers of two.
    equal_keys : bool
        All tokens of a row have the same latent and key.
    odd_values : bool
        The step's latents and keys hold -0.0, signalling NaN, infinities and subnormals.
    features : tuple of str
        Capabilities needed beyond what the problem itself implies.
    is_large : bool
        Of production's size: an interpreter, to which that is minutes, is not asked.
    is_slow : bool
        Of many rows or keys: an interpreter needs five seconds or more, and is not asked. Other
        cases ask it the same of fewer, and ``decode-300-rows`` asks it more rows than 256.
    fixed : tuple of {"num_heads", "block_size"}
        What the case is about. A backend that does not declare another of these is asked the
        case with the nearest that it does declare.
    """

    group: str
    name: str
    why: str
    rules: tuple[str, ...]
    rows: tuple[Row, ...]
    then: tuple[tuple[Row, ...], ...] = ()
    num_heads: int | None = None
    cache_format: str | None = None
    block_size: int = 64
    mask: Mask = Mask.CAUSAL
    mask_spelling: MaskSpelling = MaskSpelling.QLEN
    tree: Tree = Tree.RANDOM
    rope: Rope | None = None
    padded_tokens: int = 0
    query_scale: float = 1.0
    softmax_scale: float | None = None
    table_tail: TableTail = TableTail.INT32_MAX
    table_width: int = 3
    token_padding: int = 0
    block_padding: int = 0
    packed_padding: int = 0
    strided_inputs: bool = False
    explicit_slots: bool = False
    slot_order: SlotOrder = SlotOrder.SHUFFLED
    cache_elements: int = 0
    cache_blocks: int = 0
    spare: int = 1
    latent_scale: float = 1.0
    key_scale: float = 1.0
    quarters: tuple[float, ...] = ()
    uneven: bool = False
    token_scales: tuple[float, ...] = ()
    coarse: bool = False
    cache_scale: float = 1.0
    powers_of_two: bool = False
    equal_keys: bool = False
    odd_values: bool = False
    features: tuple[str, ...] = ()
    is_large: bool = False
    is_slow: bool = False
    fixed: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name a person types."""
        return f"{self.group}-{self.name}"

    @property
    def steps(self) -> tuple[tuple[Row, ...], ...]:
        """Rows of every step, in order."""
        return (self.rows, *self.then)

    @property
    def placed_high(self) -> bool:
        """Whether live blocks are at the top of a cache that is larger than the steps need."""
        return self.cache_elements > 0 or self.cache_blocks > 0

    @property
    def max_query_len(self) -> int:
        """Longest query of any row."""
        return max((row.query_len for step in self.steps for row in step), default=0)

    @property
    def required_features(self) -> tuple[str, ...]:
        """Every feature a backend must declare to be asked this case."""
        rows = [row for step in self.steps for row in step]
        found = set(self.features)
        if self.padded_tokens or any(r.seq_len == 0 or r.query_len == 0 for r in rows):
            found.add("padding")
        if any(len({r.query_len for r in step if r.query_len}) > 1 for step in self.steps):
            found.add("mixed")
        if self.then:
            found.add("replay")
        if self.token_padding or self.block_padding:
            found.add("strided_cache")
        if self.strided_inputs:
            found.add("strided_inputs")
        if self.explicit_slots:
            found.add("explicit_slots")
        if self.cache_elements:
            found.add("large_offsets")
        return tuple(sorted(found))

    def problem(self, dims: MlaDims, dtype: str) -> Problem:
        """Return the static problem of this case for a model and an element type."""
        if self.num_heads is not None:
            dims = dims.with_heads(self.num_heads)
        cache_format = format_of(dtype, self.cache_format)
        stored = FORMATS[cache_format]
        itemsize = numpy_dtype(stored.ckv_dtype).itemsize
        block_elements = self.block_size * stored.row(dims)[1]
        needed = max(sum(self._blocks(row) for row in step) for step in self.steps)
        longest = max((row.seq_len for step in self.steps for row in step), default=0)
        tree = self.mask is Mask.TREE
        return Problem(
            dims=dims,
            dtype=dtype,
            cache_format=cache_format,
            block_size=self.block_size,
            num_blocks=max(
                2 * needed + 3, -(-self.cache_elements // block_elements), self.cache_blocks
            ),
            max_rows=self.spare * max(1, *map(len, self.steps)),
            max_query_tokens=self.spare
            * max(1, *(n + self.padded_tokens for n in map(_query_tokens, self.steps))),
            max_model_len=self.spare * max(longest, 1),
            softmax_scale=self.softmax_scale or dims.softmax_scale,
            mask=self.mask,
            mask_spelling=self.mask_spelling,
            max_draft_tokens=self.spare * self.max_query_len if tree else 0,
            rope=self.rope,
            token_padding=self.token_padding * itemsize,
            block_padding=self.block_padding * itemsize,
            cache_scale=self.cache_scale,
        )

    def dtype_id(self, dtype: str) -> str:
        """Return the case id for one element type and the cache format, as test ids show it."""
        return f"{self.id}-{types_id(dtype, self.cache_format)}"

    def _blocks(self, row: Row) -> int:
        return -(-row.seq_len // self.block_size)


def _query_tokens(rows: tuple[Row, ...]) -> int:
    return sum(row.query_len for row in rows)


def in_group(
    group: str, *rules: str, rows: tuple[Row, ...] | None = None, **fields: Any
) -> Callable[..., Case]:
    """Return a function that makes the cases of a group: from a name, why, rows and more fields.

    Parameters
    ----------
    group : str
    rules : str
        Ids of the rules that every case of the group exercises.
    rows : tuple of Row or None
        Those of a case that names none; ``None`` if every case names its own.
    fields
        Of :class:`Case`, for cases that do not name them.
    """
    usual = rows

    def case(name: str, why: str, rows: tuple[Row, ...] | None = usual, **more: Any) -> Case:
        own = {"rows": rows, **fields, **more}
        return Case(group=group, name=name, why=why, rules=rules, **own)

    return case
