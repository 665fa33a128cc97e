"""The kernels run in Triton's interpreter here, which must be chosen before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
