"""Python in a process of its own, where Triton compiles and interprets nothing."""

import json
import os
import subprocess
import sys

SERVE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from paged_mla_optimized.tools.aot import compile_job, compiled_kernel
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch
jobs = jobs_of_arch("sm90")
for line in sys.stdin:
    request = json.loads(line)
    job = next(job for job in jobs if job.name.startswith(request["prefix"]))
    usage = compile_job(job, request["arch"])
    if request["cubin"]:
        Path(request["cubin"]).write_bytes(compiled_kernel(job, request["arch"]).asm["cubin"])
    print(json.dumps(asdict(usage)), flush=True)
"""


def _environment():
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path)}


def run(*command):
    """Run Python with `command`, and return what it printed and how it ended."""
    return subprocess.run(
        [sys.executable, *command], env=_environment(), capture_output=True, text=True, check=False
    )


class Compiler:
    """One process that compiles what several tests name, as listing all variants takes seconds."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def compile(self, prefix, arch="sm90", cubin=None):
        """Compile the first variant of sm90 whose name begins so; return its ``Usage`` as a dict.

        With `arch`, compile it for that architecture instead; with `cubin`, store its binary there.
        """
        request = {"prefix": prefix, "arch": arch, "cubin": cubin and str(cubin)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the compiling process ended; its error is on stderr"
        return json.loads(answer)

    def __exit__(self, *_error):
        self._process.communicate()
