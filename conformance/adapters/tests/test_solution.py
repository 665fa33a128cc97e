"""Tests of solutions of FlashInfer-Bench, in Python and in compiled languages."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch

from paged_mla_adapters.flashinfer_bench import builder
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
    """Write a solution of two sources with changes in the document or its ``spec``."""
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
@pytest.mark.parametrize("said", ["said", "by number"])
def test_outputs_are_passed_or_returned(run: str, said: str, tmp_path: Path):
    """The definition fixes all supported values, and a call shows the base of the lse."""
    style = run == PASSED if said == "said" else None
    path = solution(tmp_path, run=run, destination_passing_style=style)
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
def test_the_arguments_of_a_definition(definition: str, given: str, tmp_path: Path):
    """A solution's arguments are the inputs of the definition and then its outputs."""
    found = Solution(solution(tmp_path, definition=definition))
    assert found.parameters(lambda *_: None)[4:] == given.split()
    assert found.served.mixed is definition.startswith("mla_paged_prefill")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"definition": "gqa_paged_decode_h32_kv8_d128_ps1"}, "definition: got gqa_paged"),
        ({"language": "rust"}, "language: got rust; allowed: python, triton, cuda, cpp, tilelang"),
        ({"language": []}, r"language: got \[\]; allowed: python, triton"),
        (
            {"sources": [{"path": "a.py", "content": 5}]},
            r"sources\[0\].content: got 5; allowed: a st",
        ),
        ({"sources": [{"path": 5, "content": ""}]}, r"sources\[0\].path: got 5; allowed: a string"),
        ({"entry_point": "other.py::run"}, "entry_point: got other.py"),
        ({"sources": 3}, "a solution of FlashInfer-Bench"),
    ],
)
def test_files_that_are_not_solutions(changes: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(InvalidArgument, match=message):
        Solution(solution(tmp_path, **changes))


BENCH = {  # a package that records calls of the functions that are used
    "__init__.py": "",
    "data.py": """
class Definition:
    def __init__(self, **document): self.document = document

class Solution(Definition): pass
""",
    "compile.py": """
import types

class BuilderRegistry:
    @classmethod
    def get_instance(cls): return cls()

    def build(self, definition, solution):
        if "no kernel" in solution.document["sources"][0]["content"]:
            raise RuntimeError("nvcc: no kernel")
        source = {s["path"]: s["content"] for s in solution.document["sources"]}["kernel.cu"]
        module = types.ModuleType("built")
        exec(source, vars(module))
        names = [*definition.document["inputs"], *definition.document["outputs"]]
        def run(*given): return module.run(**dict(zip(names, given, strict=True)))
        return run
""",
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package flashinfer_bench first on the path; its builder takes Python as CUDA."""
    folder = tmp_path / "bench" / "flashinfer_bench"
    folder.mkdir(parents=True)
    for name, text in BENCH.items():
        (folder / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer_bench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder.parent)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer_bench"]:
        del sys.modules[name]


def cuda_solution(folder: Path, content: str) -> Path:
    """Write a solution whose language is CUDA."""
    sources = [{"path": "kernel.cu", "content": content}]
    return solution(folder, language="cuda", entry_point="kernel.cu::run", sources=sources)


@pytest.mark.usefixtures("bench")
def test_flashinfer_bench_builds_compiled_solutions(tmp_path: Path):
    """A compiled solution receives its arguments in order, as a solution in Python does."""
    body = PASSED.replace("in_base_2(torch.logsumexp(scores, -1))", "torch.logsumexp(scores, -1)")
    path = cuda_solution(tmp_path, f"import torch\n{body}")
    roles = roles_of(calls_of(load(str(path))), "attend", {}, {})
    promised = Claims(str(path), roles=roles, served=Solution(path).served)
    claims = find(promised, lambda _key, *asked, **how: probe(*asked, **how))
    assert claims.served == promised.served
    assert claims.lse == "natural"


@pytest.mark.usefixtures("bench")
def test_a_failed_build_reports_the_reason(tmp_path: Path):
    path = cuda_solution(tmp_path, "no kernel")
    with pytest.raises(RuntimeError, match="nvcc: no kernel"):
        load(str(path))


def test_cuda_needs_flashinfer_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "find_spec", lambda _name: None)
    said = "language: got cuda; allowed: python or triton; and cuda after pip install flashinfer-b"
    with pytest.raises(InvalidArgument, match=said):
        Solution(cuda_solution(tmp_path, "__global__ void run();"))


ADDED = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

void run(tvm::ffi::TensorView q_nope, tvm::ffi::TensorView, tvm::ffi::TensorView,
         tvm::ffi::TensorView, tvm::ffi::TensorView, tvm::ffi::TensorView, double sm_scale,
         tvm::ffi::TensorView, tvm::ffi::TensorView lse) {
  static_cast<float*>(lse.data_ptr())[0] = static_cast<float>(sm_scale);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
"""


def test_flashinfer_bench_compiles_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The test uses the installed package, its TVM-FFI and the machine's compiler."""
    pytest.importorskip("flashinfer_bench")
    pytest.importorskip("tvm_ffi")
    if not (shutil.which("ninja") and shutil.which("g++")):
        pytest.skip("no ninja, or no g++")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    sources = [{"path": "kernel.cc", "content": ADDED}]
    spec = {"language": "cpp", "target_hardware": ["cpu"], "entry_point": "kernel.cc::run"}
    call = load(str(solution(tmp_path, sources=sources, **spec)))
    names = Solution(solution(tmp_path, sources=sources, **spec)).parameters(lambda *_: None)
    given = {name: torch.zeros(1) for name in names} | {"sm_scale": 0.5}
    call(**given)
    assert given["lse"].item() == 0.5


def test_sources_stay_in_their_folder(tmp_path: Path):
    """A solution comes from other people, so its sources must stay in their folder."""
    sources = [{"path": "main.py", "content": ""}, {"path": "../beside.py", "content": ""}]
    path = solution(tmp_path, sources=sources, entry_point="main.py::run")
    with pytest.raises(InvalidArgument, match=r"\.\./beside\.py"):
        Solution(path).function()


def test_other_users_cannot_write_the_sources(tmp_path: Path):
    """The folder has an unpredictable name, and the solution's file is read once."""
    path = solution(tmp_path)
    called = solution_of(str(path)).function()
    file = Path(inspect.getfile(inspect.getclosurevars(called).nonlocals["function"]))
    folder = file.parents[1]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.unlink()
    assert load(str(path))


def test_an_entry_point_that_does_not_exist(tmp_path: Path):
    path = solution(tmp_path, entry_point="src/main.py::start")
    with pytest.raises(InvalidArgument, match="entry_point: got start"):
        Solution(path).function()
