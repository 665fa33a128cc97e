"""``paged-mla warm-up``: what is refused, and a folder that Triton finds its binaries in."""

import json

import pytest
import torch
import triton
from compiled_mode import run
from triton.runtime.cache import FileCacheManager

from paged_mla_optimized.commands import warm_up
from paged_mla_optimized.runtime.device import DeviceFacts

BINARY, LIST = "kernel.cubin", "kernel.json"
COMPILE = """
import json, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)

@triton.jit
def kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 1.0)

source = ASTSource(kernel, {"x_ptr": "*fp32", "N": "constexpr"}, {(1,): 16})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(json.dumps(found))
"""


class Instance:
    """Replaces PagedMla: it writes one binary where Triton would."""

    def __init__(self, config, _device):
        self.config = config

    def warm_up(self, cache):
        assert cache.latents.shape[1:] == (self.config.block_size, 576)
        manager = FileCacheManager("HASH")
        path = manager.put(b"binary" * 2**18, BINARY)
        manager.put_group(LIST, {BINARY: path})


@pytest.fixture
def hopper(monkeypatch):
    """Simulate a Hopper GPU."""
    monkeypatch.setattr(warm_up, "is_interpreting", lambda: False)
    monkeypatch.setattr(warm_up, "current_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(warm_up, "device_facts", lambda _: DeviceFacts("sm90", 132))
    monkeypatch.setattr(warm_up, "PagedMla", Instance)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")


@pytest.mark.usefixtures("hopper")
def test_it_compiles_into_the_folder_and_reports_what_must_be_equal(tmp_path, capsys):
    folder = tmp_path / "new" / "kernels"
    before = triton.knobs.cache.dir
    assert warm_up.main(["--folder", str(folder), "--heads", "16"]) == 0
    assert triton.knobs.cache.dir == before
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"1 binaries, 1.5 MiB in {folder}, after ")
    assert lines[1].endswith(f" TRITON_CACHE_DIR={folder}")
    assert f"path {folder}" in lines
    assert f"Triton {triton.__version__}, from the same wheel" in lines
    assert "GPU NVIDIA H100 80GB HBM3: sm90, 132 multiprocessors" in lines
    assert any(line.startswith("instance 16 heads, max_rows 256, max_query") for line in lines)


@pytest.mark.usefixtures("hopper")
def test_the_capacities_are_those_of_the_options(tmp_path, capsys):
    sizes = ("--max-rows", "8", "--max-query-tokens", "40", "--max-model-len", "4096")
    assert warm_up.main(["--folder", str(tmp_path), *sizes]) == 0
    said = capsys.readouterr().out
    assert "128 heads, max_rows 8, max_query_tokens 40, max_model_len 4096" in said


@pytest.mark.usefixtures("hopper")
def test_a_folder_that_will_be_elsewhere_has_the_paths_of_there(tmp_path, monkeypatch, capsys):
    made, shipped = tmp_path / "made", tmp_path / "shipped"
    assert warm_up.main(["--folder", str(made), "--used-at", str(shipped)]) == 0
    assert f"TRITON_CACHE_DIR={shipped}\n" in capsys.readouterr().out
    made.rename(shipped)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shipped))
    group = FileCacheManager("HASH").get_group(LIST)
    assert group == {BINARY: str(shipped / "HASH" / BINARY)}


def test_triton_compiles_again_in_a_moved_folder_unless_it_has_the_paths(tmp_path, monkeypatch):
    def hits(folder):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        source = tmp_path / "source.py"
        source.write_text(COMPILE)
        done = run(str(source))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    made, moved, named = (tmp_path / name for name in ("made", "moved", "named"))
    assert hits(made) == [False]
    assert hits(made) == [True]
    made.rename(moved)
    assert hits(moved) == [False]
    warm_up.name_paths(moved, named)
    moved.rename(named)
    assert hits(named) == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dtype", "float16", "--cache-format", "bf16"],
            "--dtype: got float16; allowed: bfloat16, the dtype of",
        ),
        (["--max-rows", str(2**31)], "max_rows: got 2147483648; allowed: 1 to 32766"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_a_wrong_configuration_is_refused(tmp_path, capsys, arguments, message):
    assert warm_up.main(["--folder", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("paged-mla warm-up: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --folder"),
        (["--folder", "x", "--max-rows", "0"], "--max-rows: got '0'; allowed: integers >= 1"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        warm_up.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.usefixtures("hopper")
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert warm_up.main(["--folder", str(file)]) == 2
    assert f"File exists: '{file}'" in capsys.readouterr().err


def test_the_interpreter_compiles_nothing(tmp_path, capsys):
    assert warm_up.main(["--folder", str(tmp_path / "new")]) == 2
    assert "the interpreter compiles nothing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_nothing_is_compiled(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(warm_up, "is_interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warm_up.main(["--folder", str(tmp_path / "new")]) == 2
    assert (
        "torch finds no GPU; run paged-mla doctor to see what is missing" in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())
