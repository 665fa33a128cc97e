"""AITER's Triton ``mla``; two launches omit an option that only AMD's compiler accepts."""

from aiter.ops.triton.attention import mla


class _Without:
    def __init__(self, kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid):
        return lambda waves_per_eu, **given: self._kernel[grid](**given)  # noqa: ARG005 - AMD's


mla.triton_mla_prefill_fwd_kernel = _Without(mla.triton_mla_prefill_fwd_kernel)
mla.triton_mla_decode_fwd_reduce_kernel = _Without(mla.triton_mla_decode_fwd_reduce_kernel)
