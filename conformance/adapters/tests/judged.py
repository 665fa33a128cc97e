"""Functions with many kinds of signatures, right and wrong, for tests of ``paged-mla judge``."""

from __future__ import annotations

import os
import subprocess
import time

import torch

HELPERS = []
LN2 = 0.6931471805599453


def decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Right: the simplest signature, with one query token for each row."""
    out = torch.zeros(*q.shape[:2], kv_lora_rank, dtype=q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf)
    for b, n in enumerate(seq_lens.tolist()):
        if n > 0:
            pages = block_table[b, : -(-n // kv_cache.shape[1])].long()
            keys = kv_cache[pages].flatten(0, 1)[:n].float()
            scores = softmax_scale * q[b].float() @ keys.T
            lse[b] = torch.logsumexp(scores, -1)
            out[b] = (torch.softmax(scores, -1) @ keys[:, :kv_lora_rank]).to(q.dtype)
    return out, lse


def sixteen_heads_at_a_time(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Wrong: the output of heads after the last multiple of 16 is 0."""
    out, lse = decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)
    if q.shape[1] % 16:
        out[:, q.shape[1] // 16 * 16 :] = 0
    return out, lse


def reads_the_table_of_the_row_before(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):  # fmt: skip  # noqa: E501
    """Wrong: each row reads the blocks of the row before it."""
    before = block_table.roll(1, 0)
    return decode(q, kv_cache, before, seq_lens, softmax_scale, kv_lora_rank)


def reads_the_rows_in_reverse(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Wrong: each row has the blocks and the length of another row."""
    tables, lens = block_table.flip(0), seq_lens.flip(0)
    return decode(q, kv_cache, tables, lens, softmax_scale, kv_lora_rank)


def refuses_odd_heads(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Right, but it supports only multiples of 16 heads."""
    assert q.shape[1] % 16 == 0, "heads"
    return decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)


def with_a_scale_of_its_own(q, kv_cache, block_table, seq_lens, kv_lora_rank):
    """Right at this softmax scale, which is not a parameter."""
    return decode(q, kv_cache, block_table, seq_lens, 0.125, kv_lora_rank)


def loses_the_device(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Raise the error that a GPU raises for an illegal address, at five heads."""
    if q.shape[1] == 5:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)


def changes_the_folder(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Right, but its first call changes the current folder, as compilers do."""
    os.chdir("/")
    return decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)


def starts_a_process(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Right, but its first call starts a process that outlives this one."""
    if not HELPERS:
        HELPERS.append(subprocess.Popen(["sleep", "600"]))
    return decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)


async def is_a_coroutine(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Wrong: a call returns a coroutine."""
    return decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)


def never_returns(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):
    """Wrong: it does not return at five heads."""
    while q.shape[1] == 5:
        time.sleep(1)
    return decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)


def last_pages_are_full(q, kv_cache, kv_indptr, kv_indices, kv_last_page_len, softmax_scale, kv_lora_rank):  # fmt: skip  # noqa: E501
    """Wrong: treat the last page of each row as full."""
    del kv_last_page_len
    size = kv_cache.shape[1]
    lens = kv_indptr.diff() * size
    table = torch.zeros(len(lens), int(kv_indptr.diff().max()), dtype=torch.int32)
    for b in range(len(lens)):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        table[b, : len(pages)] = pages
    return decode(q, kv_cache, table, lens, softmax_scale, kv_lora_rank)


class PlansOnce:
    """Wrong: the first plan is kept and later plans are ignored."""

    def __init__(self):
        self._planned = None

    def plan(self, block_table, seq_lens, softmax_scale):
        """Store a step, unless a step is stored."""
        self._planned = self._planned or (block_table, seq_lens, softmax_scale)

    def run(self, q, kv_cache, kv_lora_rank):
        """Compute attention for the stored step."""
        return decode(q, kv_cache, *self._planned, kv_lora_rank)


def exits(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank):  # noqa: ARG001 - it reads none
    """End the process with status 0."""
    raise SystemExit(0)


def without_lse(query, cache, page_table, cache_seqlens, sm_scale, dv):
    """Right; it returns no lse."""
    return decode(query, cache, page_table, cache_seqlens, sm_scale, dv)[0]


