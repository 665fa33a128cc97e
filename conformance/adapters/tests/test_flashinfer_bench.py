"""Tests of the export for FlashInfer-Bench: schema, reference and solutions."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paged_mla_adapters.arrays import to_numpy, to_torch
from paged_mla_adapters.flashinfer_bench import command
from paged_mla_adapters.flashinfer_bench.definition import OP_TYPE, Definition
from paged_mla_adapters.flashinfer_bench.trace_set import export, solution_of
from paged_mla_adapters.flashinfer_bench.workloads import LARGEST, Selection, Workload, select
from paged_mla_conformance.meta.tolerances.checks import passes_bench
from paged_mla_reference.oracle import RIGHT
from paged_mla_reference.tolerance import compare
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Output

SELECTED = select()
FEW = {  # the smallest workload of each definition
    definition: [min(workloads, key=lambda workload: workload.nbytes)]
    for definition, workloads in SELECTED.workloads.items()
}
FIELDS = {  # of flashinfer_bench/data at 40e6ca78: required and optional fields
    "definition": (
        {"name", "op_type", "axes", "inputs", "outputs", "reference"},
        {"tags", "description", "constraints"},
    ),
    "solution": ({"name", "definition", "author", "spec", "sources"}, {"description"}),
    "spec": (
        {"language", "target_hardware", "entry_point"},
        {"dependencies", "destination_passing_style", "binding"},
    ),
    "trace": ({"definition", "workload"}, {"solution", "evaluation"}),
    "workload": ({"axes", "inputs", "uuid"}, set()),
}


def has_fields(kind: str, document: dict[str, object]) -> bool:
    """Return whether a document has the required fields of the schema and no unknown fields."""
    needed, allowed = FIELDS[kind]
    return needed <= set(document) <= needed | allowed


def function_of(program: str):
    """Return the entry point that a program defines."""
    namespace: dict[str, object] = {}
    exec(compile(program, "program", "exec"), namespace)
    return namespace["run"]


def given(workload: Workload) -> list[object]:
    """Return the arguments of a workload in order."""
    tensors = workload.tensors()
    scale = workload.problem.softmax_scale
    names = workload.definition.inputs
    return [to_torch(tensors[n], "cpu") if n in tensors else scale for n in names]


def test_every_definition_has_workloads_of_its_kind():
    """There are workloads of both kinds, with few and all heads, in pages of 1 and 64 tokens."""
    sizes = {(d.is_prefill, d.num_heads, d.page_size) for d in SELECTED.workloads}
    assert len(sizes) == len(SELECTED.workloads) == 8
    for definition, workloads in SELECTED.workloads.items():
        queries = {row.query_len for w in workloads for row in w.case.rows}
        assert (max(queries) > 1) == definition.is_prefill
        assert min(queries) > 0
        assert max(workload.nbytes for workload in workloads) <= LARGEST
        assert len({workload.case.id for workload in workloads}) == len(workloads)


def test_cases_that_are_left_out_have_a_reason():
    missing = SELECTED.left_out
    assert "decode-h40" in missing["num_heads 40"]
    assert "decode-33k-keys in pages of 64" in missing["tensors of more than 8 MiB"]
    assert "mask tree:qlen" in missing
    assert "feature padding" in missing


@pytest.mark.parametrize("definition", SELECTED.workloads, ids=lambda d: d.name)
def test_a_definition_follows_the_schema(definition: Definition):
    """Each axis of a shape is declared, and each variable axis is an axis of an input."""
    document = definition.document()
    assert has_fields("definition", document)
    assert document["op_type"] == OP_TYPE
    assert Definition.of("name", document["name"]) == definition
    of_inputs = [tensor["shape"] or [] for tensor in document["inputs"].values()]
    of_outputs = [tensor["shape"] for tensor in document["outputs"].values()]
    named = {axis for shape in of_inputs for axis in shape}
    assert named == set(document["axes"])
    assert {axis for shape in of_outputs for axis in shape} <= named
    for constraint in document["constraints"]:
        ast.parse(constraint, mode="eval")
    [*_, run] = ast.parse(document["reference"]).body
    assert isinstance(run, ast.FunctionDef)
    assert [a.arg for a in run.args.args] == list(document["inputs"])


@pytest.mark.parametrize(
    "workload",
    [w for workloads in FEW.values() for w in workloads],
    ids=lambda w: w.definition.name,
)
def test_the_reference_agrees_with_the_oracle(workload: Workload):
    """S-5, S-7: memory of no row contains NaN, which the reference does not read."""
    stage = workload.stage()
    right = RIGHT.attend(stage.problem, stage.batch, stage.after)
    arguments = given(workload)
    assert torch.isnan(arguments[2].float()).any()
    out, lse = function_of(workload.definition.document()["reference"])(*arguments)
    np.testing.assert_allclose(out.float().numpy(), right.out.astype(np.float32), atol=2e-2)
    np.testing.assert_allclose(lse.numpy() * np.log(2), right.lse, rtol=1e-5, atol=1e-5)


def test_a_right_output_may_exceed_the_tolerance():
    """S-5: the tolerance does not grow with the latents, but the rounding of weights does."""
    workloads = [w for of in SELECTED.workloads.values() for w in of]
    [workload, _] = [w for w in workloads if w.case.id == "decode-latents-200"]
    stage = workload.stage()
    right = RIGHT.attend(stage.problem, stage.batch, stage.after)
    compare.check_output(stage.problem, stage.batch, right, *stage.answers())
    out, lse = function_of(workload.definition.document()["reference"])(*given(workload))
    assert not passes_bench(right, Output(to_numpy(out), lse.numpy() * np.float32(np.log(2))))


def test_rows_without_pages_have_no_keys():
    """S-6: one row has no pages, and another has no query tokens."""
    q, cache = torch.ones(2, 1, 4), torch.ones(3, 2, 4)
    indptr, indices = torch.tensor([0, 0, 2]), torch.tensor([2, 0])
    definition = Definition(is_prefill=True, num_heads=1, rank=4, rope=4, page_size=2)
    run = function_of(definition.document()["reference"])
    queries, last = torch.tensor([0, 1, 2]), torch.tensor([1, 1])
    out, lse = run(q, q, cache, cache, queries, indptr, indices, last, 0.5)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    assert (out[1] == 1).all()
    _, lse = run(q[:1], q[:1], cache, cache, queries.clamp(max=1), indptr, indices, last, 0.5)
    assert torch.isneginf(lse).all()


IN_THE_INTERPRETER = """
import sys
import torch
from test_flashinfer_bench import FEW, function_of, given
from paged_mla_adapters.flashinfer_bench.trace_set import solution_of

