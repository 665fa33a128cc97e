"""Faults of a size: right up to it, wrong past it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.materialize import materialize
from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Mask, Rope, RopePairing

DIMS = MlaDims(1, 2, 4, 2, 2)
ROPE = Rope(RopePairing.NEOX)


def step_bytes(oracle: Oracle, case: Case) -> bytes:
    """Return the bytes of a step's results: its plan, its writes and its outputs."""
    [step] = build_steps(case, DIMS, "float32")
    batch, before = materialize(step)
    plan = oracle.metadata(step.problem, batch)
    written = oracle.append(step.problem, batch, before)
    answer = oracle.attend(step.problem, batch, RIGHT.append(step.problem, batch, before))
    parts = (plan.positions, plan.slot_mapping, written.blocks, answer.out, answer.lse)
    return b"".join(part.tobytes() for part in parts)


def decode(keys: int, **others: object) -> Case:
    """Return one query token of a row of `keys` tokens."""
    return rows(Row(keys, 1), **others)


def rows(*rows: Row, **others: object) -> Case:
    """Return a step of rows, with one head by default."""
    case = Case(group="decode", name="size", why="", rules=(), rows=rows, num_heads=1)
    return replace(case, **others)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("keys-past-4096-are-dropped", decode(4096), decode(4097)),
        ("keys-past-16384-are-dropped", decode(16384), decode(16385)),
        ("keys-past-32767-are-dropped", decode(32767), decode(32768)),
        ("only-512-table-entries-are-read", decode(512, block_size=1), decode(513, block_size=1)),
        ("queries-past-512-are-not-answered", rows(Row(513, 512)), rows(Row(513, 513))),
        ("tokens-past-512-are-not-written", rows(Row(513, 512)), rows(Row(513, 513))),
        ("rows-past-256-are-not-answered", rows(*256 * [Row(2, 1)]), rows(*257 * [Row(2, 1)])),
        ("row-numbers-keep-8-bits", rows(*256 * [Row(2, 1)]), rows(*257 * [Row(2, 1)])),
        (
            "token-heads-wrap-at-2-14",
            rows(Row(128, 128), num_heads=128),
            rows(Row(129, 129), num_heads=128),
        ),
        ("positions-keep-16-bits", decode(65536), decode(65537)),
        ("planned-lengths-keep-16-bits", decode(65535), decode(65536)),
        ("rope-table-ends-at-4096", decode(4096, rope=ROPE), decode(4097, rope=ROPE)),
        ("rope-table-ends-at-65536", decode(65536, rope=ROPE), decode(65537, rope=ROPE)),
        ("positions-are-rounded-to-bfloat16", decode(257, rope=ROPE), decode(258, rope=ROPE)),
        ("positions-are-rounded-to-float16", decode(2049, rope=ROPE), decode(2050, rope=ROPE)),
        ("queries-at-position-0-are-rotated", decode(2, rope=ROPE), decode(1, rope=ROPE)),
        ("theta-is-one-of-two", decode(9, rope=ROPE), decode(9, rope=replace(ROPE, theta=5e4))),
        ("the-last-of-5-splits-is-dropped", decode(256), decode(257)),
        ("the-last-of-7-splits-counts-twice", decode(449), decode(448)),
        ("the-last-of-16-splits-is-dropped", decode(960), decode(961)),
        ("a-lone-last-split-is-dropped", decode(2048), decode(2049)),
        ("small-rises-are-not-rescaled", decode(1024), decode(2049)),
        (
            "partials-of-many-pairs-are-rounded",
            rows(Row(1100, 8), num_heads=64),
            rows(Row(1100, 9), num_heads=64),
        ),
        (
            "splits-that-a-query-does-not-see-weigh-one-key",
            rows(Row(1024, 2)),
            rows(Row(1025, 2)),
        ),
        (
            "padding-past-256-tokens-is-not-written",
            rows(Row(2, 1), padded_tokens=256),
            rows(Row(2, 1), padded_tokens=257),
        ),
        (
            "rows-behind-a-late-empty-one-are-not-served",
            rows(*31 * [Row(2, 1)], Row(0, 1), Row(2, 1)),
            rows(*32 * [Row(2, 1)], Row(0, 1), Row(2, 1)),
        ),
        ("unused-slots-of-chunks-weigh-zero", rows(Row(20, 17)), rows(Row(20, 18))),
        ("key-tiles-lie-in-one-block", decode(60, block_size=32), decode(60, block_size=48)),
        (
            "slots-run-on-past-a-block",
            rows(Row(48, 48), block_size=16),
            rows(Row(47, 47), block_size=16),
        ),
        (
            "long-chunks-are-written-from-the-edge-of-their-block",
            rows(Row(131, 121)),
            rows(Row(131, 122)),
        ),
        (
            "rows-far-past-the-mean-length-are-not-planned",
            rows(Row(16, 16), Row(0, 0)),
            rows(Row(17, 17), Row(0, 0)),
        ),
        ("block-ids-keep-16-bits", decode(9), decode(9, cache_blocks=2**16 + 9, block_size=1)),
        ("block-ids-keep-24-bits", decode(9), decode(9, cache_blocks=2**24 + 9, block_size=1)),
        ("blocks-past-2-16-are-not-read", decode(9), decode(9, cache_blocks=2**16 + 1)),
        (
            "named-slots-pass-through-float32",
            rows(Row(9, 9), explicit_slots=True),
            rows(Row(9, 9), explicit_slots=True, block_size=256, cache_blocks=2**20),
        ),
        ("rows-of-21-modulo-32-lose-their-last-key", decode(20), decode(21)),
        ("long-rows-are-cut-into-five-equal-parts", decode(2048), decode(2049)),
        ("queries-past-512-of-a-chunk-see-nothing", rows(Row(513, 512)), rows(Row(514, 513))),
        ("short-contexts-are-not-read", rows(Row(66, 2)), rows(Row(65, 2))),
        (
            "the-first-query-of-a-tile-does-not-see-itself",
            rows(Row(256, 256)),
            rows(Row(257, 257)),
        ),
        (
            "non-causal-rows-end-with-their-query-tile",
            rows(Row(32, 32), mask=Mask.NON_CAUSAL),
            rows(Row(33, 33), mask=Mask.NON_CAUSAL),
        ),
        ("short-chunks-are-not-masked", rows(Row(16, 7)), rows(Row(16, 6))),
        ("only-the-last-key-tile-is-masked", rows(Row(128, 4)), rows(Row(129, 4))),
        (
            "the-first-keys-of-a-tree-are-taken-for-context",
            rows(Row(40, 8), mask=Mask.TREE),
            rows(Row(38, 8), mask=Mask.TREE),
        ),
        (
            "drafts-past-a-key-tile-are-chains",
            rows(Row(64, 8), mask=Mask.TREE),
            rows(Row(68, 8), mask=Mask.TREE),
        ),
        (
            "ancestors-past-the-eighth-are-forgotten",
            rows(Row(9, 8), mask=Mask.TREE, tree=Tree.CHAIN),
            rows(Row(9, 9), mask=Mask.TREE, tree=Tree.CHAIN),
        ),
        (
            "depths-of-nodes-end-at-16",
            rows(Row(20, 17), mask=Mask.TREE, tree=Tree.CHAIN),
            rows(Row(20, 18), mask=Mask.TREE, tree=Tree.CHAIN),
        ),
        (
            "thetas-above-100000-are-cut",
            decode(9, rope=replace(ROPE, theta=1e5)),
            decode(9, rope=replace(ROPE, theta=2e5)),
        ),
        (
            "keys-of-a-tile-have-consecutive-positions",
            rows(Row(64, 64), Row(64, 64), rope=ROPE),
            rows(Row(65, 65), Row(64, 64), rope=ROPE),
        ),
        (
            "queries-of-an-overlapping-tile-are-rotated-twice",
            rows(Row(64, 64), rope=ROPE),
            rows(Row(65, 65), rope=ROPE),
        ),
        (
            "keys-of-small-steps-are-rotated-by-halves",
            rows(Row(9, 5), rope=Rope(RopePairing.INTERLEAVED)),
            rows(Row(9, 4), rope=Rope(RopePairing.INTERLEAVED)),
        ),
        (
            "wide-trees-are-rotated-by-index",
            rows(Row(30, 21), mask=Mask.TREE, rope=ROPE),
            rows(Row(30, 22), mask=Mask.TREE, rope=ROPE),
        ),
        (
            "queries-of-long-chunks-are-rotated-from-0",
            rows(Row(240, 235), rope=ROPE),
            rows(Row(240, 236), rope=ROPE),
        ),
        (
            "heads-past-the-32nd-are-not-rotated",
            decode(9, rope=ROPE, num_heads=32),
            decode(9, rope=ROPE, num_heads=33),
        ),
        ("lse-of-long-rows-is-in-base-2", decode(8192), decode(8193)),
        ("long-rows-are-read-in-float16", decode(8192), decode(8193)),
        ("lse-is-in-float64", rows(*100 * [Row(2, 1)]), rows(*101 * [Row(2, 1)])),
        (
            "long-chunks-take-the-usual-scale",
            rows(Row(30, 25), softmax_scale=0.1),
            rows(Row(30, 26), softmax_scale=0.1),
        ),
        ("scores-of-short-rows-are-in-float16", rows(Row(9, 7)), rows(Row(9, 6))),
        (
            "weights-of-many-pairs-are-in-bfloat16",
            rows(Row(16, 16), num_heads=128),
            rows(Row(17, 17), num_heads=128),
        ),
        ("a-lone-key-has-no-lse", decode(2), decode(1)),
        (
            "rows-past-the-last-full-group-are-not-served",
            rows(*4 * [Row(2, 1)]),
            rows(*5 * [Row(2, 1)]),
        ),
        ("rows-past-256-are-not-planned", rows(*256 * [Row(2, 1)]), rows(*257 * [Row(2, 1)])),
        (
            "queries-of-a-folded-tile-are-counted-from-its-first",
            rows(Row(22, 22), num_heads=3),
            rows(Row(23, 23), num_heads=3),
        ),
        (
            "decode-rows-are-put-back-in-another-order",
            rows(*(Row(keys, 1) for keys in (5, 3, 9, 7, 2, 8, 4))),
            rows(*(Row(keys, 1) for keys in (5, 3, 9, 7, 2, 8, 4, 6))),
        ),
        (
            "lse-is-written-for-padded-heads",
            rows(Row(52, 52), num_heads=3),
            rows(Row(53, 53), num_heads=3),
        ),
        ("small-scales-are-raised", decode(9, softmax_scale=0.01), decode(9, softmax_scale=0.009)),
        ("large-scales-are-cut", decode(9, softmax_scale=2.0), decode(9, softmax_scale=2.1)),
        ("signalling-nan-becomes-quiet", decode(9), decode(9, odd_values=True)),
        ("negative-zero-loses-its-sign", decode(9), decode(9, odd_values=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_is_met_and_passed(name: str, right: Case, wrong: Case):
    """S-20: no fault shows before its size, and each shows right past it."""
    deviant = CATALOGUE[name].change(RIGHT)
    assert step_bytes(deviant, right) == step_bytes(RIGHT, right)
    assert step_bytes(deviant, wrong) != step_bytes(RIGHT, wrong)