def with_a_head_axis(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal):
    """Right: queries [B, Q, H, D], a cache with a head axis, an lse [B, H, Q], a dict."""
    assert q.ndim == 4
    assert k_cache.shape[2] == 1
    rows, width = q.shape[:2]
    cache, starts = k_cache.squeeze(2), torch.arange(rows + 1) * width
    out, lse = ragged(
        q.flatten(0, 1), cache, starts, block_table, cache_seqlens, softmax_scale, causal
    )
    answers = {"out": out[..., :head_dim_v].to(q.dtype).unflatten(0, (rows, width))}
    return answers | {"softmax_lse": lse.unflatten(0, (rows, width)).transpose(1, 2)}


def over_requests(q_nope, q_pe, k_buffer, v_buffer, o, req_to_tokens, b_req_idx, b_seq_len, scale):
    """Right: slots of each request, a flat cache with a head axis, an output buffer."""
    assert k_buffer.ndim == 3
    q = torch.cat([q_nope, q_pe], -1)
    for b, n in enumerate(b_seq_len.tolist()):
        slots = req_to_tokens[b_req_idx[b].item(), :n].long()
        scores = scale * q[b].float() @ k_buffer[slots, 0].float().T
        o[b] = (torch.softmax(scores, -1) @ v_buffer[slots, 0].float()).to(o.dtype) if n else 0


def behind_a_prefix(q, kv_cache, block_table, cache_seqlens, softmax_scale, kv_lora_rank):
    """Right, except for rows without keys: lengths do not count the step's own token."""
    return decode(q, kv_cache, block_table, cache_seqlens + 1, softmax_scale, kv_lora_rank)


class Wrapper:
    """Right: ``plan`` and ``run``, rows of any lengths, CSR pages, two caches, an lse of base 2."""

    def __init__(self, device):
        self.device = device

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, sm_scale, causal):
        """Store the arguments that ``run`` needs."""
        width = -(-int(kv_len_arr.max()) // page_size)
        table = torch.zeros(len(kv_len_arr), max(width, 1), dtype=torch.int32)
        for b, pages in enumerate(kv_indptr.diff().tolist()):
            table[b, :pages] = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        self.step = qo_indptr, table, kv_len_arr, sm_scale, causal

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, *, return_lse):
        """Write output and lse to the buffers."""
        assert return_lse
        q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        answer, total = ragged(q, cache, *self.step)
        out.copy_(answer[..., : out.shape[-1]])
        lse.copy_(total / LN2)


