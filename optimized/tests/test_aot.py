"""The compiler needs Triton's compiled mode, so it runs in a process of its own."""

import contextlib
import re
import subprocess
from itertools import chain

import pytest
import triton
from compiled_mode import Compiler

from paged_mla_optimized.tools import aot


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as compiler:
        yield compiler


def disassembled(compiler, name, folder):
    """Return the instructions of a variant for sm90."""
    cubin = folder / "kernel.cubin"
    assert compiler.compile(name, cubin=cubin)["error"] is None
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    return subprocess.check_output(command, text=True)


@pytest.mark.parametrize(
    "prefix",
    [
        "attend-m64",
        "attend-m16",
        "attend-m16n64-r512-bf16-causal-blocks-fixed",
        "attend-m32n32-r512-bf16-fp8_e4m3-causal-blocks-fixed",
        "attend-m32n32-r512-bf16-causal-blocks-fixed",
        "combine-alone",
        "combine-overlapped",
        "token-m64n64-tree:packed",
        "token-m16n64-tree:full-parts-rows4-strided",
        "rotate-overlapped-p64-bf16-neox",
        "hopper-few-m16",
        "hopper-few-m16-r512-bf16-causal-box0-fixed-h1-",
        "hopper-few-m16-r512-bf16-non_causal-box0-fixed-h3-",
        "hopper-tile-m64",
        "hopper-tile-m64-r512-bf16-causal-box64-parts-neox",
        "hopper-tile_fp8-m64",
        "hopper-tile_exact-m64",
        "quantize-overlapped",
        "hopper-few_fp8-m64",
        "append-r512-bf16-fp8_block_group-interleaved-tokens1",
        "prefill-m128n64",
        "hopper-prefill",
    ],
)
def test_compiles_without_a_gpu(compiler, prefix):
    """A Hopper binary, its registers and its shared memory, from a CPU."""
    usage = compiler.compile(prefix)
    assert usage["error"] is None
    assert 0 < usage["registers"] <= 255


def inner_loops(sass):
    """Return the instructions of every loop that holds no other."""
    code, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(found[1])
    for end, instruction in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", instruction)
        if target and labels[target[1]] <= end:
            loops.append((labels[target[1]], end))
    return [
        code[a : b + 1]
        for a, b in loops
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "hopper-tile-m64-r512-bf16-causal-box64-parts-h",
        "hopper-tile-m64-r512-bf16-causal-box64-fixed-h",
        "hopper-tile-m64-r512-bf16-causal-box64-parts-neox-h",
        "hopper-tile-m64-r512-bf16-non_causal-box64-parts-h",
        "hopper-tile_fp8-m64-r512-bf16-fp8_e4m3-causal-box64-fixed-h",
    ],
)
def test_pairs_of_a_thread_are_weighed_side_by_side(compiler, name, tmp_path):
    """One after the other they take 5 % of a step: a warp waits for shuffles twice."""
    sass = disassembled(compiler, name, tmp_path)
    weighing = [loop for loop in inner_loops(sass) if sum("MUFU.EX2" in i for i in loop) >= 32]
    assert len(weighing) == 1
    [loop] = weighing
    first = next(at for at, instruction in enumerate(loop) if "MUFU.EX2" in instruction)
    shuffles = [at for at, instruction in enumerate(loop) if "SHFL.BFLY" in instruction]
    assert len(shuffles) == 4  # two for each pair's highest score
    assert shuffles[-1] < first


@pytest.mark.parametrize(
    "name",
    ["rotate-overlapped-p64-bf16-interleaved", "quantize-overlapped-r512-bf16-none-data"],
)
def test_the_next_kernel_begins_when_all_before_these_have_ended(compiler, name, tmp_path):
    """Or it would read keys that are not there yet: it waits for what these write, and no more."""
    sass = disassembled(compiler, name, tmp_path)
    order = re.findall(r"\b(ACQBULK|PREEXIT|LDG|STG)\b", sass)
    assert order[:3] == ["ACQBULK", "PREEXIT", "LDG"]
    assert order.count("ACQBULK") == order.count("PREEXIT") == 1


