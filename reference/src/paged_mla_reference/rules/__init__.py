"""The text of each rule; tests and reports cite rules by id."""

from __future__ import annotations

SPECIFICATION_VERSION = "1.0"
"""The version of the specification, "major.minor"; ``reference/docs/rules.md`` states what changes
each number."""

RULES: dict[str, str] = {
    "S-1": "The slot of position p in row b is `block_table[b, p // block_size] * block_size + "
    "p % block_size`, computed in 64 bits. Slot -1 means that a token has no slot.",
    "S-2": "A row has `context_len = seq_len - query_len >= 0` tokens of context. `query_len` may "
    "be 0. A padded row has `seq_len` 0 with any `query_len`, and its `context_len` is 0. A "
    "non-causal row may have fewer keys than queries: its `context_len` is then 0, and its first "
    "`query_len - seq_len` queries are in front of the row's first position.",
    "S-3": "Query i of a row has the index `seq_len - query_len + i`. Its position is equal to its "
    "index, but the position of a draft-tree node is `context_len + depth(node)`. A slot always "
    "follows from the index, never from the position. A query in front of the row's first "
    "position has a negative index: its position is 0 and its slot is -1.",
    "S-4": "With a causal mask, query i sees key j if and only if `j <= context_len + i`: the mask "
    "is aligned to the bottom right. With a non-causal mask, it sees every key `j < seq_len`. "
    "With a tree mask, it sees every key `j < context_len`, and it sees a draft node if and only "
    "if the mask sets that node for query i.",
    "S-5": "The scores are `s = softmax_scale * (q_nope . ckv + q_pe . k_pe)`, and the output is "
    "`out = sum softmax(s) ckv`. `softmax_scale` is the model's scale, `(N + P)^-0.5` times the "
    "squared YaRN mscale, and never `(R + P)^-0.5`.",
    "S-6": "A query that sees no key, and a padded token, have `out = 0` and `lse = -inf`. These "
    "outputs are never NaN and never left unwritten.",
    "S-7": "`lse` is the natural logarithm, in float32, of the sum of the exponentials of the "
    "scaled scores.",
    "S-8": "Every set of partial results can be merged. An empty partial result has weight exactly "
    "0, for any content of its `out`. A merge of only empty partial results returns `(0, -inf)`. "
    "The order of the partial results does not change the merged result beyond rounding.",
    "S-9": "Unread memory has no effect. Slots beyond a row's length, free blocks, table entries "
    "past `ceil(seq_len / block_size)`, and the inputs of padded rows and tokens may hold any "
    "bits. None of these bits is used as an address, reaches a result, or is written to the cache.",
    "S-10": "An append writes every byte of the slot of each token whose slot is >= 0, and it "
    "writes nothing else. It leaves its inputs unchanged.",
    "S-11": "A cache format specifies every byte of a token and where its scales are stored. "
    "`bf16`, `fp16` and `fp32` store R + P elements of the problem's dtype and ignore the layer's "
    "scale. The 8-bit formats store `e4m3(x / scale)`, which saturates at 448, and read exactly "
    "`e4m3 * scale`, for any float32 scale; `fp8.py` lists these formats and specifies every byte. "
    "8-bit queries are codes with a scale in the same way, as `queries.py` specifies.",
    "S-12": "RoPE is applied once, before caching, at absolute positions, with interleaved or "
    "NeoX pairing, and with or without YaRN.",
    "S-13": "A request reuses only full blocks of a prefix. The key of a block is computed from "
    "its parent's key, its tokens and the extra keys. A hit covers at most n - 1 of the n tokens "
    "of a prompt. A hit and a miss give the same output.",
    "S-14": "The FULL, QLEN and PACKED spellings encode the same verify mask.",
    "S-15": "In a multi-step draft, row (b, branch j, step i) reads the prefix of request b and "
    "the i + 1 draft slots of its own branch. It reads no draft slot of another branch.",
    "S-16": "A draft-extend step runs a fixed window of tokens for each request. Cache entries "
    "past the accepted tokens are overwritten or are never visible.",
    "S-17": "A graph replay returns the same bits as an eager run, for every batch that fits the "
    "captured bucket and after any other replay.",
    "S-18": "In context parallelism, rank r owns position p if and only if `(p // interleave) % "
    "world == r`. The local length of a row is a function of its `seq_len` and the rank. The "
    "local results merge by S-8 to the result over all keys.",
    "S-19": "The output of a token depends only on the tokens of its request. It does not depend "
    "on chunking, on other rows of the batch, on prefix hits, on block ids, on preemption or on "
    "the step in which the token runs.",
    "S-20": "The number of splits, the tile sizes and the choice of the kernel do not change the "
    "meaning of a result. A backend that declares itself batch-invariant returns the same bits "
    "for a row with any other rows in its batch.",
    "S-21": "Materialized and absorbed attention are equal. Attention over the keys `[ckv W_UK || "
    "k_pe]` and the values `ckv W_UV` of every head returns the output of absorbed attention with "
    "the queries `q_nope W_UK`, times `W_UV`. The lse is the same. `k_nope` and `v` are rounded "
    "once, to the problem's dtype. Results over parts of the keys, each with its lse in nats, "
    "merge by S-8 to the result over all keys; a part in which a row has no keys contributes "
    "exactly nothing to that row. All rows of a layer are absorbed unless the mask is causal.",
    "S-22": "A query that sees one value, of one key or of n equal keys, has that value as its "
    "output. In 16 bits the output is equal bit for bit while n * 2^p <= 2^24 (p = 8 for bfloat16, "
    "11 for float16); `single.py` states the errors that float32 and the scales of tokens may "
    "cause. Over many rows of 2 to 64 keys, the mean square error in 16 bits is the error of an "
    "algorithm whose largest weight is 1 (`short.py`).",
}
