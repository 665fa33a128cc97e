"""Definitions ``mla_paged_*`` of FlashInfer-Bench: the inputs and outputs of a solution.

The names and the order of inputs and outputs follow ``flashinfer_trace/definitions/mla_paged`` at
424f2221 and 30cfc3a8. The schema follows ``flashinfer_bench/data/definition.py`` at 40e6ca78. Both
are of flashinfer-ai/flashinfer-bench.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Self

from paged_mla_shared.errors import InvalidArgument

OP_TYPE = "mla_paged"
_NAME = re.compile(r"mla_paged_(decode|prefill_causal)_h(\d+)_ckv(\d+)_kpe(\d+)_ps(\d+)")
_ALLOWED = "mla_paged_decode_h*_ckv*_kpe*_ps* or mla_paged_prefill_causal_h*_ckv*_kpe*_ps*"
_QUERY = ("num_qo_heads", "head_dim_ckv", "head_dim_kpe")


@dataclass(frozen=True)
class Definition:
    """A definition, which follows completely from its name.

    Parameters
    ----------
    is_prefill : bool
        Whether rows have any number of query tokens and a causal mask. Otherwise each row has one.
    num_heads : int
    rank, rope : int
        ``kv_lora_rank`` and ``qk_rope_head_dim``.
    page_size : int
    """

    is_prefill: bool
    num_heads: int
    rank: int
    rope: int
    page_size: int

    @classmethod
    def of(cls, argument: str, name: str) -> Self:
        """Return the definition of a name.

        Parameters
        ----------
        argument : str
            The name of the field in an error.
        name : str

        Raises
        ------
        InvalidArgument
            The name is not that of a definition of paged MLA.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise InvalidArgument(argument, name, _ALLOWED)
        numbers = [int(found[group]) for group in range(2, 6)]
        return cls(found[1] == "prefill_causal", *numbers)

    @property
    def name(self) -> str:
        """The name of the definition in FlashInfer-Bench."""
        kind = "prefill_causal" if self.is_prefill else "decode"
        sizes = f"h{self.num_heads}_ckv{self.rank}_kpe{self.rope}_ps{self.page_size}"
        return f"mla_paged_{kind}_{sizes}"

    @property
    def inputs(self) -> list[str]:
        """The names of a solution's inputs, in order."""
        names = ["q_nope", "q_pe", "ckv_cache", "kpe_cache"]
        names += ["qo_indptr"] if self.is_prefill else []
        names += ["kv_indptr", "kv_indices"]
        names += ["kv_last_page_len"] if self.page_size > 1 else []
        return [*names, "sm_scale"]

    @property
    def outputs(self) -> list[str]:
        """The names of a solution's outputs, in order."""
        return ["output", "lse"]

    def document(self) -> dict[str, Any]:
        """Return the JSON document of the definition, with this project's reference."""
        stage = "prefill" if self.is_prefill else "decode"
        return {
            "name": self.name,
            "description": f"{_DESCRIPTIONS[self.is_prefill]} Pages have {self.page_size} tokens.",
            "op_type": OP_TYPE,
            "tags": [f"stage:{stage}"],
            "axes": self._axes(),
            "constraints": [
                *(["total_q == qo_indptr[-1].item()"] if self.is_prefill else []),
                *([] if self.is_prefill else ["len_indptr == batch_size + 1"]),
                "num_kv_indices == kv_indptr[-1].item()",
            ],
            "inputs": {name: self._tensor(name) for name in self.inputs},
            "outputs": {name: self._tensor(name) for name in self.outputs},
            "reference": self.program("reference", self.inputs),
        }

    def program(self, source: str, parameters: list[str]) -> str:
        """Return the text of a source with a function ``run`` that takes parameters in order.

        Parameters
        ----------
        source : str
            A module of :mod:`paged_mla_adapters.flashinfer_bench.sources`. ``run`` passes the
            parameters by name to its ``attend``.
        parameters : list of str
        """
        text = files("paged_mla_adapters.flashinfer_bench.sources").joinpath(f"{source}.py")
        given = "".join(f"        {name}={name},\n" for name in parameters)
        run = f"def run({', '.join(parameters)}):\n    return attend(\n{given}    )\n"
        return f"{text.read_text()}\n\n{run}"

    def _axes(self) -> dict[str, Any]:
        constants = {
            "num_qo_heads": self.num_heads,
            "head_dim_ckv": self.rank,
            "head_dim_kpe": self.rope,
            "page_size": self.page_size,
        }
        shapes = [shape for name in self.inputs if (shape := self._shape(name)) is not None]
        axes = {}
        for axis in dict.fromkeys(axis for shape in shapes for axis in shape):
            value = {"value": constants[axis]} if axis in constants else {}
            kind = "const" if axis in constants else "var"
            axes[axis] = {"type": kind, **value, "description": _AXES[axis]}
        return axes

    def _tensor(self, name: str) -> dict[str, Any]:
        dtype = {"sm_scale": "float32", "lse": "float32"}.get(name, "bfloat16")
        if name.startswith(("qo_", "kv_")):
            dtype = "int32"
        return {"shape": self._shape(name), "dtype": dtype, "description": _ABOUT[name]}

    def _shape(self, name: str) -> list[str] | None:
        tokens = "total_q" if self.is_prefill else "batch_size"
        heads, rank, rope = _QUERY
        return {
            "q_nope": [tokens, heads, rank],
            "q_pe": [tokens, heads, rope],
            "ckv_cache": ["num_pages", "page_size", rank],
            "kpe_cache": ["num_pages", "page_size", rope],
            "qo_indptr": ["len_indptr"],
            "kv_indptr": ["len_indptr"],
            "kv_indices": ["num_kv_indices"],
            "kv_last_page_len": ["batch_size"],
            "output": [tokens, heads, rank],
            "lse": [tokens, heads],
            "sm_scale": None,
        }[name]


_DESCRIPTIONS = {
    False: "Paged MLA attention with one query token for each row, whose key is in the cache.",
    True: "Causal paged MLA attention with any number of query tokens for each row. The last query "
    "token is at the position of the row's last key.",
}
_AXES = {
    "batch_size": "The number of rows.",
    "total_q": "The number of query tokens of all rows.",
    "num_qo_heads": "The number of query heads on this rank.",
    "head_dim_ckv": "The width of a latent.",
    "head_dim_kpe": "The width of a rotated key.",
    "page_size": "The number of tokens in a page.",
    "num_pages": "The number of pages in the cache.",
    "len_indptr": "The number of rows plus 1.",
    "num_kv_indices": "The number of pages of all rows.",
}
_ABOUT = {
    "q_nope": "The absorbed queries.",
    "q_pe": "The rotated queries.",
    "ckv_cache": "The latents. Tokens that belong to no row may have any values, also NaN.",
    "kpe_cache": "The rotated keys. Tokens that belong to no row may have any values, also NaN.",
    "qo_indptr": "The start of each row's query tokens, and the end of the last row.",
    "kv_indptr": "The start of each row's pages in kv_indices, and the end of the last row.",
    "kv_indices": "The pages of each row, in order.",
    "kv_last_page_len": "The number of tokens in the last page of each row.",
    "sm_scale": "The factor of the scores. A model's factor follows from the width of its heads "
    "before absorption.",
    "output": "The weighted sums of latents.",
    "lse": "The base-2 logarithms of the sums of exponentials of the scaled scores.",
}
