"""A few small steps of every kind, for ``compute-sanitizer --tool memcheck python sanitize.py``.

``sanitize.py hopper`` and ``hopper_fp8`` run the kernels that Hopper is given over caches of 16 and
of 8 bits, ``sanitize.py portable`` the others.
"""

import sys
from dataclasses import replace

import torch
from gpu_prefill import build
from gpu_step import CONFIGS, Model, make_batch

from paged_mla_optimized import MlaConfig, PagedMla, Prefill
from paged_mla_optimized.planning.families import AttendVariant

TILES = AttendVariant(tile_m=16, tile_n=32, num_warps=4, num_stages=2, programs_per_sm=1)
LENS = [(70, 3), (0, 0), (129, 1), (0, 5), (63, 1)]
PREFILL = [(130, 130), (0, 3), (200, 70), (64, 64)]
DECODE = [(700, 1), (0, 0), (64, 1), (0, 1), (63, 1)]


def main() -> None:
    which = sys.argv[1]
    for config, lens, variant in steps_of(which):
        run(config, lens, variant)
    if which != "hopper_fp8":
        for causal in (True, False):
            run_prefill(causal=causal, portable=which == "portable")
    torch.cuda.synchronize()


def steps_of(which: str) -> list[tuple[MlaConfig, list[tuple[int, int]], AttendVariant | None]]:
    """Return configs, rows of (seq_len, query_len), and the variant or ``None``: the step's own."""
    small = {"max_rows": 8, "max_query_tokens": 16, "max_model_len": 1024}
    configs = [replace(config, **small) for config in CONFIGS.values()]
    decode = replace(configs[0], max_query_tokens=8)
    if which == "portable":
        return [(replace(config, num_heads=3), LENS, TILES) for config in configs]
    if which == "hopper":
        steps = [(replace(decode, num_heads=heads), DECODE, None) for heads in (12, 24, 128)]
        steps += [(replace(config, num_heads=64), LENS, None) for config in configs]
        steps += [(replace(decode, block_size=16), DECODE, None)]
        gathered = replace(decode, block_size=2)
        return steps + [(replace(gathered, num_heads=n), DECODE, None) for n in (16, 128)]
    steps = []
    for products in ("fast", "exact"):
        e4m3 = {"num_heads": 128, "cache_format": "fp8_e4m3", "products": products}
        steps += [(replace(config, **e4m3), LENS, None) for config in configs]
        steps += [(replace(decode, block_size=size, **e4m3), DECODE, None) for size in (16, 2)]
        for scaled in ("fp8_block_token", "fp8_block_group"):
            steps.append((replace(decode, **e4m3 | {"cache_format": scaled}), DECODE, None))
    return steps


def run(config: MlaConfig, lens: list[tuple[int, int]], variant: AttendVariant | None) -> None:
    """Append, attend and gather in four layers, twice."""
    model = Model(PagedMla(config, variant=variant))
    batch = make_batch(config, lens, 1)
    for _ in range(2):
        out, lse, _ = model.eager(batch)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    keys = int(batch.seq_lens.sum())
    ckv = torch.empty(keys, config.kv_lora_rank, dtype=config.dtype, device="cuda")
    k_pe = torch.empty(keys, config.qk_rope_head_dim, dtype=config.dtype, device="cuda")
    model.mla.gather_context(model.cache(0), ckv, k_pe)
    assert ckv.isfinite().all()
    q = batch.tokens["q"][:, 0]
    codes, _ = model.mla.quantize_queries(q[..., : ckv.shape[1]], q[..., ckv.shape[1] :])
    assert codes.float().isfinite().all()


def run_prefill(*, causal: bool, portable: bool) -> None:
    """Attend to rows of materialized heads, on the kernel that head sizes choose."""
    changes = {"qk_nope_head_dim": 32, "v_head_dim": 32} if portable else {}
    step = build(PREFILL, causal=causal, **changes)
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert step.attend(prefill)[0].isfinite().all()


if __name__ == "__main__":
    main()
