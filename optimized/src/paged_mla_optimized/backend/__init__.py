"""The package as a backend of the conformance suite, with NumPy arrays as inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.backend.places import OwnAllocations, PlacesOf
from paged_mla_optimized.config.arguments import check_at_least, check_scale
from paged_mla_optimized.config.attention import MASKS, TORCH_DTYPES, MlaConfig
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_optimized.triton_compat.unseen_work import leave_out_unseen_work
from paged_mla_shared import __version__
from paged_mla_shared.backend import Capabilities, mask_name, ops_of
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Problem

_FEATURES = frozenset(
    {
        "mixed", "padding", "replay", "strided_cache", "strided_inputs", "explicit_slots",
        "validation", "bounded",
    }
)  # fmt: skip
_FP8 = frozenset(name for name, stored in FORMATS.items() if not stored.is_plain)


def create() -> TritonBackend:
    """Return the backend in Triton's interpreter if that is active, else on the current device.

    In the interpreter the function removes work without effect on results, for the whole process.

    Raises
    ------
    Unsupported
        There is neither a GPU nor ``TRITON_INTERPRET=1``.
    """
    if is_interpreting():
        leave_out_unseen_work()
        return TritonBackend(mode="interpreter", device="Triton interpreter (CPU)")
    if torch.cuda.is_available():
        return TritonBackend(mode="gpu", device=torch.cuda.get_device_name())
    raise Unsupported("there is no CUDA device; set TRITON_INTERPRET=1 to run kernels on a CPU")


@dataclass(frozen=True, kw_only=True)
class TritonBackend:
    """An implementation of :class:`paged_mla_shared.backend.Backend`.

    Parameters
    ----------
    mode : str
        "gpu" or "interpreter".
    device : str
        Name of the device in reports.
    name, version : str
    settings : mapping of str to value
        Fields of the config that the problem does not determine, by name.
    runner : type of EagerRunner
        The class that runs steps.
    left_out : frozenset of str
        Operations and features that are not declared.
    checks_values : bool
        Whether runners check the values of a step against the rules before they plan it.
    places_of : callable
        Takes a ``torch.device`` and returns the ``Places`` that allocate a runner's tensors.
    """

    mode: str
    device: str
    name: str = "paged-mla-optimized"
    version: str = __version__
    settings: Mapping[str, Any] = field(default_factory=dict)
    runner: type[EagerRunner] = EagerRunner
    left_out: frozenset[str] = frozenset()
    checks_values: bool = True
    places_of: PlacesOf = OwnAllocations

    @property
    def memory_bytes(self) -> int:
        """Free bytes for one cache, after memory of earlier steps is released.

        Workers share a device, so memory that this process caches is returned to the device first.
        In the interpreter the number is 1 GiB.
        """
        if self.mode == "gpu":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
        return 1 << 30  # a limit for the interpreter, which is slow

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the kernels, without `left_out`.

        In the interpreter bfloat16 and huge caches are missing. "batch_invariant" is declared only
        if `settings` has it, and "validation" only with `checks_values`.
        """
        on_gpu = self.mode == "gpu"
        dtypes = {"float32", "float16"} | ({"bfloat16"} if on_gpu else set())
        features = _FEATURES | ({"large_offsets"} if on_gpu else set())
        if self.settings.get("batch_invariant"):
            features |= {"batch_invariant"}
        if not self.checks_values:
            features -= {"validation"}
        return Capabilities(
            ops=ops_of(self.runner) - self.left_out,
            dtypes=frozenset(dtypes),
            cache_formats=frozenset(PLAIN_FORMAT_OF_DTYPE[name] for name in dtypes) | _FP8,
            block_sizes=frozenset(range(1, 1057)),
            num_heads=frozenset(range(1, 129)),
            head_dims=frozenset({(512, 64), (256, 64), (256, 32), (32, 16)}),
            masks=frozenset(MASKS),
            ropes=frozenset({"interleaved", "neox"}),
            features=features - self.left_out,
            max_query_len=1 << 20,
            prefill_dims=frozenset(
                (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
                for dims in PRESETS.values()
            ),
            products=self.settings.get("products", "exact"),
        )

    def prepare(self, problem: Problem) -> EagerRunner:
        """Return a runner for `problem`; its cache has only zeros.

        Raises
        ------
        InvalidArgument
            A value of `problem` or of `settings` is outside its legal range.
        Unsupported
            The kernels or the declared capabilities do not cover `problem`.
        """
        config = _config(problem, self.settings)
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        device = "cuda" if self.mode == "gpu" else "cpu"
        runner = self.runner(problem, config, device, self.places_of)
        runner.checks_values = self.checks_values
        return runner

    def prepare_unchecked(self, problem: Problem) -> EagerRunner:
        """Return a runner that checks the values of a prefill, but of no other step.

        The function checks `problem` as :meth:`prepare` does.
        """
        return replace(self, checks_values=False).prepare(problem)


def _config(problem: Problem, settings: Mapping[str, Any]) -> MlaConfig:
    """Return the config of a problem.

    Raises
    ------
    InvalidArgument
        A value of `problem` or of `settings` is outside its legal range.
    Unsupported
        The kernels do not support a value.
    """
    if problem.dtype not in TORCH_DTYPES:
        raise InvalidArgument("dtype", problem.dtype, ", ".join(TORCH_DTYPES))
    dims = problem.dims
    check_at_least(1, num_blocks=problem.num_blocks)
    check_at_least(1, qk_nope_head_dim=dims.qk_nope_head_dim, v_head_dim=dims.v_head_dim)
    check_scale("cache_scale", problem.cache_scale)
    config = MlaConfig(
        num_heads=problem.dims.num_heads,
        softmax_scale=problem.softmax_scale,
        block_size=problem.block_size,
        max_rows=problem.max_rows,
        max_query_tokens=problem.max_query_tokens,
        max_model_len=problem.max_model_len,
        kv_lora_rank=problem.dims.kv_lora_rank,
        qk_rope_head_dim=problem.dims.qk_rope_head_dim,
        dtype=TORCH_DTYPES[problem.dtype],
        cache_format=problem.cache_format,
        mask=mask_name(problem),
        max_draft_tokens=problem.max_draft_tokens,
        rope=problem.rope,
        **settings,
    )
    itemsize = numpy_dtype(FORMATS[problem.cache_format].ckv_dtype).itemsize
    for name in ("token_padding", "block_padding"):
        padding = getattr(problem, name)
        if padding < 0 or padding % itemsize:
            raise InvalidArgument(name, padding, f"a multiple of {itemsize} bytes, >= 0")
        if config.stored.inline_scales and padding % 4:
            raise Unsupported(
                f"{name}={padding} is not supported; inline scales need a multiple of 4"
            )
    return config
