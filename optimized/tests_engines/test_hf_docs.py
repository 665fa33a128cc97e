"""transformers: the page's examples run as they stand there."""

import re
from pathlib import Path

import torch
from hf_models import TINY, Kind, build

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"


def test_the_examples_run():
    examples = re.findall(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 2
    model = build(Kind("v3"), TINY)
    model.generation_config.max_new_tokens = 3
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = {"model": model, "inputs": inputs, "prefix_ids": ids[:, :2], "questions": [inputs] * 2}
    for example in examples:
        exec("import copy, torch\n" + example, names)
    assert torch.equal(names["output"], names["answer"])
    assert names["output"].shape == (1, 7)
