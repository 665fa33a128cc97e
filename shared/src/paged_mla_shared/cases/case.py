"""The type of a case: literal rows, the hazards around them, and the reason for the case."""

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
    """One row of a step.

    Parameters
    ----------
    seq_len : int
        All tokens of the row, including this step's.
    query_len : int
        Tokens of this step.
    shares_prefix_of : int or None
        The earlier row whose context blocks the row shares.
    """

    seq_len: int
    query_len: int
    shares_prefix_of: int | None = None

    @property
    def context_len(self) -> int:
        """The number of tokens cached before the step (S-2); 0 with no more keys than queries."""
        return max(self.seq_len - self.query_len, 0)


class TableTail(StrEnum):
    """The contents of block table entries that no rule allows to be used (S-9)."""

    INT32_MAX = "int32_max"
    MINUS_ONE = "minus_one"
    FOREIGN = "foreign"  # live blocks of other rows
    ZERO = "zero"


class SlotOrder(StrEnum):
    """The order of the slots in a step's ``slot_mapping``."""

    SHUFFLED = "shuffled"  # any slots of live blocks; every third token has no slot
    SWAPPED = "swapped"  # the first slots in order, except that two in the middle are swapped
    DESCENDING = "descending"  # the last slots first; every token has a slot
    NONE = "none"  # no token has a slot
    TABLE = "table"  # every token's own slot, as derived from the block table
    PERMUTED = "permuted"  # the same slots in random order


class Tree(StrEnum):
    """The shape of each row's draft tree."""

    RANDOM = "random"
    CHAIN = "chain"
    STAR = "star"  # every node is a child of the first node
    FOREST = "forest"  # several roots: the first node is not an ancestor of all other nodes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named situation, without the dtype and the model dims, which a run supplies.

    Parameters
    ----------
    group, name : str
        Together the stable id, which is never reused for another situation.
    why : str
        The situation that the case covers, or the property that it checks.
    rules : tuple of str
        The ids of the rules that it tests.
    rows : tuple of Row
    then : tuple of tuple of Row
        The rows of further steps on the same runner, each with new blocks and contents.
    num_heads : int or None
        ``None`` uses the number of heads of the run's model dims.
    cache_format : str or None
        ``None`` uses the plain format of the run's dtype.
    padded_tokens : int
        The number of tokens after ``cu_seqlens_q[-1]``.
    query_scale : float
        A factor of the queries; large values give scores of thousands.
    softmax_scale : float or None
        ``None`` means ``(N + P) ** -0.5``.
    table_tail : TableTail
    table_width : int
        The number of additional columns after the longest row's blocks.
    token_padding, block_padding : int
        The numbers of latent elements, not bytes, between tokens and between blocks of the cache.
    explicit_slots : bool
        Whether the step has a ``slot_mapping``, in `slot_order`.
    packed_padding : int
        The number of additional bytes of each line of a packed mask, in which all bits are 1.
    strided_inputs : bool
        Whether every array is a strided view of a poisoned array.
    cache_elements, cache_blocks : int
        Lower bounds of the cache's size. If one is above 0, live blocks are at the cache's end.
    spare : int
        The ratio of the problem's capacities to the sizes of the steps.
    latent_scale, key_scale : float
        Factors of the latents and of the rotated keys, both cached and of the step.
    quarters : tuple of float
        Factors of the four quarters of every latent; if empty, all are 1.
    uneven : bool
        Whether each quarter of a latent, and each key, has its own random factor, from 2^-4 to
        2^4.
    token_scales : tuple of float
        Factors of the latents and keys of tokens, repeated over the tokens, both cached and of
        the step; if empty, all are 1.
    coarse : bool
        Whether latents and keys are rounded to bfloat16, so that more of them are halfway between
        two codes.
    cache_scale : float
        The layer's scale, also for formats that have no layer scale.
    powers_of_two : bool
        Whether scales that are cached before the step are rounded up to powers of two.
    equal_keys : bool
        Whether all tokens of a row have the same latent and key.
    odd_values : bool
        Whether the step's latents and keys contain -0.0, signaling NaN, infinities and subnormal
        numbers.
    features : tuple of str
        Required capabilities that the problem does not imply.
    is_large : bool
        Whether the case has production's size. An interpreter, which would need minutes, does not
        run it.
    is_slow : bool
        Whether the case has so many rows or keys that an interpreter needs five seconds or more
        and does not run it. Smaller cases test the same with an interpreter, and
        ``decode-300-rows`` tests more than 256 rows.
    fixed : tuple of {"num_heads", "block_size"}
        The values that the case is about. Other values are replaced by the nearest ones that a
        backend declares.
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
        """The id that a user types."""
        return f"{self.group}-{self.name}"

    @property
    def steps(self) -> tuple[tuple[Row, ...], ...]:
        """The rows of every step, in order."""
        return (self.rows, *self.then)

    @property
    def placed_high(self) -> bool:
        """Whether live blocks are at the end of a cache that is larger than the steps need."""
        return self.cache_elements > 0 or self.cache_blocks > 0

    @property
    def max_query_len(self) -> int:
        """The largest number of query tokens of a row."""
        return max((row.query_len for step in self.steps for row in step), default=0)

    @property
    def required_features(self) -> tuple[str, ...]:
        """The features that a backend must declare to run this case, sorted."""
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
        """Return the case id with an element type and the cache format, as in test ids."""
        return f"{self.id}-{types_id(dtype, self.cache_format)}"

    def _blocks(self, row: Row) -> int:
        return -(-row.seq_len // self.block_size)


def _query_tokens(rows: tuple[Row, ...]) -> int:
    return sum(row.query_len for row in rows)


def in_group(
    group: str, *rules: str, rows: tuple[Row, ...] | None = None, **fields: Any
) -> Callable[..., Case]:
    """Return a function that creates the cases of a group from name, why, rows and other fields.

    Parameters
    ----------
    group : str
    rules : str
        The ids of the rules that every case of the group tests.
    rows : tuple of Row or None
        The default rows of a case; ``None`` if every case has its own rows.
    fields
        The defaults of other fields of :class:`Case`.
    """
    usual = rows

    def case(name: str, why: str, rows: tuple[Row, ...] | None = usual, **more: Any) -> Case:
        own = {"rows": rows, **fields, **more}
        return Case(group=group, name=name, why=why, rules=rules, **own)

    return case
