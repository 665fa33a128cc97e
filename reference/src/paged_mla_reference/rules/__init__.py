"""The rules in one sentence each; tests and reports cite them by id."""

from __future__ import annotations

RULES: dict[str, str] = {
    "S-1": "The slot of position p in row b is `block_table[b, p // block_size] * block_size + "
    "p % block_size`, in 64 bits; -1 means no slot.",
    "S-2": "`context_len = seq_len - query_len >= 0`; rows may be empty: `query_len` 0, or "
    "`seq_len` 0 with any `query_len` (padding). A non-causal row may have fewer keys than "
    "queries: its context is then 0, and its first `query_len - seq_len` queries are in front of "
    "the row's first position.",
    "S-3": "The position of query i is `context_len + i`, of a draft-tree node `context_len + "
    "depth(node)`; slots always follow the index, never the position. Query i of a row with "
    "fewer keys than queries has the index `seq_len - query_len + i`; a query in front of the "
    "row's first position has position 0 and slot -1.",
    "S-4": "Query i sees key j iff `j <= context_len + i` (causal, aligned to the bottom right); "
    "non-causal: `j < seq_len`; tree: every `j < context_len`, and node j iff the mask says so.",
    "S-5": "`s = softmax_scale * (q_nope . ckv + q_pe . k_pe)` and `out = sum softmax(s) ckv`; "
    "`softmax_scale` is the model's, `(N + P)^-0.5` times the squared yarn mscale, never "
    "`(R + P)^-0.5`.",
    "S-6": "A query that sees nothing, and a padded token, gets `out = 0` and `lse = -inf`; "
    "never NaN, never left unwritten.",
    "S-7": "`lse` is the natural logarithm, in float32, of the sum of exponentials of the scaled "
    "scores.",
    "S-8": "Merging partials is total: an empty partial has weight exactly 0 whatever its `out` "
    "holds, two empties give (0, -inf), and order does not matter beyond rounding.",
    "S-9": "Nothing unread matters: slots beyond a row's length, free blocks, table entries past "
    "`ceil(seq_len / block_size)` and the inputs of padded rows and tokens may hold any bits; "
    "none is used as an address, reaches a result, or is written to the cache.",
    "S-10": "Append writes exactly the rows with slot >= 0, every byte of them, and nothing else; "
    "inputs are left as they were.",
    "S-11": "A cache format states every byte of a token and where its scales live: `bf16`, `fp16` "
    "and `fp32` keep R + P elements of the problem's dtype and ignore the layer's scale; "
    "those of 8 bits store `e4m3(x / scale)`, saturating at 448, and read `e4m3 * scale` exactly, "
    "whatever float32 the scale is; `fp8.py` lists them and states every byte. "
    "Queries of 8 bits are codes with a scale in the same way, as `queries.py` states.",
    "S-12": "RoPE is applied before caching, once, at absolute positions, with interleaved or "
    "NeoX pairing, with or without yarn.",
    "S-13": "Prefix reuse is by full blocks, keyed by parent key, block tokens and extra keys; a "
    "hit is capped at n - 1 tokens; a hit and a miss give the same answer.",
    "S-14": "FULL, QLEN and packed bits are three spellings of one verify mask.",
    "S-15": "In a multi-step draft, row (b, branch j, step i) reads the prefix of b and its own "
    "i + 1 draft slots, no sibling's.",
    "S-16": "Draft-extend runs a fixed window per request; what lies past the accepted tokens is "
    "overwritten or never visible.",
    "S-17": "Graph replay equals eager, bit for bit, for every batch that fits the captured "
    "bucket, after any other replay.",
    "S-18": "In context parallelism rank r owns position p iff `(p // interleave) % world == r`; "
    "local lengths follow by formula; local results merge by S-8 to the whole.",
    "S-19": "A token's output depends on its request's tokens alone: not on chunking, batch "
    "mates, prefix hits, block ids, preemption or the step it ran in.",
    "S-20": "The number of splits, tile sizes and kernel choice are not semantics; a backend that "
    "declares itself batch-invariant gives a row the same bits whatever its batch mates.",
    "S-21": "Materialized equals absorbed: attention over the keys `[ckv W_UK || k_pe]` and values "
    "`ckv W_UV` of every head is the absorbed one with `q_nope W_UK`, its output times `W_UV`; the "
    "lse is the same, `k_nope` and `v` are rounded once, to the problem's dtype. Parts of the "
    "keys, each with its lse in nats, merge by S-8 to the whole; a row without keys in a part "
    "contributes exactly nothing. A layer's rows are all absorbed unless the mask is causal.",
    "S-22": "A query that sees one value, of one key or of n equal ones, gets that value, bit for "
    "bit in 16 bits while n * 2^p <= 2^24 (p = 8 for bfloat16, 11 for float16); `single.py` states "
    "what float32 and scales of tokens may cost. Over many rows of 2 to 64 keys the mean square "
    "error in 16 bits is that of an algorithm whose largest weight is 1 (`short.py`).",
}
