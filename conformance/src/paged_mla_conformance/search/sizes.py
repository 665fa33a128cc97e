"""Size classes of cases. A search reports which of them it reached."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.dims import SMALL
from paged_mla_shared.problem import Mask, MaskSpelling


class Size(StrEnum):
    """Properties of large or unusual cases; the value is the text in the table of a search."""

    KEYS_4K = "a row of more than 4096 keys"
    KEYS_16K = "a row of more than 16384 keys"
    KEYS_32K = "a row of more than 32768 keys"
    KEYS_AT_EDGE = "a row of more than 1024 keys that ends within 1 key of a key tile's edge"
    SEVERAL_FAR = "several query tokens after more than 2048 keys, in several rows"
    ODD_QUERIES = "3, 5, 6 or 7 query tokens in several rows"
    QUERIES_512 = "more than 512 query tokens after a context"
    TOKENS_512 = "more than 512 tokens written to explicit slots"
    ROWS_256 = "more than 256 rows"
    PADDING_512 = "more than 512 padded tokens"
    PADDED_AMONG_MANY = "padded rows among more than 64 rows"
    LONG_BESIDE_MANY = "a chunk of more than 256 query tokens in a step of more than 32 rows"
    PAIRS_16K = "more than 16384 pairs of token and head"
    HEADS_ODD = "a head count above 8 that is not a power of two"
    TREE_QLEN = "a tree of more than 32 nodes, in the form QLEN"
    TREE_FULL = "a tree of more than 32 nodes, in the form FULL"
    TREE_PACKED = "a tree of more than 32 nodes, in the form PACKED"
    BLOCK_IDS_64K = "block ids above 65535"
    TABLE_512 = "more than 512 blocks of a row"
    POSITION_64K = "a rotation at positions above 65535"
    THETA = "a base of rotation other than 10000"
    MAGNITUDE = "unequal mscales"
    SCALE_SMALL = "a softmax scale below 0.01"
    SCALE_LARGE = "a softmax scale above 10"
    THIRD_STEP = "a third step on one runner"


_TREES = {
    MaskSpelling.QLEN: Size.TREE_QLEN,
    MaskSpelling.FULL: Size.TREE_FULL,
    MaskSpelling.PACKED: Size.TREE_PACKED,
}


def sizes_of(case: Case) -> set[Size]:
    """Return all size classes of a case."""
    problem = case.problem(SMALL, "float32")
    rope, yarn = case.rope, case.rope and case.rope.yarn
    found = {size for step in case.steps for size in _of_rows(step, case)}
    reached = {
        Size.HEADS_ODD: (h := problem.dims.num_heads) > 8 and h & (h - 1) != 0,
        Size.PADDING_512: case.padded_tokens > 512,
        Size.BLOCK_IDS_64K: problem.num_blocks > 2**16,
        Size.THETA: rope is not None and rope.theta != 10000,
        Size.MAGNITUDE: bool(yarn and yarn.mscale != yarn.mscale_all_dim),
        Size.SCALE_SMALL: problem.softmax_scale < 0.01,
        Size.SCALE_LARGE: problem.softmax_scale > 10,
        Size.THIRD_STEP: len(case.steps) > 2,
    }
    return found | {size for size, there in reached.items() if there}


def _of_rows(rows: tuple[Row, ...], case: Case) -> Iterable[Size]:
    live = [row for row in rows if row.seq_len]
    keys = max((row.seq_len for row in live), default=0)
    behind = [row.query_len for row in live if row.context_len]
    tokens = sum(row.query_len for row in rows)
    heads = case.problem(SMALL, "float32").dims.num_heads
    tree = case.mask is Mask.TREE and case.max_query_len > 32
    reached = {
        Size.KEYS_4K: keys > 4096,
        Size.KEYS_16K: keys > 16384,
        Size.KEYS_32K: keys > 32768,
        Size.KEYS_AT_EDGE: any(r.seq_len > 1024 and (r.seq_len + 1) % 64 < 3 for r in live),
        Size.SEVERAL_FAR: sum(r.query_len > 1 and r.context_len > 2048 for r in live) > 1,
        Size.ODD_QUERIES: sum(r.query_len in {3, 5, 6, 7} for r in live) > 1,
        Size.QUERIES_512: max(behind, default=0) > 512,
        Size.TOKENS_512: case.explicit_slots and tokens > 512,
        Size.ROWS_256: len(rows) > 256,
        Size.PADDED_AMONG_MANY: len(rows) > 64 and len(live) < len(rows),
        Size.LONG_BESIDE_MANY: len(rows) > 32 and max(behind, default=0) > 256,
        Size.PAIRS_16K: tokens * heads > 16384,
        Size.TABLE_512: keys > 512 * case.block_size,
        Size.POSITION_64K: case.rope is not None and keys > 65536,
    }
    yield from (size for size, there in reached.items() if there)
    if tree:
        yield _TREES[case.mask_spelling]
