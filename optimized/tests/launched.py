"""Print the launches of random legal configs that no compiled variant covers (compiled mode).

Its arguments are how many configs are drawn for each architecture, and the architectures.
"""

import json
import random
import sys
from unittest import mock

import torch

from paged_mla_optimized.api import core, prefill
from paged_mla_optimized.api.planned import READERS
from paged_mla_optimized.config.attention import MASKS, TORCH_DTYPES, MlaConfig
from paged_mla_optimized.operations.merge.tiles import MergeTiles
from paged_mla_optimized.operations.prefill.key_chunks import KeyChunk
from paged_mla_optimized.planning.choice import demand_of
from paged_mla_optimized.planning.families import portable_variant
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_optimized.runtime.kernel_spec import SHORT
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch
from paged_mla_optimized.tools.aot_shape import shape
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Rope, RopePairing

COMPILED = ("num_warps", "num_stages", "maxnreg")  # options that shape code
DEFAULTS = {"num_warps": 4, "num_stages": 3}


def random_config(pick):
    dtype = pick.choice(list(TORCH_DTYPES))
    name = pick.choice([PLAIN_FORMAT_OF_DTYPE[dtype], *(n for n in FORMATS if n.startswith("fp8"))])
    mask = pick.choice(MASKS)
    return MlaConfig(
        num_heads=pick.choice((pick.randint(1, 16), pick.randint(1, 128))),
        softmax_scale=pick.random(),
        block_size=FORMATS[name].block_size_multiple * pick.choice((1, 2, 16, pick.randint(1, 99))),
        max_rows=int(2 ** pick.uniform(0, 12)),
        max_query_tokens=int(2 ** pick.uniform(0, 9)),
        max_model_len=64,
        kv_lora_rank=pick.choice((512, 256, 2 ** pick.randint(4, 9))),
        qk_rope_head_dim=pick.choice((64, 2 ** pick.randint(4, 6))),
        dtype=TORCH_DTYPES[dtype],
        cache_format=name,
        products=pick.choice(("exact", "fast")),
        mask=mask,
        max_draft_tokens=pick.randint(1, 99) if mask.startswith("tree") else 0,
        rope=pick.choice((None, *map(Rope, RopePairing))),
        batch_invariant=pick.random() < 0.5,
    )


def random_prefill(pick):
    high = 2 ** pick.randint(4, 8)
    low = pick.choice([0, *(2**n for n in range(4, 8) if 2**n < high and 2**n + high <= 256)])
    return prefill.PrefillConfig(
        num_heads=pick.randint(1, 128),
        softmax_scale=pick.random(),
        max_rows=int(2 ** pick.uniform(0, 12)),
        max_tokens=64,
        qk_nope_head_dim=pick.choice((128, high + low)),
        qk_rope_head_dim=pick.choice((64, 2 ** pick.randint(4, 6))),
        v_head_dim=pick.choice((128, 2 ** pick.randint(4, 8))),
        dtype=pick.choice(list(TORCH_DTYPES.values())),
        causal=pick.random() < 0.5,
        writes_empty=pick.random() < 0.5,
    )


def begin_attention(config, pick, arch):
    """Have launchers made for all steps of a config, and for a cache of its own."""
    demand = demand_of(config, arch)
    variant = pick.choice((None, portable_variant(demand, pick.randint(1, 99))))
    begun = core.Core(config, "cpu", variant=variant)
    for kind in READERS:
        begun.reader(kind)
    stored, words = config.stored, config.stored.row(config)
    dtype = torch.uint8 if config.is_fp8 else config.dtype
    latents = torch.empty((2, config.block_size, words[1]), dtype=dtype)
    for attention in begun._attentions:
        if attention._hopper is not None:
            attention._hopper.rows_of(latents, stored.scales_per_block(config.block_size))


def begin_prefill(config, *_):
    """Have launchers made for prefill, and for the merge of its chunks if it may be one."""
    begun = prefill.Prefill(config, "cpu")
    KeyChunk(config.max_rows, 64, torch.device("cpu"))
    if not config.causal:
        MergeTiles(begun.tiles.tile_m, config)


def code_of(spec):
    """Return all properties that distinguish compiled code: its constants and compiler options."""
    of_compiler = DEFAULTS | {name: n for name, n in spec.options.items() if name in COMPILED}
    return shape(spec.kernel, spec.flat_constants), frozenset(of_compiler.items())


def missing(arch, count):
    """Return launches that are of no compiled variant, and the kernels of all launches."""
    compiled, lacking, kernels, launched = {}, [], set(), []
    pick = random.Random(arch)
    for job in jobs_of_arch(arch):
        compiled.setdefault(code_of(job.spec), set()).add(job.dtype)

    def record(_, spec, **_options):
        launched.append(spec)

    facts = mock.Mock(return_value=DeviceFacts(arch, 132))
    with (
        mock.patch.object(Launcher, "__init__", record),
        mock.patch.object(core, "device_facts", facts),
        mock.patch.object(prefill, "device_facts", facts),
    ):
        for number in range(count):
            of_prefill = number % 4 == 0
            config = random_prefill(pick) if of_prefill else random_config(pick)
            (begin_prefill if of_prefill else begin_attention)(config, pick, arch)
            for spec in launched:
                kernels.add(spec.kernel.fn.__name__)
                found = compiled.get(code_of(spec), set())
                if not found & {SHORT[config.dtype], "i32"}:
                    lacking.append(f"{spec} of {config}")
            launched.clear()
    return {"missing": lacking, "kernels": sorted(kernels)}


if __name__ == "__main__":
    count, *archs = sys.argv[1:]
    json.dump({arch: missing(arch, int(count)) for arch in archs}, sys.stdout)
