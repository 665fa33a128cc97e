"""Every launch that a legal config may lead to is of a variant that the compiler is asked for."""

import json
from pathlib import Path

import pytest
from compiled_mode import run

from paged_mla_optimized.planning.families import SHARED_MEMORY

LAUNCHED = Path(__file__).with_name("launched.py")
KERNELS = {
    *("append_fp8_kernel", "append_groups_kernel", "append_kernel", "append_runs_kernel"),
    *("append_tokens_kernel", "attend_kernel", "combine_kernel", "gather_kernel"),
    *("merge_tiles_kernel", "part_kernel", "prefill_kernel", "prefill_plan_kernel"),
    *("quantise_kernel", "rotate_kernel", "schedule_kernel", "token_kernel"),
}
OF_HOPPER = {
    *("decode_few_kernel", "decode_few_fp8_kernel", "decode_tile_kernel"),
    *("decode_tile_fp8_kernel", "decode_tile_exact_kernel", "hopper_prefill_kernel"),
}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_what_random_configs_launch_is_compiled(arch):
    """The same kernel for the same options; numbers that are compiled in may be others."""
    done = run(str(LAUNCHED), arch, "200")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["missing"] == []
    assert set(told["kernels"]) == KERNELS | (OF_HOPPER if arch == "sm90" else set())


LIST_HEADS = """
import json
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch
heads = {}
for job in jobs_of_arch("sm90"):
    if job.kernel.fn.__name__.startswith("decode"):
        tile = f"{job.kernel.fn.__name__} {job.constants.get('TILE_M', 64)}"
        heads.setdefault(tile, set()).add(job.constants["num_heads"])
print(json.dumps({tile: sorted(found) for tile, found in heads.items()}))
"""


def test_every_number_of_heads_is_compiled_for_hopper():
    done = run("-c", LIST_HEADS)
    assert done.returncode == 0, done.stderr
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
    assert json.loads(done.stdout) == {t: list(range(1, n + 1)) for t, n in highest.items()}


COUNT_TWICE = """
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch, sample_of
for arch in ("sm80", "sm90"):
    jobs = jobs_of_arch(arch)
    assert len({job.name for job in jobs}) == len(jobs)
    assert len({job.identity for job in jobs}) == len(jobs)
    sample = sample_of(jobs)
    assert {job.kernel.fn.__name__ for job in sample} == {job.kernel.fn.__name__ for job in jobs}
    assert len(sample) < len(jobs) / 50
"""


def test_each_variant_is_compiled_once_and_a_sample_has_every_kernel():
    done = run("-c", COUNT_TWICE)
    assert done.returncode == 0, done.stderr


COMPILE_SOME = """
from paged_mla_optimized.tools import aot
chosen = [("sm80", name) for name in aot._jobs_by_name("sm80") if name.startswith("merge-r")]
together, alone = ([usage for usage, _ in aot._compiled(chosen, n)] for n in (2, 1))
assert [usage.name for usage in together] == [name for _, name in chosen]
assert together == alone
assert all(usage.registers > 0 for usage in together)
"""


def test_processes_side_by_side_tell_what_one_tells_in_the_same_order():
    done = run("-c", COMPILE_SOME)
    assert done.returncode == 0, done.stderr
