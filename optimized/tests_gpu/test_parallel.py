"""Tensor and context parallelism over NCCL: every rank has the outputs of one GPU (S-8, S-18)."""

import gpu_ranks
import pytest
import torch
from torch.multiprocessing import start_processes


def test_ranks_have_the_outputs_of_one_instance(tmp_path):
    """S-8, S-18: decode, chains and chunks, eagerly and in graphs, on all GPUs of this host."""
    world = torch.cuda.device_count()
    if world < 2:
        pytest.skip(f"{world} CUDA device, needs two")
    arguments = (str(tmp_path / "store"), world)
    start_processes(gpu_ranks.run, arguments, nprocs=world, start_method="spawn")
