"""Adapters beside their engines. Without a GPU the kernels run in Triton's interpreter.

That must be chosen before Triton is imported.
"""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
