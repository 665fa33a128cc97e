"""Tests that the README is short, and that its examples and claims are true."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"```(\w*)\n(.+?)```", re.DOTALL)
[EXAMPLE] = [code for language, code in BLOCK.findall(README) if language == "python"]
*COMMANDS, EXPLAINED = [code for language, code in BLOCK.findall(README) if not language]
INLINE = re.findall(r"`([^`]+)`", BLOCK.sub("", README).replace("\n", " "))
BENCH = ROOT / "optimized" / "bench"
CHART = runpy.run_path(str(BENCH / "chart.py"))
GROUPS = CHART["read_groups"](BENCH / "reports")
CHECK = """
key = ckv[:1].expand(16, -1)  # the first token sees itself alone
torch.testing.assert_close(out[0], key, rtol=2e-3, atol=2e-3)
assert lse.isfinite().all()
"""


def commands_of(program: str) -> list[list[str]]:
    """Return the arguments of every command that runs a program, from the environment or pipx."""
    commands = [shlex.split(line) for line in (*"".join(COMMANDS).splitlines(), *INLINE)]
    starts = ([program], [f".venv/bin/{program}"], ["pipx", "run", program])
    specified = ["pipx", "run", "--spec", ".[conformance]", program]
    return [
        words[len(start) :]
        for words in commands
        for start in (*starts, specified)
        if words[: len(start)] == start
    ]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 90
    assert README.count("](") <= 20


def test_every_picture_exists():
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(pictures) == 2
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_example_runs_as_printed(tmp_path: Path):
    """The example runs on a CPU, and the first token's output is its own latent."""
    (tmp_path / "embed.py").write_text(EXAMPLE + CHECK)
    done = subprocess.run(
        [sys.executable, "embed.py"],
        cwd=tmp_path,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shape = done.stdout.strip()
    assert f"print(out.shape)  # {shape}: " in EXAMPLE


@pytest.mark.parametrize("arguments", commands_of("paged-mla"), ids=" ".join)
def test_a_subcommand_exists_with_the_options_that_are_named(arguments: list[str]):
    name, *rest = arguments
    done = subprocess.run(
        [sys.executable, "-m", "paged_mla", name, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"--[\w-]+", done.stdout))
    assert {word for word in rest if word.startswith("--")} <= known


def test_every_session_exists():
    noxfile = (ROOT / "noxfile.py").read_text()
    commands = commands_of("nox")
    assert commands
    for option, session in commands:
        assert option == "-s"
        assert f"\ndef {session}(session: nox.Session" in noxfile


def test_a_new_environment_has_the_programs_that_are_run():
    assert ["install", ".[conformance]", "nox"] in commands_of("pip")


def test_every_extra_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"(?:\.|paged-mla)\[(\w+)\]", README))
    assert extras == {"conformance", "optimized"}
    assert extras <= set(project["optional-dependencies"])


def test_explain_prints_the_lines_that_are_shown(tmp_path: Path):
    """The dump is that of a lost token in ``reference/docs/explain.md``."""
    name = "the-last-token-is-not-written"
    printed = explanation_of_dumps(tmp_path, name, f"{name}.safetensors")
    assert set(EXPLAINED.splitlines()) <= set(printed.splitlines())


def test_explain_prints_what_the_page_of_two_dumps_shows(tmp_path: Path):
    page = (ROOT / "reference/docs/explain.md").read_text()
    [shown] = re.findall(r"```\n([^`]+?explain (\S+) (\S+)\n([^`]+))```", page)
    _, first, second, output = shown
    name = first.removesuffix(".safetensors")
    assert f"meta.explained {name} --single 0 --healthy 0 --save out/dumps" in shown[0]
    assert explanation_of_dumps(tmp_path, name, first, second) == output


def explanation_of_dumps(folder: Path, mutant: str, *dumps: str) -> str:
    """Return the output of ``explain`` for dumps of a mutant, which are written to a folder."""
    command = [mutant, "--single", "0", "--healthy", "0", "--save", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "paged_mla_conformance.meta.explained", *command], check=True
    )
    sources = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "paged_mla", "explain", *dumps],
        cwd=folder,  # the folder's name would change the line breaks
        env=os.environ | {"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1  # a rule is broken
    return done.stdout


@pytest.mark.parametrize(
    ("group", "some", "words"),
    [
        (
            0,
            "",
            "{mean} times faster than the better of FlashMLA and FA3 (geometric mean of {steps}",
        ),
        (0, "", "steps; {least} to {most}: [report](optimized/bench/reports/h200.md)"),
        (1, "FP8 products", "{mean} times faster than FlashMLA ({least} to {most}: "),
        (2, "", "{mean} times faster than FA3 ({least} to {most}: "),
    ],
)
def test_speeds_are_those_of_the_chart(group: int, some: str, words: str):
    """The speeds are those of all steps of a kind."""
    bars = [bar for bar in GROUPS[group].bars if some in bar.label]
    bar = CHART["Bar"]("all", tuple(ratio for bar in bars for ratio in bar.ratios))
    numbers = {name: f"{getattr(bar, name):.2f}" for name in ("mean", "least", "most")}
    assert words.format(**numbers, steps=len(bar.ratios)) in README.replace("\n", " ")


def test_the_default_over_fp8_caches_is_slower_from_64_heads_on():
    few, many = (bar for bar in GROUPS[1].bars if "16-bit products" in bar.label)
    assert many.label.startswith("64 ")
    assert many.most < 1 < few.mean
    assert "is slower than FlashMLA from 64 heads on" in README.replace("\n", " ")
