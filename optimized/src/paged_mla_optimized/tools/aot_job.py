"""One kernel to compile, as Triton's compiler wants it described."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paged_mla_optimized.runtime.launch import FP_FUSION

_TYPES = {
    "cu_seqlens_q_ptr": "*i32",
    "cu_seqlens_k_ptr": "*i32",
    "tiles_ptr": "*i32",
    "work_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "token_starts_ptr": "*i32",
    "row_lens_ptr": "*i32",
    "local_lens_ptr": "*i32",
    "key_starts_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "firsts_ptr": "*i32",
    "req_to_token_ptr": "*i32",
    "request_ids_ptr": "*i64",
    "table_ptr": "*i32",
    "branch_blocks_ptr": "*i32",
    "prefix_table_ptr": "*i32",
    "prefix_lens_ptr": "*i32",
    "unit_starts_ptr": "*i64",
    "cut_ptr": "*i64",
    "shares_ptr": "*i64",
    "joins_ptr": "*i32",
    "join_starts_ptr": "*i32",
    "mask_starts_ptr": "*i64",
    "mask_ptr": "*u8",
    "block_table_ptr": "*i32",
    "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64",
    "is_padding_ptr": "*i8",
    "tree_words_ptr": "*i32",
    "lse_ptr": "*fp32",
    "lses_ptr": "*fp32",
    "line_lses_ptr": "*fp32",
    "chunk_lse_ptr": "*fp32",
    "partial_out_ptr": "*fp32",  # of portable kernels
    "partial_lse_ptr": "*fp32",
    "codes_ptr": "*u8",
    "q_scale_ptr": "*fp32",
    "given_scale_ptr": "*fp32",
    "cache_scale_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "softmax_scale": "fp32",
    "lse_unit": "fp32",
    "mask_elements": "i64",
}
_DENSE = {  # strides that are 1 in every engine's tensors; Triton compiles them in
    "stride_cu": 1,
    "stride_cu_q": 1,
    "stride_cu_k": 1,
    "stride_lens": 1,
    "stride_slots": 1,
    "stride_slot": 1,
    "stride_ids": 1,
    "stride_table_col": 1,
    "stride_mask_element": 1,
}
SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
}


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a Triton function, its constants, and the type of every argument."""

    name: str
    kernel: Any
    dtype: str  # of every pointer that `_TYPES` leaves open
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    types: dict[str, str] = field(default_factory=dict)  # of arguments, TMA descriptors among them
    numbers: dict[str, int] = field(default_factory=dict)  # of arguments that Triton looks at

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to another process: of the kernel, where it is found."""
        function = self.kernel.fn
        return self.__dict__ | {"kernel": (function.__module__, function.__name__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module, name = state["kernel"]
        self.__dict__.update(state, kernel=getattr(importlib.import_module(module), name))

    @property
    def source(self) -> Any:
        """The kernel as Triton's compiler wants it."""
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, self.signature, self.compiled_in, self.attributes)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages} | FP_FUSION
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options

    @property
    def compiled_in(self) -> dict[str, Any]:
        """The constants, and the arguments that Triton makes constants because they are 1."""
        ones = {name: 1 for name, value in self._specialised.items() if value == 1}
        return self.constants | ones

    @property
    def signature(self) -> dict[str, str]:
        """Type of each argument, in order."""
        table = "*fp64" if self.dtype == "fp32" else "*fp32"
        types = _TYPES | {"cos_ptr": table, "sin_ptr": table} | self.types
        compiled_in = self.compiled_in
        return {
            name: "constexpr"
            if name in compiled_in
            else types.get(name, f"*{self.dtype}" if name.endswith("_ptr") else "i32")
            for name in self.kernel.arg_names
        }

    @property
    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Tensors and their strides are aligned to 16, and so are numbers that 16 divides."""
        compiled_in, numbers = self.compiled_in, self._specialised
        return {
            (parameter.num,): [["tt.divisibility", 16]]
            for parameter in self.kernel.params
            if parameter.name not in compiled_in and not parameter.do_not_specialize
            if not parameter.do_not_specialize_on_alignment
            if _is_aligned(parameter.name, numbers.get(parameter.name))
        }

    @property
    def identity(self) -> Hashable:
        """What tells this job from every other one."""
        parts = (self.compiled_in, self.signature, self.attributes, self.options)
        return self.kernel.fn.__name__, *(tuple((k, str(v)) for k, v in p.items()) for p in parts)

    @property
    def _specialised(self) -> dict[str, int]:
        looked_at = {p.name for p in self.kernel.params if not p.do_not_specialize}
        return {
            name: value
            for name, value in self.numbers.items()
            if name in looked_at and name not in self.constants
        }


def dense(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Return constants, and among them the strides that Triton compiles in because they are 1."""
    special = {p.name for p in kernel.params if not p.do_not_specialize}
    return constants | {name: one for name, one in _DENSE.items() if name in special}


def _is_aligned(name: str, value: int | None) -> bool:
    if value is not None:
        return value % 16 == 0
    return name.startswith("stride") or name.endswith("_ptr")
