"""Solutions of FlashInfer-Bench, whose sources are Python."""

from __future__ import annotations

import inspect
import json
import stat
from pathlib import Path

import pytest

from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.judge.probes import probe
from paged_mla_adapters.judge.probing import find
from paged_mla_adapters.judge.roles import roles_of
from paged_mla_adapters.judge.solution import Solution
from paged_mla_adapters.judge.target import calls_of, load, solution_of
from paged_mla_shared.errors import InvalidArgument

BODY = """
    for b in range(len(kv_indptr) - 1):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        ckv, kpe = (cache[slots, 0].float() for cache in (ckv_cache, kpe_cache))
        scores = sm_scale * (q_nope[b].float() @ ckv.T + q_pe[b].float() @ kpe.T)
        lse[b] = in_base_2(torch.logsumexp(scores, -1))
        output[b] = torch.softmax(scores, -1) @ ckv if len(slots) else 0
"""
INPUTS = "q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale"
PASSED = f"def run({INPUTS}, output, lse):{BODY}"
RETURNED = (
    f"def run({INPUTS}):\n    output, lse = torch.zeros_like(q_nope), torch.empty(q_nope.shape[:2])"
    f"{BODY}    return output, lse\n"
)
DECODE = "mla_paged_decode_h16_ckv512_kpe64_ps1"


def solution(folder: Path, **changes: object) -> Path:
    """Write a solution of two sources; changes are of the document or its ``spec``."""
    spec = {
        "language": "triton",
        "target_hardware": ["NVIDIA_H200"],
        "entry_point": "src/main.py::run",
        "destination_passing_style": True,
    }
    main = "import math, torch\nfrom bases import in_base_2\n\n\n"
    sources = [
        {"path": "src/main.py", "content": main + str(changes.pop("run", PASSED))},
        {
            "path": "bases.py",
            "content": "def in_base_2(lse):\n    return lse / 0.6931471805599453\n",
        },
    ]
    document = {"name": "a", "definition": DECODE, "author": "b", "sources": sources}
    spec |= {name: changes.pop(name) for name in list(changes) if name in spec}
    path = folder / "solution.json"
    path.write_text(json.dumps({**document, "spec": spec, **changes}))
    return path


@pytest.mark.parametrize("run", [PASSED, RETURNED], ids=["passed", "returned"])
def test_outputs_are_passed_or_returned(run: str, tmp_path: Path):
    """The definition says everything that is served; a call shows the base of the lse."""
    path = solution(tmp_path, run=run, destination_passing_style=run == PASSED)
    roles = roles_of(calls_of(load(str(path))), "attend", {}, {})
    promised = Claims(str(path), roles=roles, served=Solution(path).served)
    claims = find(promised, lambda _key, *asked, **how: probe(*asked, **how))
    assert claims.served == promised.served
    assert claims.served.num_heads == (16,)
    assert claims.served.block_sizes == (1,)
    assert (claims.lse, claims.cache) == ("base 2", "[blocks, size, D]")


@pytest.mark.parametrize(
    ("definition", "given"),
    [
        (DECODE, "kv_indptr kv_indices sm_scale output lse"),
        (
            DECODE.replace("ps1", "ps64"),
            "kv_indptr kv_indices kv_last_page_len sm_scale output lse",
        ),
        (
            "mla_paged_prefill_causal_h8_ckv512_kpe64_ps1",
            "qo_indptr kv_indptr kv_indices sm_scale output lse",
        ),
    ],
)
def test_what_a_definition_gives(definition: str, given: str, tmp_path: Path):
    """The order of a solution's arguments is that of its definition's inputs, then its outputs."""
    found = Solution(solution(tmp_path, definition=definition))
    assert found.parameters[4:] == given.split()
    assert found.served.mixed is definition.startswith("mla_paged_prefill")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"definition": "gqa_paged_decode_h32_kv8_d128_ps1"}, "definition: got gqa_paged"),
        ({"language": "cuda"}, "language: got cuda; allowed: python or triton"),
        ({"entry_point": "other.py::run"}, "entry_point: got other.py"),
        ({"sources": 3}, "a solution of FlashInfer-Bench"),
    ],
)
def test_what_is_no_solution(changes: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(InvalidArgument, match=message):
        Solution(solution(tmp_path, **changes))


def test_sources_stay_in_their_folder(tmp_path: Path):
    """A solution is somebody else's file: none of its sources is written elsewhere."""
    sources = [{"path": "main.py", "content": ""}, {"path": "../beside.py", "content": ""}]
    path = solution(tmp_path, sources=sources, entry_point="main.py::run")
    with pytest.raises(InvalidArgument, match=r"\.\./beside\.py"):
        Solution(path).function()


def test_nobody_else_can_write_the_sources(tmp_path: Path):
    """They lie in a folder whose name cannot be foreseen; the file itself is read once."""
    path = solution(tmp_path)
    called = solution_of(str(path)).function()
    file = Path(inspect.getfile(inspect.getclosurevars(called).nonlocals["function"]))
    folder = file.parents[1]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.unlink()
    assert load(str(path))


def test_an_entry_point_that_is_not_there(tmp_path: Path):
    path = solution(tmp_path, entry_point="src/main.py::start")
    with pytest.raises(InvalidArgument, match="entry_point: got start"):
        Solution(path).function()
