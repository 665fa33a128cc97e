"""The tutorial of the backend's README runs, and the pages name engines and models correctly.

The example of transformers runs in ``tests_engines``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from paged_mla_optimized.config.huggingface import _PAIRINGS as PAIRINGS
from paged_mla_optimized.engines.sglang import registration as sglang
from paged_mla_optimized.engines.vllm import registration as vllm

FOLDER = Path(__file__).parents[1]
CHECK = """
cache = caches[0]
cache.latents.fill_(1)
mla.plan(MlaStep.from_host([1, 20], [40, 20], [[1, 3, 4], [2, 5]], device=device))
mla.append(torch.ones(21, 32).half(), random(21, 16), cache)
out, lse = mla.attend(random(21, 4, 16), random(21, 4, 16), cache, heads[0])
expected = heads[0].w_uv.sum(-1)  # values of latents of ones
torch.testing.assert_close(out, expected.expand(21, -1, -1), rtol=1e-2, atol=1e-2)
assert lse.isfinite().all()
"""


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.+?)```", page.read_text(), re.DOTALL)


def test_engines_are_given_the_names_that_are_registered():
    in_vllm, in_sglang, _ = examples(FOLDER / "docs" / "engines.md")
    assert f'attention_backend="{vllm.OWN_NAME}"' in in_vllm
    assert f'attention_backend="{sglang.NAME}"' in in_sglang
    for example in (in_vllm, in_sglang):
        compile(example, "engines.md", "exec")


def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path):
    """S-21: the Python blocks are one program, which prints the text blocks in order."""
    page = FOLDER / "README.md"
    (tmp_path / "embed.py").write_text("".join(examples(page)) + CHECK)
    done = subprocess.run(
        [sys.executable, "embed.py"],
        cwd=tmp_path,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"```text\n(.+?)```", page.read_text(), re.DOTALL)
    assert done.stdout == "".join(shown)


def test_the_models_that_are_named_are_those_that_are_read():
    page = (FOLDER / "docs" / "reference.md").read_text()
    [_, section] = page.split("## Models that `from_hf` reads\n")
    table = section.split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(first_cells))) - {"model_type"} == set(PAIRINGS)
