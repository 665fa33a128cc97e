"""Python in a process of its own, where Triton compiles and interprets nothing."""

import os
import subprocess
import sys


def run(*command):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