def ragged(q, cache, starts, table, lens, scale, causal):
    """Return out [T, H, R + P] and lse of rows of any lengths, float32."""
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    for b, n in enumerate(lens.tolist()):
        begin, end = starts[b : b + 2].tolist()
        if n == 0 or begin == end:
            continue
        keys = cache[table[b, : -(-n // cache.shape[1])].long()].flatten(0, 1)[:n].float()
        scores = scale * q[begin:end].float() @ keys.T
        if causal:
            ahead = torch.ones(end - begin, n).triu(n - (end - begin) + 1).bool()
            scores = scores.masked_fill(ahead[:, None], -torch.inf)
        lse[begin:end] = torch.logsumexp(scores, -1)
        out[begin:end] = torch.softmax(scores, -1).nan_to_num() @ keys
    return out, lse


def in_splits(q, k_buffer, v_buffer, o, req_to_tokens, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size):  # fmt: skip  # noqa: E501
    """Right, except for rows without keys: a buffer for splits, and a block table."""
    rank = v_buffer.shape[-1]
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, rank + 1)
    for b, n in enumerate(b_seq_len.tolist()):
        pages = req_to_tokens[b, : -(-n // page_size)].long()
        keys = k_buffer[pages].flatten(0, 1)[:n].float()
        for split, part in enumerate(keys.tensor_split(num_kv_splits)):
            scores = sm_scale * q[b].float() @ part.T
            attn_logits[b, :, split, :-1] = torch.softmax(scores, -1) @ part[:, :rank]
            attn_logits[b, :, split, -1] = torch.logsumexp(scores, -1)
        weights = torch.softmax(attn_logits[b, ..., -1], -1)[..., None]
        o[b] = (weights * attn_logits[b, ..., :-1].nan_to_num()).sum(1).to(o.dtype)


def in_blocks_of_slots(q, cache, o, kv_indptr, kv_indices, attn_lse, attn_logits, num_kv_splits, max_kv_splits, sm_scale, kv_block_size):  # fmt: skip  # noqa: E501
    """Right: slots of blocks with a size parameter, no lengths, and the splits of every row."""
    rank = o.shape[-1]
    assert attn_logits.shape[-2:] == (max_kv_splits, rank)
    assert attn_lse.shape[-1] == max_kv_splits
    assert num_kv_splits.tolist() == [max_kv_splits] * len(q)
    for b in range(len(q)):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        keys = cache[slots // kv_block_size, slots % kv_block_size].float()
        scores = sm_scale * q[b].float() @ keys.T
        o[b] = (torch.softmax(scores, -1) @ keys[:, :rank]).to(o.dtype) if len(slots) else 0


def with_every_size(q, cache, block_table, lengths, sm_scale, b, s_q, h_q, h_kv, d, dv, kv_descale):
    """Right: size parameters, and the cache's scale in a tensor."""
    assert q.shape == (b, s_q, h_q, d)
    assert (h_kv, kv_descale.shape) == (1, (1,))
    keys = (cache.float() * kv_descale).to(q.dtype)
    out, _ = decode(q.flatten(0, 1), keys, block_table, lengths, sm_scale, dv)
    assert s_q == 1
    return out.unflatten(0, (b, 1))


def leaves_its_last_head_unwritten(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank, out):  # fmt: skip  # noqa: E501
    """Wrong: the last head of the output keeps what the buffer holds."""
    right, lse = decode(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank)
    out[:, :-1] = right[:, :-1]
    return out, lse


def write(kv_c, k_pe, cache, slot_mapping):
    """Right: it writes tokens to a cache."""
    kept = slot_mapping >= 0
    slots, tokens = slot_mapping[kept], torch.cat([kv_c, k_pe], -1)[kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = tokens.to(cache.dtype)


def write_whatever_the_slot(new_kv, cache, dest_loc):
    """Wrong: a token with slot -1 is written to the last slot of the cache."""
    cache[dest_loc] = new_kv.to(cache.dtype)


def merge(prefix_output, prefix_lse, suffix_output, suffix_lse):
    """Right: a merge of two partial results, with an lse [H, T]."""
    assert prefix_lse.shape == prefix_output.shape[1::-1]
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    out = torch.zeros_like(prefix_output)
    for part, own in ((prefix_output, prefix_lse), (suffix_output, suffix_lse)):
        weight = torch.where(own == -torch.inf, 0.0, torch.exp(own - lse)).T[..., None]
        out += torch.where(weight == 0, 0.0, weight * part)
    return out, lse


def merge_in_place(out_a, lse_a, out_b, lse_b):
    """Wrong: the merged result overwrites the first partial result."""
    lse = torch.logaddexp(lse_a, lse_b)
    out_a.mul_(torch.exp(lse_a - lse)[..., None])
    out_a.add_(out_b * torch.exp(lse_b - lse)[..., None])
    return out_a, lse


def clears_queries(q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, scale):
    """Wrong: the rotated queries are set to 0 after the call has read them."""
    q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
    q_pe.zero_()
    return decode(q, cache, block_table, seq_lens, scale, ckv_cache.shape[-1])


def clears_keys(q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, scale):
    """Wrong: the rotated keys are set to 0 after the call has read them."""
    q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
    kpe_cache.zero_()
    return decode(q, cache, block_table, seq_lens, scale, ckv_cache.shape[-1])


def merge_in_base_2(v_a, s_a, v_b, s_b):
    """Right, except that queries without any key have NaN."""
    lse = torch.logaddexp2(s_a, s_b)
    a, b = (torch.exp2(own - lse)[..., None] for own in (s_a, s_b))
    return torch.where(a == 0, 0, a * v_a) + torch.where(b == 0, 0, b * v_b), lse


def page_lists(block_table, seq_lens, page_size):
    """Right: it makes CSR lists of pages."""
    pages = -(-seq_lens // page_size)
    used = torch.arange(block_table.shape[1]) < pages[:, None]
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    return indptr, block_table[used], seq_lens - (pages - 1).clamp(min=0) * page_size


def token_lists(block_tables, seq_lens, block_size, bs):
    """Right: it makes CSR lists of the slot of each key."""
    slots = block_tables.long()[..., None] * block_size + torch.arange(block_size)
    used = torch.arange(slots[0].numel()) < seq_lens[:, None]
    assert len(seq_lens) == bs
    return torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int(), slots.flatten(1)[used]


def page_lists_of_full_pages(block_table, seq_lens, kv_indptr, kv_indices, page_size):
    """Wrong: a last page that is not full is not listed; the lists are passed as buffers."""
    pages = seq_lens // page_size
    used = torch.arange(block_table.shape[1]) < pages[:, None]
    kv_indptr.copy_(torch.nn.functional.pad(pages.cumsum(0), (1, 0)))
    kv_indices[: int(pages.sum())] = block_table[used]
