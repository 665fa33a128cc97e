"""A few small steps of every kind, for ``compute-sanitizer --tool memcheck python sanitize.py``."""

from dataclasses import replace

import torch
from gpu_step import CONFIG, CONFIGS, Model, make_batch

from paged_mla_optimized import PagedMla
from paged_mla_optimized.variants import AttendVariant

TILES = AttendVariant(tile_m=16, tile_n=32, num_warps=4, num_stages=2, programs_per_sm=1)
LENS = [(70, 3), (0, 0), (129, 1), (0, 5), (63, 1)]


def main() -> None:
    for config in CONFIGS.values():
        small = replace(config, num_heads=3, max_rows=8, max_query_tokens=16, max_model_len=256)
        model = Model(PagedMla(small, variant=TILES))
        batch = make_batch(small, LENS, 1)
        for _ in range(2):
            out, lse, _ = model.eager(batch)
        assert out.isfinite().all()
        assert lse.isfinite().all()
        keys = int(batch.seq_lens.sum())
        ckv = torch.empty(keys, CONFIG.kv_lora_rank, dtype=CONFIG.dtype, device="cuda")
        k_pe = torch.empty(keys, CONFIG.qk_rope_head_dim, dtype=CONFIG.dtype, device="cuda")
        model.mla.gather_context(model.caches[0], ckv, k_pe)
        assert ckv.isfinite().all()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
