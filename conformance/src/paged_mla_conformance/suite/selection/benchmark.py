"""The cases that a definition of FlashInfer-Bench can express.

A workload of ``mla_paged_decode_*`` or ``mla_paged_prefill_causal_*`` is one call over a filled
bfloat16 cache, with dense tensors and a causal mask. Each row has query tokens, and keys for them.
"""

from __future__ import annotations

from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.params import unmet_by_case
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.cases import GROUPS, Case, append, formats, gather, layer, metadata
from paged_mla_shared.dims import DEEPSEEK_V3

HEADS = (16, 128)
PAGE_SIZES = (1, 64)
EXPRESSED = Capabilities(
    ops=frozenset({"attend"}),
    dtypes=frozenset({"bfloat16"}),
    cache_formats=frozenset({"bf16"}),
    block_sizes=frozenset(PAGE_SIZES),
    num_heads=frozenset(HEADS),
    head_dims=frozenset({(DEEPSEEK_V3.kv_lora_rank, DEEPSEEK_V3.qk_rope_head_dim)}),
    masks=frozenset({"causal"}),
    features=frozenset({"mixed"}),
    max_query_len=1 << 20,
)
"""The capabilities that the definitions of ``paged-mla export flashinfer-bench`` can express."""

_OTHERS = (metadata.GROUP, append.GROUP, gather.GROUP, layer.GROUP)
ATTENDED: dict[str, tuple[Case, ...]] = {
    name: cases for name, cases in GROUPS.items() if name not in _OTHERS
}
"""The groups whose tests call attention over the cache, with their cases."""


def expressed(case: Case, definitions: Capabilities = EXPRESSED) -> tuple[Case, list[str]]:
    """Return a case adapted to the definitions, and a phrase for each property they cannot express.

    There are no phrases if a definition can express the case.

    Parameters
    ----------
    case : Case
        Its head count and block size are replaced by the nearest ones of the definitions, unless
        the case fixes them.
    definitions : Capabilities
        The capabilities that the definitions can express.
    """
    adapted, _ = adapt_case(case, definitions)
    unmet = unmet_by_case(definitions, adapted, DEEPSEEK_V3, "bfloat16", ("attend",))
    missing = [phrase.removesuffix(" not declared") for phrase in unmet]
    if any(row.seq_len < row.query_len for step in adapted.steps for row in step):
        missing.append("rows with fewer keys than queries")
    if case.group == formats.GROUP:
        missing.append("caches of 8 bits")
    return adapted, missing
