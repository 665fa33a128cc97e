"""Tools of the project's own checks."""

from ci.packages import LONGEST_FIRST, PACKAGES
from ci.short_report import shortened

FAILED = {
    "test": "test_decode[a]", "group": "decode", "outcome": "failed", "ms": 2.0, "why": "edges",
    "message": "trial.py:9: in check\n    attend()\nE   Mismatch: [S-7] lse: 3 of 4\nE   more",
}  # fmt: skip
SKIPPED = {
    "test": "test_decode[b]", "group": "decode", "outcome": "skipped", "ms": 0.1, "reason": "big"
}  # fmt: skip


def test_a_short_report_counts_skipped_tests_and_keeps_the_assertion():
    document = shortened({"totals": {}, "results": [FAILED, SKIPPED, SKIPPED]})
    assert document["skipped"] == {"big": 2}
    [failed] = document["results"]
    assert failed["message"] == "Mismatch: [S-7] lse: 3 of 4"
    assert "why" not in failed


def test_a_short_report_stays_as_it_is():
    document = shortened({"totals": {}, "results": [FAILED, SKIPPED]})
    assert shortened(document) == document


def test_every_package_is_tested():
    assert set(LONGEST_FIRST) == set(PACKAGES)
