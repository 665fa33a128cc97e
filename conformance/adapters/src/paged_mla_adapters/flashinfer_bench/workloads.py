"""Workloads made from cases of the suite: the tensors of a solution's call, and their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_adapters.flashinfer_bench.definition import Definition
from paged_mla_conformance.suite.selection.benchmark import ATTENDED, EXPRESSED, expressed
from paged_mla_conformance.suite.trials.trial import Stage
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import DEEPSEEK_V3
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Problem, cu_seqlens_of

DTYPE = "bfloat16"
LARGEST = 8 << 20  # the most bytes of a workload's tensors
IN_ONE_TOKEN_PAGES = ("decode", "extend")
_ONE_TOKEN = replace(EXPRESSED, block_sizes=frozenset({1}))


@dataclass(frozen=True)
class Workload:
    """One call of a solution.

    Parameters
    ----------
    case : Case
        A case of one step, with a number of heads and a block size that a definition has.
    """

    case: Case

    @cached_property
    def problem(self) -> Problem:
        """The problem of the case, with the dims of DeepSeek-V3 in bfloat16."""
        return self.case.problem(DEEPSEEK_V3, DTYPE)

    @property
    def definition(self) -> Definition:
        """The definition of the workload: decode if no row has several query tokens."""
        dims = self.problem.dims
        sizes = (dims.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim)
        return Definition(self.case.max_query_len > 1, *sizes, self.problem.block_size)

    @property
    def nbytes(self) -> int:
        """The number of bytes of queries and cache, computed without creating them."""
        tokens = sum(row.query_len for row in self.case.rows)
        cached = self.problem.num_blocks * self.problem.block_size
        dims = self.problem.dims
        return 2 * dims.cached_dim * (tokens * dims.num_heads + cached)

    def stage(self) -> Stage:
        """Return the only step of the case, with the cache that the reference builds."""
        [step] = build_steps(self.case, DEEPSEEK_V3, DTYPE)
        return Stage.of(step)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the tensors by the names of the definition's inputs.

        Pages of no row, and slots after the last token of a row, contain the suite's poison: NaN
        and huge numbers (S-9).
        """
        stage = self.stage()
        batch, layout, rank = stage.batch, stage.problem.layout, stage.problem.dims.kv_lora_rank
        blocks = stage.after.read(np.arange(layout.num_blocks, dtype=np.int64))
        cache = blocks.view(batch.ckv.dtype).reshape(layout.num_blocks, layout.block_size, -1)
        pages = -(-batch.seq_lens // layout.block_size)
        owned = np.arange(batch.block_table.shape[1]) < pages[:, None]
        found = {
            "q_nope": batch.q_nope,
            "q_pe": batch.q_pe,
            "ckv_cache": cache[..., :rank],
            "kpe_cache": cache[..., rank:],
            "qo_indptr": batch.cu_seqlens_q,
            "kv_indptr": cu_seqlens_of(pages),
            "kv_indices": batch.block_table[owned],
            "kv_last_page_len": batch.seq_lens - (pages - 1) * layout.block_size,
        }
        return {name: found[name] for name in self.definition.inputs if name in found}

    def document(self, path: str, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Return the document of a workload.

        Parameters
        ----------
        path : str
            The path of the file with the tensors, from the root of the exported folder.
        tensors : mapping of str to array
        """
        definition = self.definition.document()
        axes: dict[str, int] = {}
        for name, array in tensors.items():
            axes |= dict(zip(definition["inputs"][name]["shape"], array.shape, strict=True))
        constants = {n for n, axis in definition["axes"].items() if axis["type"] == "const"}
        inputs = {name: _in_file(path, name) for name in tensors}
        scale = {"type": "scalar", "value": self.problem.softmax_scale}
        workload = {
            "uuid": self.case.id,
            "axes": {name: size for name, size in axes.items() if name not in constants},
            "inputs": {**inputs, "sm_scale": scale},
        }
        return {
            "definition": definition["name"],
            "workload": workload,
            "solution": None,
            "evaluation": None,
        }


def _in_file(path: str, name: str) -> dict[str, str]:
    return {"type": "safetensors", "path": path, "tensor_key": name}


@dataclass
class Selection:
    """The cases of the suite that attend to a cache.

    Parameters
    ----------
    workloads : dict of Definition to list of Workload
        The workloads of the cases that a definition can express.
    left_out : dict of str to list of str
        The other cases, by the reason: a property that no definition has, or the size.
    """

    workloads: dict[Definition, list[Workload]] = field(default_factory=lambda: defaultdict(list))
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def take(self, case: Case) -> None:
        """Add a case that a definition can express, unless it is larger than :data:`LARGEST`."""
        workload = Workload(case)
        if workload.nbytes <= LARGEST:
            self.workloads[workload.definition].append(workload)
        else:
            place = f"{case.id} in pages of {case.block_size}"
            self.left_out[f"tensors of more than {LARGEST >> 20} MiB"].append(place)


def select() -> Selection:
    """Return all cases that a definition can express, except those larger than :data:`LARGEST`.

    A case of a group in :data:`IN_ONE_TOKEN_PAGES` has a second workload with pages of one token,
    unless the case tests its block size.
    """
    found = Selection()
    for case in (case for cases in ATTENDED.values() for case in cases):
        adapted, missing = expressed(case)
        if missing:
            found.left_out[missing[0]].append(case.id)
            continue
        found.take(adapted)
        one_token, missing = expressed(case, _ONE_TOKEN)
        if case.group in IN_ONE_TOKEN_PAGES and adapted != one_token and not missing:
            found.take(one_token)
    return found
