"""Tools of the project's own checks."""

import pytest

from ci import short_report
from ci.installed import DEMANDED, import_or_skip
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


@pytest.fixture(name="broken")
def _broken(tmp_path, monkeypatch):
    """Install a package that cannot be imported: one that it needs is missing."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import a_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_test_is_skipped_where_its_subject_is_not_installed():
    with pytest.raises(pytest.skip.Exception, match="no_such_package is not installed"):
        import_or_skip("no_such_package.part")
    assert import_or_skip("json.decoder").__name__ == "json.decoder"


@pytest.mark.usefixtures("broken")
def test_a_subject_that_is_installed_and_broken_is_no_reason_to_skip():
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing"):
        import_or_skip("broken")


def test_a_subject_that_is_demanded_is_never_skipped(monkeypatch):
    """What a session of one engine tests must be there."""
    monkeypatch.setenv(DEMANDED, "no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_or_skip("no_such_package")


def test_a_distribution_without_its_package_is_no_reason_to_skip(monkeypatch):
    monkeypatch.setattr("ci.installed.distribution", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_or_skip("no_such_package")


def test_a_tool_of_ci_describes_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        short_report.main(["--help"])
    assert ended.value.code == 0
    assert "REPORT" in capsys.readouterr().out
