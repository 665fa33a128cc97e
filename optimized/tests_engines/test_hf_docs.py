"""transformers: the examples of the page run as they stand there."""

import re
from pathlib import Path

import torch
from hf_models import TINY, Kind, build

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"


def examples_of(page):
    return re.findall(r"```python\n(.+?)```", page.read_text(), re.DOTALL)


def names_in_examples():
    model = build(Kind("v3"), TINY)
    model.generation_config.max_new_tokens = 3
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"model": model, "inputs": inputs, "prefix_ids": ids[:, :2], "questions": [inputs] * 2}


def test_the_examples_of_the_page_run():
    examples = examples_of(PAGE)
    assert len(examples) == 2
    names = names_in_examples()
    for example in examples:
        exec("import copy, torch\n" + example, names)
    assert torch.equal(names["output"], names["answer"])
    assert names["output"].shape == (1, 7)
