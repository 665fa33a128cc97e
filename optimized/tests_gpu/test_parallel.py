"""Tensor and context parallelism over NCCL: every rank answers as one GPU does (S-8, S-18)."""

import gpu_ranks
import pytest
import torch
from torch.multiprocessing import start_processes


def test_ranks_answer_for_the_whole(tmp_path):
    """S-8, S-18: decode, chains and chunks, eagerly and in graphs, on all GPUs of this host."""
    world = torch.cuda.device_count()
    if world < 2:
        pytest.skip(f"{world} CUDA device, needs two")
    arguments = (str(tmp_path / "store"), world)
    start_processes(gpu_ranks.run, arguments, nprocs=world, start_method="spawn")
