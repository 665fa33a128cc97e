"""S-20: the pictures of speed show the numbers of the reports."""

import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

BENCH = Path(__file__).parents[1] / "bench"
CHART = runpy.run_path(str(BENCH / "chart.py"))
GROUPS = CHART["read_groups"](BENCH / "reports")
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    subprocess.run([sys.executable, BENCH / "chart.py", folder], check=True)
    return folder


@pytest.mark.parametrize("theme", THEMES)
def test_the_committed_picture_is_what_the_script_draws(drawn, theme):
    name = f"speed-{theme}.svg"
    assert (BENCH / "reports" / name).read_text() == (drawn / name).read_text(), (
        "run: python optimized/bench/chart.py"
    )


def test_a_bar_is_the_geometric_mean_with_the_least_and_the_most():
    bar = CHART["Bar"]("four steps", (0.5, 2.0, 4.0, 4.0))
    assert (bar.mean, bar.least, bar.most) == (pytest.approx(2.0), 0.5, 4.0)


def test_every_step_that_a_peer_ran_is_in_one_bar():
    """16 of decode; 13 over FP8 caches, with exact and with FP8 products; 16 of prefill."""
    steps = {group.title: sum(len(bar.ratios) for bar in group.bars) for group in GROUPS}
    assert list(steps.values()) == [16, 2 * 13, 16]


def test_a_bar_below_the_peer_has_a_colour_of_its_own(drawn):
    slow = sum(bar.mean < 1 for group in GROUPS for bar in group.bars)
    assert slow
    for theme in THEMES:
        drawing = (drawn / f"speed-{theme}.svg").read_text()
        assert drawing.count('class="slower"') == slow


@pytest.mark.parametrize("theme", THEMES)
def test_the_picture_is_described_in_words_too(drawn, theme):
    """Labels and numbers are text that can be selected, and a title reads the picture out."""
    svg = ET.parse(drawn / f"speed-{theme}.svg").getroot()
    title = svg.findtext("{http://www.w3.org/2000/svg}title")
    shown = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    for group in GROUPS:
        assert group.title in shown
        for bar in group.bars:
            assert bar.label in shown
            assert any(text.startswith(f"{bar.mean:.2f} (") for text in shown)
            assert f"{bar.label} {bar.mean:.2f}" in title
