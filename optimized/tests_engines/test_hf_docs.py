"""transformers: the examples of the page and of the docstring run unchanged."""

import doctest
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import TINY, VOCAB, Kind, build
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

import paged_mla_optimized.engines.transformers as plugin
from paged_mla_optimized.engines.releases import serves

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"
LITE = {"layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "itemsize": 2}
"""DeepSeek-V2-Lite in bfloat16, with the sizes of its config.json."""


def examples_of(page):
    return re.findall(r"```python\n(.+?)```", page.read_text(), re.DOTALL)


def in_this_release(example):
    """Return an example with the name of the cache's argument that the page gives for a release."""
    if serves(transformers.__version__, (5, 24)):
        return example
    return re.sub(r"\bcache=", "past_key_values=", example)


GENERATE, PREFIX, WITHOUT_GPU = (in_this_release(example) for example in examples_of(PAGE))
DOCSTRING = in_this_release(
    "".join(example.source for example in doctest.DocTestParser().get_examples(plugin.__doc__))
)


class Tokenizer:
    """One token for each character, behind a first one."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text, *, return_tensors, add_special_tokens=True):
        assert return_tensors == "pt"
        first = [self.bos_token_id] if add_special_tokens else []
        ids = torch.tensor([[*first, *(3 + ord(char) % (VOCAB - 3) for char in text)]])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids):
        return " ".join(map(str, ids.tolist()))


def model_like_the_hubs():
    """Return a tiny model that knows an end token and, as DeepSeek-V2-Lite, no padding."""
    model = build(Kind("v2"), TINY)
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    model.generation_config.eos_token_id = Tokenizer.eos_token_id
    return model


@pytest.fixture(name="hub")
def _hub(monkeypatch):
    """Let ``from_pretrained`` return a tiny model and its tokenizer; return the former's twin."""

    def load_model(name, *, dtype, attn_implementation):
        assert (name, dtype) == ("deepseek-ai/DeepSeek-V2-Lite", torch.bfloat16)
        model = model_like_the_hubs()
        model.set_attn_implementation(attn_implementation)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: Tokenizer())
    return model_like_the_hubs()


@pytest.fixture(name="logged")
def _logged(caplog):
    """Make every warning an error; return what the library logs, which hands nothing on."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield caplog
    logger.removeHandler(caplog.handler)


def warned(logged):
    return [record.message for record in logged.records if record.levelno >= logging.WARNING]


def test_the_examples_of_the_page_give_the_librarys_tokens_without_a_warning(hub, logged):
    names = {}
    for example in (GENERATE, PREFIX):
        exec(example.replace('"cuda"', '"cpu"'), names)
    for prompt, output in ((names["inputs"].input_ids, "output"), (names["prompt"], "answer")):
        mask = torch.ones_like(prompt)
        expected = hub.generate(prompt, attention_mask=mask, max_new_tokens=20)
        assert torch.equal(names[output], expected)
    assert warned(logged) == []


def test_a_warning_of_the_library_is_seen(hub, logged):
    """A temperature means nothing where nothing is sampled."""
    hub.generate(torch.tensor([[5, 6]]), max_new_tokens=1, do_sample=False, temperature=0.5)
    assert "temperature" in "".join(warned(logged))


def test_the_script_without_a_gpu_prints_a_shape_and_no_warning(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_GPU)
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "torch.Size([1, 8])\n", "")


def test_the_example_of_the_docstring_runs_without_a_warning(logged):
    model = model_like_the_hubs()
    model.generation_config.max_new_tokens = 3
    inputs = Tokenizer()("ab", return_tensors="pt")
    names = {**vars(plugin), "model": model, "inputs": inputs}
    exec(DOCSTRING, names)
    assert names["output"][:, :3].equal(inputs.input_ids)
    assert warned(logged) == []


def test_the_pool_has_the_size_on_the_page():
    model = build(Kind("v2"), TINY)
    pool = plugin.LatentPool(model, num_blocks=5, block_size=8)
    width = TINY.latent + TINY.rope
    assert pool.latents.nbytes == len(model.model.layers) * 5 * 8 * width * 4
    width = LITE["kv_lora_rank"] + LITE["qk_rope_head_dim"]
    size = LITE["layers"] * 1024 * 64 * width * LITE["itemsize"]
    assert f"27 * 1024 * 64 * 576 * 2 bytes = {size / 2**30:.2f} GiB" in PAGE.read_text()
    largest = size / LITE["layers"] * 61
    assert f"with 61 layers, would take {largest / 2**30:.2f} GiB" in PAGE.read_text()
