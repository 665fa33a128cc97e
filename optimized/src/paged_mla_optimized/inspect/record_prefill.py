"""Record prefills: attention over the keys and values of every head is written to dumps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.inspect.samples import Samples
from paged_mla_optimized.runtime.arrays import to_numpy, to_numpy_spread
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Problem

_RANK = 512  # rank of latents, which does not affect a prefill


class PrefillRecorder:
    """Records the calls of a :class:`Prefill` in :class:`Samples`.

    Raises
    ------
    Unsupported
        The instance does not write all outputs, which dumps cannot represent.
    """

    def __init__(self, prefill: Prefill, samples: Samples) -> None:
        if not prefill.config.writes_empty:
            raise Unsupported(
                "writes_empty=False is not supported by record, because a dump contains all "
                "outputs; use writes_empty=True"
            )
        self._prefill, self._samples = prefill, samples
        self._plan, self._attend = prefill.plan, prefill.attend
        self._step, self._layer = -1, 0
        self._given: dict[str, torch.Tensor] = {}  # lengths of the step, if it is sampled

    def plan(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *, num_tokens: int
    ) -> None:
        """Plan, and store the lengths of a sampled step."""
        self._plan(cu_seqlens_q, cu_seqlens_k, num_tokens=num_tokens)
        self._step, self._layer = self._step + 1, 0
        self._given = {}
        if self._samples.wants_step(self._step):
            given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
            # Copies: the engine may write the next step's lengths after planning.
            self._given = {name: tensor.clone() for name, tensor in given.items()}

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        v: torch.Tensor,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and write a dump if the layer is sampled and the dump fits."""
        out, lse = self._attend(q_nope, q_pe, k_nope, k_pe, v, **named)
        if self._given and self._samples.wants(self._step, self._layer):
            given = {"q_nope": q_nope, "q_pe": q_pe, "k_nope": k_nope, "k_pe": k_pe, "v": v}
            size = sum(tensor.nbytes for tensor in (*given.values(), out, lse))
            if self._samples.has_room(size):
                arrays = {name: to_numpy_spread(tensor) for name, tensor in given.items()}
                lengths = {name: to_numpy(tensor) for name, tensor in self._given.items()}
                self._write(arrays | lengths | {"out": to_numpy(out), "lse": to_numpy(lse)})
        self._layer += 1
        return out, lse

    def _write(self, arrays: dict[str, NDArray[Any]]) -> None:
        config = self._prefill.config
        dtype = DTYPE_NAMES[config.dtype]
        nope, rope, value = config.head_dims
        arrays["causal"] = np.array(config.causal)
        problem = Problem(
            dims=MlaDims(config.num_heads, _RANK, rope, nope, value),
            dtype=dtype,
            cache_format=PLAIN_FORMAT_OF_DTYPE[dtype],
            block_size=1,
            num_blocks=1,
            max_rows=config.max_rows,
            max_query_tokens=config.max_tokens,
            max_model_len=max(int(np.diff(arrays["cu_seqlens_k"]).max(initial=1)), 1),
            softmax_scale=config.softmax_scale,
        )
        dump = Dump(
            problem=problem,
            arrays={f"prefill_{name}": array for name, array in arrays.items()},
            origin=f"step {self._step}, layer {self._layer}",
        )
        self._samples.write(dump, f"{self._step:06}-{self._layer:03}")
