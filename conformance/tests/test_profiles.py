"""Profiles change only the inputs of a backend and the interpretation of its outputs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from running import run_suite

from paged_mla_conformance.meta.mutants.backends import mutant
from paged_mla_conformance.meta.mutants.kill import kill
from paged_mla_conformance.runners.profile import FOLDER, load_profile
from paged_mla_conformance.runners.profile_adapter import adapted
from paged_mla_shared.errors import InvalidArgument

TOUCHED = (
    "decode or empty or merge or replay or layouts or metadata or append or split"
    " or queries-two-steps or layer-strided"
)
# No convention depends on how large a step is, nor on these two formats.
UNTOUCHED = (
    "33k or 66k or 16k or 300-rows or h128 or wide or sweep or tiles-1-to-16 or past-2-16"
    " or fp8_e4m3 or fp8_block_group or another_runner or replay-trees or bs48 or bs256"
)
SPEAKERS = [
    ('lse = "base 2"', "base-2"),
    ('lse_layout = "[H, T]"\nmerge_lse_layout = "[H, T]"', "heads-first"),
    ("table_fill = 0", "table-of-ids"),
    ("vllm", "vllm"),
    ("sglang", "sglang"),
    ("fastdeploy", "fastdeploy"),
    ("flashmla", "flashmla"),
    ("contract", "empty-rows-are-nan"),
]


def named(profile: str, folder: Path) -> str:
    """Return the name of a profile, or the path of a new file for lines of TOML."""
    if "=" not in profile:
        return profile
    path = folder / "own.toml"
    path.write_text(f'left_out = ["errors"]\n{profile}\n')
    return str(path)


@pytest.mark.parametrize(("profile", "speaker"), SPEAKERS)
def test_a_convention_is_no_failure(profile: str, speaker: str, tmp_path: Path):
    """A right backend with the conventions of its engine passes only in that profile."""
    done = run_suite(
        *("--backend", f"speaking:{speaker}", "--profile", named(profile, tmp_path)),
        *("--dtypes", "float32", "-k", f"({TOUCHED}) and not (errors or {UNTOUCHED})"),
    )
    assert "PASSED in part: " in done.stdout, done.stdout[-3000:] + done.stderr
    few = ("--dtypes", "float32", "-x", "-k", TOUCHED)
    rules = run_suite("--backend", f"speaking:{speaker}", *few)
    assert "passed, 1 failed, " in rules.stdout, rules.stdout[-3000:] + rules.stderr


@pytest.mark.parametrize(
    ("fault", "group"),
    [
        ("one-key-too-many", "decode"),
        ("lse-in-base-2", "decode"),
        ("empty-partials-are-multiplied-by-zero", "merge"),
        ("the-rest-of-the-block-is-cleared", "append"),
        ("lengths-are-those-of-the-first-step", "replay"),
    ],
)
def test_the_contract_finds_wrong_outputs(fault: str, group: str):
    """S-5, S-7, S-8, S-10, S-17: outputs of requests and writes to the cache are checked."""
    assert group in kill(fault, "-k", f"test_{group}", "--mla-profile=contract").by()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_finds_wrong_outputs(path: Path):
    """S-5: in every profile, plain decoding finds a newest key that is not counted."""
    found = kill("newest-key-is-not-counted", "-k", "test_decode", f"--mla-profile={path}")
    assert found.by() == ["decode"]


@pytest.mark.parametrize(
    ("fault", "group"),
    [
        ("unused-slots-weigh-zero", "decode"),
        ("empty-rows-divide-zero-by-zero", "empty"),
        ("table-is-taken-for-dense", "layouts"),
        ("bad-input-is-swallowed", "errors"),
    ],
)
def test_the_contract_checks_less_than_the_rules(fault: str, group: str):
    """S-6, S-9: only the strict profile has poison, empty rows and bad input."""
    assert kill(fault, "-k", f"test_{group}", "--mla-profile=contract").groups == {}
    assert kill(fault, "-k", f"test_{group}").by() == [group]


def test_strict_needs_no_translation():
    """Profiles with the conventions of the rules use the backend itself."""
    right = mutant("right")
    assert adapted(right, load_profile("strict")) is right
    assert adapted(right, load_profile("kernel")) is right
    assert adapted(right, load_profile("contract")) is not right


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_can_be_loaded(path: Path):
    """A name and a path give the same profile."""
    assert load_profile(path.stem) == replace(load_profile(str(path)), name=path.stem)


def test_a_later_file_goes_over_an_earlier_one(tmp_path: Path):
    """S-7: the profile of an SGLang backend whose lse is in base 2 consists of two files."""
    path = tmp_path / "bits.toml"
    path.write_text('lse = "base 2"\n')
    profile = load_profile(f"sglang,{path}")
    assert (profile.lse, profile.padded_seq_len) == ("base 2", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lse_base = 2", "unknown key 'lse_base'"),
        ("name = 'mine'", "unknown key 'name'"),
        ('lse = "base 10"', "lse: got 'base 10'; allowed: 'natural' or "),
        ("lse = 2", "lse: got 2; allowed: a string"),
        ("empty_lse = nan", "empty_lse: got nan"),
        ('table_fill = "zero"', "table_fill: got 'zero'"),
        ("table_fill = true", "table_fill: got True"),
        ("table_fill = 4294967296", "table_fill: got 4294967296"),
        ('reserved_block = "no"', "reserved_block: got 'no'; allowed: true or false"),
        ("padded_seq_len = true", "padded_seq_len: got True"),
        ("padded_seq_len = 1", "reserved_block: got false"),
        ("padded_slot = 0", "reserved_block: got false"),
        ('left_out = "errors"', "left_out: got 'errors'; allowed: a list"),
        ("left_out = [3]", "left_out[0]: got 3"),
        ("lse = ", "own.toml: got Invalid value"),
        ("left_out = " + "[" * 50_000, "own.toml: got brackets that are nested too deeply"),
    ],
    ids=[
        *("unknown-key", "name", "unknown-word", "number-for-a-word", "nan", "unknown-fill"),
        *("fill-bool", "fill-of-33-bits", "word-for-bool", "bool-for-number", "no-reserved-block"),
        *("no-reserved-slot", "left-out-word", "left-out-numbers", "no-toml", "deep"),
    ],
)
def test_an_invalid_file_is_refused(text: str, message: str, tmp_path: Path):
    """A misspelled key must not be ignored silently."""
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        load_profile(str(path))


@pytest.mark.parametrize("name", ["", "stric", "sglang,", "."])
def test_what_is_no_profile(name: str):
    """S-20: a text that is neither a name nor a file is refused."""
    with pytest.raises(InvalidArgument, match="allowed"):
        load_profile(name)


def test_the_kernel_profile_requires_no_capability():
    """Tests of an undeclared core capability are not supported; the verdict names the profile."""
    done = run_suite("--backend", "causal_only:create", "--profile", "kernel", "-k", "masks")
    assert "core capability missing" not in done.stdout
    assert "not declared (not required in profile kernel)" in done.stdout
    assert "profile kernel: " in done.stdout


def test_an_unknown_profile_is_a_usage_error():
    """The message lists the existing profiles."""
    done = run_suite("--backend", "causal_only:create", "--profile", "trt")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "allowed: base-2, contract, " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_profile_that_leaves_out_an_unknown_case_is_a_usage_error(tmp_path: Path):
    """A misspelled case must not run silently."""
    path = tmp_path / "mine.toml"
    path.write_text('left_out = ["layouts-strided-input"]')
    done = run_suite("--backend", "causal_only:create", "--profile", str(path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the suite has no group or case ['layouts-strided-input']" in done.stderr


def test_an_output_without_padding_is_wrong_if_padding_is_not_compared():
    """S-17: an output with too few tokens fails, also in profiles that ignore padding."""
    only = ("--only", "empty-padded-tokens-fp32", "--profile", "contract")
    done = run_suite("--backend", "meddling:loses-padding", *only)
    assert re.search(r"Mismatch: \[S-5\] out: shape \(\d+, \d+, 32\), expected \(", done.stdout)


def test_a_replay_command_quotes_the_path_of_a_profile(tmp_path: Path):
    """S-20: a shell accepts the command, also if the path contains a space."""
    path = tmp_path / "my own.toml"
    path.write_text('unread = "stale"\n')
    wrong = ("--backend", "meddling:raises", "--only", "decode-h16-fp32")
    done = run_suite(*wrong, "--profile", str(path))
    [replay] = [line for line in done.stdout.splitlines() if line.startswith("replay: ")]
    assert f"--profile '{path}' --only 'test_decode[decode-h16-fp32]'" in replay
