"""Draws for ``PagedMla``: steps with any lengths, tables, masks, maps and slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from caches import (
    NUM_BLOCKS,
    bits_of_slots,
    group_size,
    new_cache,
    rows_of_slots,
)
from machine import DEVICE, FILLINGS, SETUPS, as_bits, mla_of, new_guards, watched
from rows import Row, dense, legal_rows, visible

from paged_mla_adapters.guards import Guards
from paged_mla_optimized import LatentCache, MlaConfig, PagedMla, RequestMap
from paged_mla_optimized.tensors.step import MlaStep

I32 = torch.int32


@dataclass(frozen=True)
class Step:
    """One step, with the arguments of all calls on it.

    Parameters
    ----------
    config : str
        The key in ``SETUPS``.
    cu_seqlens_q, seq_lens : tuple of int
    table : tuple of tuple of int
        The block table; with `request_ids`, the first slot of each block of each request.
    num_tokens : int
    lines : int
        The number of lines for gathered tokens.
    request_ids : tuple of int or None
    columns : int or None
        The number of tokens of a request in the map.
    mask : int or None
        The number of elements of a flat mask, or of bytes of a line of a packed mask.
    slots : tuple of int or None
        The slots that the caller passes.
    scale : float or None
        The scale of quantized queries.
    max_query_len : int or None
    seed : int
        The seed of the contents and of the strides.
    """

    config: str
    cu_seqlens_q: tuple[int, ...]
    seq_lens: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]
    num_tokens: int
    lines: int = 0
    request_ids: tuple[int, ...] | None = None
    columns: int | None = None
    mask: int | None = None
    slots: tuple[int, ...] | None = None
    scale: float | None = None
    max_query_len: int | None = None
    seed: int = 0


@dataclass
class Ran:
    """The results of a step, on the CPU."""

    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cu_seqlens_k: torch.Tensor
    table: torch.Tensor
    before: torch.Tensor  # bytes of the cache
    after: torch.Tensor
    cache: LatentCache
    gathered: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


class Trial:
    """A step with its legal rows."""

    def __init__(self, step: Step) -> None:
        self.step, self.setup = step, SETUPS[step.config]
        self.config = config = self.setup.config
        generator = torch.Generator().manual_seed(step.seed)
        tokens, rank = step.num_tokens, config.kv_lora_rank
        width = rank + config.qk_rope_head_dim
        self.queries = torch.randn((tokens, config.num_heads, width), generator=generator)
        self.queries = self.queries.to(config.dtype)
        self.latents = torch.randn((tokens, width), generator=generator).to(config.dtype)
        self.mask = self._mask(generator)
        self.rows = legal_rows(
            config,
            step.cu_seqlens_q,
            step.seq_lens,
            [self._blocks(row) for row in range(len(step.seq_lens))],
            num_tokens=tokens,
            columns=self._columns,
            mask_elements=None if config.mask == "tree:packed" else step.mask,
        )
        self.own = {token for row in self.rows for token in row.tokens}
        self.written = self._written()
        self.contested = self._contested()

    @property
    def _columns(self) -> int:
        step = self.step
        if step.request_ids is not None:
            return step.columns or 0
        return len(step.table[0]) * self.config.block_size if step.table else 0

    def _blocks(self, row: int) -> list[int] | None:
        step = self.step
        if step.request_ids is None:
            return [*step.table[row]]
        request = step.request_ids[row]
        if not 0 <= request < len(step.table):
            return None
        return [slot // self.config.block_size if slot >= 0 else -1 for slot in step.table[request]]

    def _mask(self, generator: torch.Generator) -> torch.Tensor | None:
        step, config = self.step, self.config
        if not config.is_tree:
            return None
        if config.mask == "tree:packed":
            shape = (step.num_tokens, step.mask)
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return torch.rand(step.mask or 0, generator=generator) < 0.7

    def slots_of(self, row: Row) -> list[int | None]:
        """Return where a row's tokens go by the plan; ``None`` for what has no slot at all."""
        keys = [row.key_of(index) for index in range(row.query_len)]
        return [None if k < 0 else row.slot_of(k, self.config.block_size) for k in keys]

    def seen_by(self, row: Row) -> list[int]:
        """Return the slots of a row's keys, -1 for those in no block of the cache."""
        slots = [row.slot_of(key, self.config.block_size) for key in range(row.keys)]
        return [-1 if slot is None else slot for slot in slots]

    def _is_stored(self, slot: int | None) -> bool:
        limit = NUM_BLOCKS * self.config.block_size
        return slot is not None and 0 <= slot < limit and slot != self.config.reserved_slot

    def _written(self) -> dict[int, list[int]]:
        """Return the tokens that are written to each slot."""
        named = self.step.slots
        if named is None:
            pairs = [
                pair
                for row in self.rows
                for pair in zip(row.tokens, self.slots_of(row), strict=True)
            ]
        else:
            pairs = [*enumerate(named)]
        written: dict[int, list[int]] = {}
        for token, slot in pairs:
            if self._is_stored(slot):
                written.setdefault(slot, []).append(token)
        return written

    def _contested(self) -> set[int]:
        """Return the groups of slots that two tokens, or two rows with shared scales, write to."""
        size = group_size(self.config)
        row_of = {token: row.number for row in self.rows for token in row.tokens}
        rows: dict[int, set[Any]] = {}
        for slot, tokens in self.written.items():
            rows.setdefault(slot // size, set()).update(row_of.get(token, -1) for token in tokens)
        twice = {slot // size for slot, tokens in self.written.items() if len(tokens) > 1}
        shared = {group for group, of in rows.items() if size > 1 and len(of) > 1}
        return twice | shared if self.step.slots is None else twice

    def is_contested(self, row: Row) -> bool:
        """Return whether the keys of a row depend on the order of writes."""
        size = group_size(self.config)
        return any(slot // size in self.contested for slot in self.seen_by(row))

    def has_all_blocks(self, row: Row) -> bool:
        """Return whether the cache has every block of a row."""
        return all(0 <= block < NUM_BLOCKS for block in row.blocks)

    def lengths(self, guards: Guards) -> list[torch.Tensor]:
        """Return the prefix sums and lengths of the step between guards."""
        return [
            guards.place(name, torch.tensor(getattr(self.step, name), dtype=I32))
            for name in ("cu_seqlens_q", "seq_lens")
        ]

    def run(self, filling: int) -> Ran:
        """Make all calls between guard zones, with a filling in memory that must not be read."""
        step, config, guards = self.step, self.config, new_guards()
        rank, place = config.kv_lora_rank, guards.place
        cache = new_cache(config, guards, step.seed, self.live(), filling)
        queries, latents = self.queries.clone(), self.latents.clone()
        padded = [token for token in range(step.num_tokens) if token not in self.own]
        queries.view(torch.uint8)[padded] = filling
        stored = {token for tokens in self.written.values() for token in tokens}
        latents.view(torch.uint8)[[t for t in range(step.num_tokens) if t not in stored]] = filling
        halves = (queries.shape[1] * queries.shape[2], queries.shape[2], 1)
        stride = halves if step.seed % 3 else None
        q_nope = place("q_nope", queries[..., :rank], stride=stride)
        q_pe = place("q_pe", queries[..., rank:], stride=stride)
        ckv, k_pe = place("ckv", latents[:, :rank]), place("k_pe", latents[:, rank:])
        blank = torch.empty_like(q_nope, device="cpu")
        blank.view(torch.uint8).fill_(filling)
        out = place("out", blank, written=True)
        blank_lse = torch.full(q_nope.shape[:2], math.nan)
        lse = place("lse", blank_lse, written=True)
        gathered = torch.empty((step.lines, latents.shape[1]), dtype=config.dtype)
        gathered.view(torch.uint8).fill_(filling)
        lines = place("gathered ckv", gathered[:, :rank], written=True)
        lines_pe = place("gathered k_pe", gathered[:, rank:], written=True)
        table = self.table(guards, filling)
        mask = None if self.mask is None else self._placed_mask(guards, filling)
        lengths = (
            self._line(guards, "cu_seqlens_q", step.cu_seqlens_q),
            self._line(guards, "seq_lens", step.seq_lens),
        )
        named = None
        if step.slots is not None:
            named = self._line(guards, "slot_mapping", step.slots, torch.int64)
        scale = None if step.scale is None else place("scale", torch.tensor(step.scale))
        guards.fill(filling)
        mla = mla_of(step.config)
        mla.workspace.view(torch.uint8).fill_(filling)
        before = bits_of_slots(config, cache)
        with watched():
            mla.plan(
                MlaStep(
                    *lengths,
                    table,
                    num_tokens=step.num_tokens,
                    max_query_len=step.max_query_len,
                    mask=mask,
                )
            )
            mla.append(ckv, k_pe, cache, named)
            mla.attend(q_nope, q_pe, cache, out=out, lse=lse)
            mla.gather_context(cache, lines, lines_pe)
            codes, scales = mla.quantize_queries(q_nope, q_pe, scale=scale)
        guards.check()
        lines = torch.cat([lines, lines_pe], dim=1)
        return _ran(config, mla, cache, before, (out, lse, lines, codes, scales))

    def _line(
        self, guards: Guards, name: str, numbers: tuple[int, ...], dtype: torch.dtype = I32
    ) -> torch.Tensor:
        """Return numbers on the device, with a stride in some steps."""
        spread = 1 + self.step.seed % 3
        return guards.place(name, torch.tensor(numbers, dtype=dtype), stride=(spread,))

    def table(self, guards: Guards, filling: int) -> torch.Tensor | RequestMap:
        """Return the table or the map, with the filling in entries of no row."""
        step, size = self.step, self.config.block_size
        rest = -1 if filling == FILLINGS[0] else 0
        width = len(step.table[0]) if step.table else 0
        entries = torch.tensor(step.table, dtype=torch.int64).view(len(step.table), width)
        if step.request_ids is None:
            unread = torch.ones(entries.shape, dtype=torch.bool)
            for row in self.rows:
                unread[row.number, : len(row.blocks)] = False
            stride = (entries.shape[1] + 3, 1) if step.seed % 2 else None
            return guards.place(
                "block_table", entries.masked_fill(unread, rest).to(I32), stride=stride
            )
        slots = torch.full((len(entries), step.columns or 0), rest, dtype=I32)
        for row in self.rows:
            request = step.request_ids[row.number]
            firsts = slice(0, len(row.blocks) * size, size)
            slots[request, firsts] = entries[request, : len(row.blocks)].to(I32)
        dtype = torch.int64 if step.seed % 2 else I32
        return RequestMap(
            guards.place("req_to_token", slots),
            self._line(guards, "request_ids", step.request_ids, dtype),
        )

    def _placed_mask(self, guards: Guards, filling: int) -> torch.Tensor:
        """Return the mask, with the filling in elements of no legal row."""
        assert self.mask is not None
        mask, unread = self.mask.clone(), torch.ones(len(self.mask), dtype=torch.bool)
        for row in self.rows:
            lines = row.tokens if self.config.mask == "tree:packed" else row.mask
            unread[lines.start : lines.stop] = False
        mask[unread] = filling if mask.dtype is torch.uint8 else filling > 0
        return guards.place("mask", mask)

    def run_alone(self, filling: int) -> Ran:
        """Make the same calls with only the legal rows and their tokens in the step."""
        step, config, rank = self.step, self.config, self.config.kv_lora_rank
        tokens = [token for row in self.rows for token in row.tokens]
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + row.query_len)
        numbers = [row.number for row in self.rows]
        queries, latents = self.queries[tokens].to(DEVICE), self.latents[tokens].to(DEVICE)

        def numbered(given: Any, dtype: torch.dtype = I32) -> torch.Tensor:
            return torch.tensor(given, dtype=dtype, device=DEVICE)

        guards = new_guards()
        table = self.table(guards, filling)
        if isinstance(table, RequestMap):
            table = RequestMap(table.req_to_token, table.request_ids[numbers].contiguous())
        else:
            table = table[numbers]
        mask = self.mask
        if mask is not None and config.mask == "tree:packed":
            mask = mask[tokens].to(DEVICE)
        elif mask is not None:
            mask = torch.cat([mask[:0], *(self._lines_of(row) for row in self.rows)]).to(DEVICE)
        named = None
        if step.slots is not None:
            named = numbered([step.slots[token] for token in tokens], torch.int64)
        cache = new_cache(config, guards, step.seed, self.live(), filling)
        before = bits_of_slots(config, cache)
        lines = torch.zeros((step.lines, latents.shape[1]), dtype=config.dtype, device=DEVICE)
        scale = None if step.scale is None else numbered(step.scale, torch.float32)
        mla = mla_of(step.config, 1)
        with watched():
            mla.plan(
                MlaStep(
                    numbered(starts),
                    numbered([row.keys for row in self.rows]),
                    table,
                    num_tokens=len(tokens),
                    max_query_len=step.max_query_len,
                    mask=mask,
                )
            )
            q_nope, q_pe = queries[..., :rank].contiguous(), queries[..., rank:].contiguous()
            mla.append(latents[:, :rank], latents[:, rank:], cache, named)
            out, lse = mla.attend(q_nope, q_pe, cache)
            mla.gather_context(cache, lines[:, :rank], lines[:, rank:])
            codes, scales = mla.quantize_queries(q_nope, q_pe, scale=scale)
        return _ran(config, mla, cache, before, (out, lse, lines, codes, scales))

    def _lines_of(self, row: Row) -> torch.Tensor:
        """Return a row's elements of a flat mask; those of a cut row are not used."""
        assert self.mask is not None
        if not row.cut:
            return self.mask[row.mask]
        width = row.query_len if self.config.mask == "tree:qlen" else row.keys
        return self.mask.new_zeros(row.query_len * width)

    def live(self) -> list[int] | None:
        """Return the slots whose contents are used; ``None`` if all slots may be used."""
        if self.step.slots is not None and self.config.stored.couples_tokens:
            return None
        live = [slot for row in self.rows for slot in self.seen_by(row)]
        return [slot for slot in live if 0 <= slot < NUM_BLOCKS * self.config.block_size]


def _ran(
    config: MlaConfig,
    mla: PagedMla,
    cache: LatentCache,
    before: torch.Tensor,
    answers: tuple[torch.Tensor, ...],
) -> Ran:
    """Return the results of a step; `answers` are out, lse, gathered lines, codes and scales."""
    planned = mla.slot_mapping, mla.positions, mla.cu_seqlens_k, mla.block_table
    after = bits_of_slots(config, cache)
    return Ran(
        *(tensor.cpu().clone() for tensor in (*answers[:2], *planned)),
        before,
        after,
        cache,
        *(tensor.cpu().clone() for tensor in answers[2:]),
    )


def hold(step: Step) -> None:
    """Run a step with both fillings and check the results against the contract."""
    trial = Trial(step)
    first, second = (trial.run(filling) for filling in FILLINGS)
    for ran in (first, second):
        _hold_padding(trial, ran)
        _hold_slots(trial, ran)
        _hold_cache(trial, ran)
        _hold_gathered(trial, ran)
    _hold_alike(trial, first, second)
    _hold_dense(trial, second)
    _hold_alone(trial, second)


def _hold_padding(trial: Trial, ran: Ran) -> None:
    """Check that tokens of no legal row and of rows without keys have out 0 and lse -inf."""
    padded = [token for token in range(trial.step.num_tokens) if token not in trial.own]
    for what, given, expected in (
        ("out", ran.out, 0),
        ("lse", ran.lse, -math.inf),
        ("slot_mapping", ran.slots, -1),
        ("positions", ran.positions, 0),
    ):
        wrong = [t for t in padded if not bool((given[t] == expected).all())]
        assert not wrong, f"{what} of padded tokens {wrong}: {given[wrong[0]]}; expected {expected}"


def _hold_slots(trial: Trial, ran: Ran) -> None:
    """Check that slots are in the row's own blocks, and that prefix sums count its keys."""
    limit = NUM_BLOCKS * trial.config.block_size
    for row in trial.rows:
        given = ran.slots[row.tokens.start : row.tokens.stop].tolist()
        for index, (slot, wanted) in enumerate(zip(given, trial.slots_of(row), strict=True)):
            is_right = slot == wanted
            if wanted is None or wanted >= limit:
                is_right = slot < 0 or slot >= limit
            assert is_right, f"row {row.number}: slot {slot} of token {index}; expected {wanted}"
        if trial.mask is None:
            given = ran.positions[row.tokens.start : row.tokens.stop].tolist()
            wanted = [max(row.key_of(index), 0) for index in range(row.query_len)]
            assert given == wanted, f"row {row.number}: positions {given}; expected {wanted}"
    keys = {row.number: row.keys for row in trial.rows}
    sums = [0]
    for number in range(len(trial.step.seq_lens)):
        sums.append(sums[-1] + keys.get(number, 0))
    assert ran.cu_seqlens_k.tolist() == sums, f"cu_seqlens_k {ran.cu_seqlens_k}; expected {sums}"
    if trial.step.request_ids is not None:
        for row in trial.rows:
            given = ran.table[row.number, : len(row.blocks)].tolist()
            assert given == row.blocks, f"row {row.number}: table {given}; expected {row.blocks}"


def _hold_cache(trial: Trial, ran: Ran) -> None:
    """Check that only slots of tokens are written, and compare their bytes in a plain cache."""
    config, size = trial.config, group_size(trial.config)
    groups = {slot // size for slot in trial.written}
    changed = (ran.before != ran.after).any(1).nonzero().flatten().tolist()
    foreign = [group * size for group in changed if group not in groups]
    assert not foreign, f"slots {foreign} of the cache were written, but no token has these slots"
    if config.is_fp8 or config.rope is not None:
        return
    for slot, tokens in trial.written.items():
        wanted = as_bits(trial.latents[tokens]).view(torch.uint8)
        is_there = (wanted == ran.after[slot]).all(1)
        # Two tokens of a slot may each write a part of it.
        assert bool(is_there.any()) or len(tokens) > 1, (
            f"slot {slot} does not contain token {tokens}"
        )


def _hold_gathered(trial: Trial, ran: Ran) -> None:
    """Check that gathered lines of a plain cache equal its tokens."""
    lines = [slot for row in trial.rows for slot in trial.seen_by(row)][: trial.step.lines]
    if trial.config.is_fp8:
        return
    wanted = as_bits(rows_of_slots(ran.cache, lines))
    assert torch.equal(as_bits(ran.gathered[: len(lines)]), wanted), (
        "gathered lines differ from the cache"
    )


def _hold_alike(trial: Trial, first: Ran, second: Ran) -> None:
    """Check that memory that must not be read changes no bit, also for illegal rows."""
    contested = {t for row in trial.rows if trial.is_contested(row) for t in row.tokens}
    tokens = [token for token in range(trial.step.num_tokens) if token not in contested]
    for name in ("out", "lse", "slots", "positions"):
        one, other = (as_bits(getattr(ran, name)[tokens]) for ran in (first, second))
        assert torch.equal(one, other), f"{name} depends on memory that must not be read"
    own = sorted(trial.own)
    for name in ("codes", "scales"):
        one, other = (as_bits(getattr(ran, name)[own]) for ran in (first, second))
        assert torch.equal(one, other), f"{name} of queries depend on memory that must not be read"
    size = group_size(trial.config)
    written = sorted({slot // size for slot in trial.written} - trial.contested)
    if size == 1:
        same = torch.equal(first.after[written], second.after[written])
        assert same, "what is written depends on memory that must not be read"
    lines = sum(row.keys for row in trial.rows)
    if not contested:
        one, other = (as_bits(ran.gathered[:lines]) for ran in (first, second))
        assert torch.equal(one, other), "gathered lines depend on memory that must not be read"
    for ran, filling in ((first, FILLINGS[0]), (second, FILLINGS[1])):
        rest = as_bits(ran.gathered[lines:]).view(torch.uint8)
        assert bool((rest == filling).all()), "lines after the last key were written"


def _is_comparable(trial: Trial, row: Row) -> bool:
    """Return whether the outputs of a row can be compared."""
    is_cut_tree = trial.config.is_tree and row.cut > 0
    return trial.has_all_blocks(row) and not is_cut_tree and row.query_len > 0


def _hold_dense(trial: Trial, ran: Ran) -> None:
    """Check the outputs of legal rows against float64 over the contents of the cache."""
    config, tolerance = trial.config, trial.setup.tolerance
    if config.is_fp8 or config.rope is not None:
        return
    for row in trial.rows:
        if not _is_comparable(trial, row):
            continue
        tokens = slice(row.tokens.start, row.tokens.stop)
        keys = rows_of_slots(ran.cache, trial.seen_by(row))
        sees = visible(config, row, trial.mask)
        expected = dense(config, trial.queries[tokens], keys, sees)
        _assert_close(f"row {row.number}", (ran.out[tokens], ran.lse[tokens]), expected, tolerance)


def _hold_alone(trial: Trial, ran: Ran) -> None:
    """Check that legal rows give the same writes and outputs without the other rows."""
    config, setup, size = trial.config, trial.setup, group_size(trial.config)
    if not config.is_fp8 and config.rope is None and trial.step.seed % 4:
        return  # the direct comparisons suffice
    alone = trial.run_alone(FILLINGS[1])
    tokens = [token for row in trial.rows for token in row.tokens]
    for name in ("codes", "scales"):
        one, other = as_bits(getattr(ran, name)[tokens]), as_bits(getattr(alone, name))
        assert torch.equal(one, other), f"{name} of queries differ from those of the rows alone"
    of_padding = {s // size for s, of in trial.written.items() if not trial.own.issuperset(of)}
    unlike = trial.contested | of_padding
    same = (alone.after == ran.after).all(1)
    same[sorted(unlike)] = True
    wrong = (~same).nonzero().flatten().tolist()
    assert not wrong, f"groups of slots {wrong} differ from those of the rows alone"
    mine, theirs, line = [], [], 0
    for row in trial.rows:
        if not any(slot // size in unlike for slot in trial.seen_by(row)):
            lines = slice(line, min(line + row.keys, trial.step.lines))
            one, other = as_bits(ran.gathered[lines]), as_bits(alone.gathered[lines])
            assert torch.equal(one, other), (
                f"row {row.number}: lines differ from those of the row alone"
            )
            if _is_comparable(trial, row):
                mine += row.tokens
                theirs += range(
                    tokens.index(row.tokens[0]), tokens.index(row.tokens[0]) + row.query_len
                )
        line += row.keys
    expected = alone.out[theirs], alone.lse[theirs]
    _assert_close(
        "rows next to other rows", (ran.out[mine], ran.lse[mine]), expected, setup.tolerance
    )


def _assert_close(what: str, given: Any, expected: Any, tolerance: float) -> None:
    for name, one, other in zip(("out", "lse"), given, expected, strict=True):
        torch.testing.assert_close(
            one.double(),
            other.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name} of {what}: {text}",
        )
