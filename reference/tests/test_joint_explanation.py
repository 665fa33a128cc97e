"""Several dumps of one bug: the cause that is named fits all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dumped import case, changed, dumped

from paged_mla_reference.explain.command import main
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.explain.joint_explanation import JointExplanation, explain_jointly
from paged_mla_shared.cases import Row
from paged_mla_shared.dump import Dump, save_dump

# Of a row of a block's multiple, two faults predict the same; of any other they do not.
NAME = "a-full-last-block-is-skipped"
ALIKE = case((Row(5, 1),), block_size=1)
APART = case((Row(128, 1), Row(70, 1)), block_size=64)


def explained(*dumps: Dump) -> JointExplanation:
    return explain_jointly([explain(dump) for dump in dumps])


def test_another_dump_separates_hypotheses():
    """S-4: on blocks of one key, a last block that is skipped is a newest key that is missing."""
    first, second = dumped(NAME, of=ALIKE), dumped(NAME, of=APART)
    alone = [fit.hypothesis.name for fit in explain(first).best if fit.hypothesis.known]
    assert len(alone) > 1
    found = explained(first, second)
    assert [fit.hypothesis.name for fit in found.best] == [NAME]
    assert f"Matches all 2 dumps: {NAME}" in found.cause
    for name in set(alone) - {NAME}:
        [fit] = [fit for fit in found.fits if fit.hypothesis.name == name]
        assert fit.left[0] == 0
        assert fit.left[1] > 0


def test_a_step_that_went_well_rules_out():
    """S-4: of a row that is right, a fault that would have made it wrong is not the cause."""
    right = case((Row(70, 1),), block_size=64)
    found = explained(dumped(NAME, of=ALIKE), dumped(of=right))
    names = [fit.hypothesis.name for fit in found.best]
    assert NAME in names
    assert "newest-key-is-not-counted" not in names


def test_a_step_of_which_nothing_is_known_rules_nothing_out():
    """S-10: without a block table, the correct slots of a step are unknown."""
    name = "slots-are-one-late"
    found = explained(dumped(name), dumped(without=("block_table", "slots")))
    assert name in [fit.hypothesis.name for fit in found.best]


def test_nothing_explains_two_bugs():
    """Each dump has another cause, and the report states that."""
    found = explained(dumped("lse-in-base-2"), dumped("causal-mask-is-top-left"))
    assert not found.best
    assert found.cause.startswith("No known fault fits all 2 dumps.")
    assert [e.best[0].hypothesis.name for e in found.explanations] == [
        "lse-in-base-2",
        "causal-mask-is-top-left",
    ]


def test_noise_has_no_known_cause():
    """S-5: nothing is named where nothing fits any."""
    dump = dumped()
    noise = np.random.default_rng(0).standard_normal(dump.arrays["out"].shape)
    bad = changed(dump, out=dump.arrays["out"] + noise.astype(np.float32))
    assert explained(bad, bad).cause.startswith("No known fault fits")


def saved(folder: Path, *dumps: Dump) -> list[str]:
    paths = [folder / f"{number}.safetensors" for number in range(len(dumps))]
    for path, dump in zip(paths, dumps, strict=True):
        save_dump(dump, path)
    return [str(path) for path in paths]


def test_the_command_takes_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A terminal reads each verdict and the shared cause; a machine reads the same."""
    paths = saved(tmp_path, dumped(NAME, of=ALIKE), dumped(NAME, of=APART))
    assert main([*paths]) == 1
    said = capsys.readouterr().out
    assert f"2. {paths[1]}: S-5 is broken in out" in " ".join(said.split())
    assert f"Matches all 2 dumps: {NAME}" in said
    assert main([*paths, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["hypotheses"][0]["name"] == NAME
    assert document["hypotheses"][0]["left"] == [0, 0]
    assert len(document["dumps"]) == 2


def test_right_steps_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing is broken in any."""
    assert main([*saved(tmp_path, dumped(), dumped())]) == 0
    assert "No rule is broken in any of the dumps." in capsys.readouterr().out


def test_a_check_that_a_dump_does_not_allow_is_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The last line does not claim more than the dumps contain."""
    assert main([*saved(tmp_path, dumped(), dumped(without=("out", "lse")))]) == 0
    assert "in what the dumps contain; some checks are undecided." in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--html=x", "--png=x", "--token=0", "--head=1"])
def test_pictures_are_of_one_dump(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Refused before anything is written."""
    assert main([*saved(tmp_path, dumped(), dumped()), option]) == 2
    assert "only with one dump" in capsys.readouterr().err


def test_the_file_that_is_refused_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A field that no step can have is of one of them."""
    outside = changed(dumped(), block_ids=dumped().arrays["block_ids"] + 1000)
    paths = saved(tmp_path, dumped(), outside)
    for arguments in (paths, paths[1:], [paths[1], "--token=0"]):
        assert main([*arguments]) == 2
        assert f"explain: {paths[1]}: block_ids: got blocks outside" in capsys.readouterr().err