for definition, [workload] in FEW.items():
    if definition.num_heads > 16:
        continue
    arguments = [a.half() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                 for a in given(workload)]
    expected = function_of(definition.document()["reference"])(*arguments)
    found = [torch.empty_like(tensor) for tensor in expected]
    program = solution_of(definition)["sources"][0]["content"]
    function_of(program)(*arguments, *found)
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=2e-3, atol=2e-3)
    print(definition.name)
"""


def test_solutions_run_in_the_interpreter():
    """The test uses few heads and float16, which Triton's interpreter computes correctly."""
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [d.name for d in FEW if d.num_heads == 16], done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the smallest workload of each definition."""
    made = tmp_path_factory.mktemp("exported") / "set"
    sizes = dict(export(Selection(FEW, {"mask tree": ["verify-a", "verify-b"]}), made))
    assert list(sizes) == list(FEW)
    return made


def test_a_folder_has_the_layout_of_a_trace_set(folder: Path):
    for definition, [workload] in FEW.items():
        name = definition.name
        document = json.loads((folder / f"definitions/{OP_TYPE}/{name}.json").read_text())
        assert document == definition.document()
        [path] = (folder / f"solutions/paged-mla/{OP_TYPE}/{name}").glob("*.json")
        solution = json.loads(path.read_text())
        assert has_fields("solution", solution)
        assert has_fields("spec", solution["spec"])
        assert (solution["name"], solution["definition"]) == (path.stem, name)
        [line] = (folder / f"workloads/{OP_TYPE}/{name}.jsonl").read_text().splitlines()
        trace = json.loads(line)
        assert has_fields("trace", trace)
        assert has_fields("workload", trace["workload"])
        assert trace["workload"]["uuid"] == workload.case.id
        assert list(trace["workload"]["inputs"]) == definition.inputs
        varying = {n for n, axis in document["axes"].items() if axis["type"] == "var"}
        assert set(trace["workload"]["axes"]) == varying
    assert "- mask tree: verify-a, verify-b\n" in (folder / "README.md").read_text()


def test_flashinfer_bench_reads_the_exported_folder(folder: Path, tmp_path: Path, monkeypatch):
    """FlashInfer-Bench accepts the folder with its schema, builders and check of tensors."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    data = pytest.importorskip("flashinfer_bench.data")
    utils = pytest.importorskip("flashinfer_bench.bench.utils")
    compiling = pytest.importorskip("flashinfer_bench.compile")

    trace_set = data.TraceSet.from_path(str(folder))
    assert len(trace_set.definitions) == len(trace_set.solutions) == len(FEW)
    builders = compiling.BuilderRegistry.get_instance()
    for name, definition in trace_set.definitions.items():
        [solution] = trace_set.solutions[name]
        [trace] = trace_set.workloads[name]
        tensors = utils.load_safetensors(definition, trace.workload, trace_set.root)
        inputs = utils.gen_inputs(definition, trace.workload, "cpu", safe_tensors=tensors)
        assert definition.get_axes_values_from_inputs(inputs) == trace.workload.axes
        out, _ = builders.build_reference(definition)(*inputs)
        assert torch.isfinite(out).all()
        assert builders.build(definition, solution).metadata.destination_passing_style


def test_a_folder_that_is_not_empty_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["flashinfer-bench", str(folder)]) == 2
    assert "FOLDER: got" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="an empty folder, or a path that does not exist"):
        next(export(Selection(FEW), folder / "README.md"))


def test_the_command_lists_written_and_omitted_cases(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(command, "select", lambda: Selection(FEW, {"mask tree": ["a", "b"]}))
    assert command.main(["flashinfer-bench", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"{definition.name}: 1 workloads" in printed for definition in FEW)
    assert f"{len(FEW)} workloads of " in printed
    assert "    2 mask tree\n" in printed


def test_another_format_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["dumps", "out"])
    assert "got 'dumps'; allowed: flashinfer-bench" in capsys.readouterr().err


def test_a_solution_has_one_file():
    """Only FlashInfer-Bench imports sources as a package, so each solution has one file."""
    [definition, *_] = FEW
    assert [source["path"] for source in solution_of(definition)["sources"]] == ["main.py"]
