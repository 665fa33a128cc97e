"""The kernels run in Triton's interpreter here, which must be chosen before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch.distributed as dist

from paged_mla_optimized.triton_compat.unseen_work import leave_out_unseen_work

leave_out_unseen_work()


@pytest.fixture
def group_of_one(tmp_path):
    """Be a group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