@pytest.mark.parametrize(
    ("variant", "waits"),
    [
        ("fp8_e4m3-causal-box64-fixed", 15),
        ("fp8_block_token-tree-box64-parts", 15),
        ("fp8_ds_mla-causal-box64-parts", 12),
    ],
)
def test_products_run_while_their_operands_are_made(compiler, variant, waits, tmp_path):
    """Where registers are too few the compiler waits for each product before the next."""
    name = f"hopper-tile_exact-m64-r512-bf16-{variant}-h"
    sass = disassembled(compiler, name, tmp_path)
    found = [
        (sum("GMMA" in i for i in loop), sum("DEPBAR" in i for i in loop))
        for loop in inner_loops(sass)
    ]
    products_and_waits = sorted(pair for pair in found if pair[0])
    assert products_and_waits == [(16, 8), (36, waits)]  # of values, and of scores


def test_too_much_shared_memory_is_an_error(compiler):
    """The compiler accepts what the device cannot launch; the table's limit does not."""
    usage = compiler.compile("attend-m64", arch="sm86")
    assert "shared memory" in usage["error"]


def refused(capsys, *options):
    """Return why the command refuses its options."""
    with pytest.raises(SystemExit) as ended:
        aot.main(["--arch", "sm90", *options])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_refuses_the_interpreter(capsys):
    """With TRITON_INTERPRET there is nothing to compile, and the command reports it."""
    assert "TRITON_INTERPRET" in refused(capsys)


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "1/0", "one/4"])
def test_it_names_a_shard_that_is_none(shard, capsys):
    assert f"--shard: got {shard}; allowed: I/N" in refused(capsys, "--shard", shard)


def test_no_processes_compile_nothing(capsys):
    assert "--workers: got 0; allowed: 1 or more" in refused(capsys, "--workers", "0")


def test_shards_have_every_variant_once():
    """S-20: several machines compile all variants together, each as many as the others."""
    variants = [("sm80", str(number)) for number in range(100)]
    shards = [aot.shard_of(variants, index, 7) for index in range(1, 8)]
    assert sorted(chain(*shards)) == sorted(variants)
    assert {len(shard) for shard in shards} == {14, 15}


def test_no_process_compiles_for_two_architectures(monkeypatch):
    """Triton 3.6.0 keeps the FP8 conversions of the first: sm89 after sm100 does not compile."""
    pools = []

    class Pool(contextlib.nullcontext):
        def __init__(self, workers, mp_context):
            super().__init__(self)
            assert workers >= 1
            assert mp_context.get_start_method() == "spawn"
            pools.append(set())

        def map(self, function, jobs, archs):
            pairs = list(zip(jobs, archs, strict=False))
            assert function is aot._compile_timed
            pools[-1] |= {arch for _, arch in pairs}
            return [(aot.Usage(job), 0.0) for job, _ in pairs]

    monkeypatch.setattr(aot, "ProcessPoolExecutor", Pool)
    chosen = [("sm100", "a"), ("sm100", "b"), ("sm89", "a")]
    for workers in (1, 2):
        usages = [usage.name for usage, _ in aot._compiled(chosen, workers)]
        assert usages == ["a", "b", "a"]
    assert pools == [{"sm100"}, {"sm89"}] * 2


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9),
    reason="Triton 3.9 and later round once on sm89: there is no wrong kernel to find",
)
def test_codes_that_are_rounded_twice_are_found(compiler):
    """S-11: a kernel with the device's own conversion is right on sm90, and not on sm89."""
    name = "append-r512-bf16-fp8_e4m3"
    assert compiler.compile(name, "sm90")["error"] is None
    assert "cvt.rn.satfinite.e4m3x2.f16x2" in compiler.compile(name, "sm89")["error"]
