"""Every launch of a legal config is one of the variants that the compiler compiles."""

import json
from pathlib import Path

import pytest
from compiled_mode import run

from paged_mla_optimized.config.architectures import SHARED_MEMORY

LAUNCHED = Path(__file__).with_name("launched.py")
KERNELS = {
    *("append_fp8_kernel", "append_groups_kernel", "append_kernel", "append_runs_kernel"),
    *("append_tokens_kernel", "attend_kernel", "combine_kernel", "gather_kernel"),
    *("merge_tiles_kernel", "key_chunk_kernel", "prefill_kernel", "prefill_plan_kernel"),
    *("quantize_kernel", "rotate_kernel", "schedule_kernel", "token_kernel"),
}
OF_HOPPER = {
    *("decode_few_kernel", "decode_few_fp8_kernel", "decode_tile_kernel"),
    *("decode_tile_fp8_kernel", "decode_tile_exact_kernel", "hopper_prefill_kernel"),
}


@pytest.fixture(scope="module")
def launched():
    """What random legal configs launch on each architecture, and what of that is not compiled."""
    done = run(str(LAUNCHED), "1000", *SHARED_MEMORY)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_what_random_configs_launch_is_compiled(launched, arch):
    """The same kernel for the same options; numbers that are compiled in may be others."""
    assert launched[arch]["missing"] == []
    assert set(launched[arch]["kernels"]) == KERNELS | (OF_HOPPER if arch == "sm90" else set())


LIST = """
import json
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch, sample_of


def kernels(jobs):
    return sorted({job.kernel.fn.__name__ for job in jobs})


def misdeclared(spec):
    # Parameters that a declaration names and a kernel has not, or has in another order.
    declared = spec.types.keys() | spec.constants.keys()
    names = spec.kernel.arg_names
    constant = [name in spec.constants for name in names]
    unknown = declared - set(names)
    return sorted(unknown) if sorted(constant) == constant else ["constants are not the last"]


def facts(jobs):
    heads, sample = {}, sample_of(jobs)
    for job in jobs:
        if job.kernel.fn.__name__.startswith("decode"):
            tile = f"{job.kernel.fn.__name__} {job.constants.get('TILE_M', 64)}"
            heads.setdefault(tile, set()).add(job.constants["num_heads"])
    return {
        "jobs": len(jobs),
        "names": len({job.name for job in jobs}),
        "identities": len({job.identity for job in jobs}),
        "kernels": kernels(jobs),
        "misdeclared": sorted({name for job in jobs for name in misdeclared(job.spec)}),
        "sample": len(sample),
        "sampled": kernels(sample),
        "heads": {tile: sorted(found) for tile, found in heads.items()},
    }


print(json.dumps({arch: facts(jobs_of_arch(arch)) for arch in ("sm80", "sm90")}))
"""


@pytest.fixture(scope="module")
def listed():
    """What there is to compile for sm80 and for sm90."""
    done = run("-c", LIST)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_number_of_heads_is_compiled_for_hopper(listed):
    highest = {
        "decode_few_kernel 16": 16,
        "decode_few_kernel 32": 32,
        "decode_tile_kernel 64": 128,
        "decode_few_fp8_kernel 16": 16,
        "decode_few_fp8_kernel 32": 32,
        "decode_few_fp8_kernel 64": 128,
        "decode_tile_fp8_kernel 64": 128,
        "decode_tile_exact_kernel 64": 128,
    }
    assert listed["sm90"]["heads"] == {t: list(range(1, n + 1)) for t, n in highest.items()}


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_each_variant_is_compiled_once(listed, arch):
    found = listed[arch]
    assert found["jobs"] == found["names"] == found["identities"]


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_declarations_name_parameters(listed, arch):
    """A launch takes arguments in the order of the parameters, and constants behind them."""
    assert listed[arch]["misdeclared"] == []


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_a_sample_has_every_kernel(listed, arch):
    found = listed[arch]
    assert found["sampled"] == found["kernels"]
    assert found["sample"] < found["jobs"] / 50


COMPILE_SOME = """
from paged_mla_optimized.tools import aot
jobs = [job for job in aot.jobs_of_arch("sm80") if job.name.startswith("merge-r")]
together = [usage for usage, _ in aot._compiled([("sm80", job) for job in jobs], 2)]
assert together == [aot.compile_job(job, "sm80") for job in jobs]
assert [usage.name for usage in together] == [job.name for job in jobs]
assert all(usage.registers > 0 for usage in together)
"""


def test_parallel_processes_print_the_lines_of_one_in_the_same_order():
    done = run("-c", COMPILE_SOME)
    assert done.returncode == 0, done.stderr
