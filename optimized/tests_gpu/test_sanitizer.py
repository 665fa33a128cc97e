import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitize.py")


@pytest.mark.parametrize(
    ("tool", "kernels"),
    [
        ("memcheck", "portable"),
        ("racecheck", "portable"),
        ("memcheck", "hopper"),
        ("memcheck", "hopper_fp8"),
    ],
)
def test_sanitizer_is_clean(tool, kernels):
    """S-9: no access outside a buffer, no race in shared memory, in small steps of every kind."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer here")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "86", sys.executable]
    done = subprocess.run(
        [*command, str(SCRIPT), kernels], capture_output=True, text=True, check=False, timeout=400
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device or its driver's sandbox")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
