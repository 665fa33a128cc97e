"""The example of a serving loop on the device, in its graphs, against dense computation."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serving import Model, assert_serves, config_of


def test_serving_loop():
    """S-13, S-15, S-17, S-19: as in the interpreter, at DeepSeek-V3's latents, and replayed."""
    config = config_of("cuda", dtype=torch.float32)
    prompts = [[*range(40 - 2 * n), 50 + n, 50 + n] for n in range(20)]
    server = assert_serves(Model(config, "cuda"), "cuda", prompts, 30)
    counted = ("chunks", "reused", "accepted_drafts", "rejected_drafts")
    assert all(server.counts[name] > 0 for name in counted)
