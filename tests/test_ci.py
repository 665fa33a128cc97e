"""Tests of the tools for the project's checks."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from ci import check_isolation, check_wheels, short_report
from ci.installed import DEMANDED, import_or_skip
from ci.packages import LONGEST_FIRST, PACKAGES
from ci.short_report import shortened
from paged_mla.requirements import Requirement

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


def test_a_short_report_is_unchanged():
    document = shortened({"totals": {}, "results": [FAILED, SKIPPED]})
    assert shortened(document) == document


@pytest.mark.parametrize("tool", [check_isolation, check_wheels, short_report])
def test_help_has_no_other_effect(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    assert "usage: python -m ci." in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


ROOT = Path(__file__).parents[1]
ENGINES = {"vllm", "sglang"}  # each pins its own release of torch
NOX = ast.parse((ROOT / "noxfile.py").read_text())


def pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def required() -> dict[str, str]:
    """Return the requirements of pyproject.toml: each package with its bounds."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    asked = [*document["build-system"]["requires"], *project["dependencies"]]
    asked += [text for extra in project["optional-dependencies"].values() for text in extra]
    return {name: text for text in asked if (name := name_of(text)) != "paged-mla"}


def named_by_nox() -> set[str]:
    """Return the packages that noxfile.py installs by name."""
    found = set()
    for function in [node for node in NOX.body if isinstance(node, ast.FunctionDef)]:
        tuples = {
            node.targets[0].id: node.value.elts
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        }
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name not in {"install", "install_editable"}:
                continue
            given = [arg for n, arg in enumerate(call.args) if (name, n) != ("install_editable", 1)]
            for arg in [arg.value for arg in given if isinstance(arg, ast.Starred)]:
                given += tuples.get(getattr(arg, "id", ""), [])
            texts = [arg.value for arg in given if isinstance(arg, ast.Constant)]
            found |= {name_of(text) for text in texts if re.fullmatch(r"\w[\w-]+", text)}
    return found


def test_every_direct_dependency_is_pinned():
    """Without pins a release of another project could change the results of CI."""
    assert named_by_nox() >= {"ruff", "mypy", "nox", "pytest", "jsonschema", "cosmic-ray", "pip"}
    direct = required().keys() | named_by_nox() | {"nox", "uv"}  # the last two of `.ci/run`
    assert direct - ENGINES == pins().keys()


def test_pins_are_inside_the_bounds_of_the_project():
    for name, text in required().items():
        if name not in ENGINES:
            assert Requirement(text).allows(pins()[name]), text


def test_the_pinned_transformers_is_the_newest_that_is_tried():
    [tried] = [
        ast.literal_eval(node.value)
        for node in NOX.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TRANSFORMERS"
    ]
    assert tried[-1] == f"transformers=={pins()['transformers']}"


def test_ci_installs_pinned_packages():
    """The CI script sets the variable, which also pins the build's packages."""
    script = (ROOT / ".ci" / "run").read_text()
    installs = re.findall(r"^.*pip install.*$", script, re.MULTILINE)
    assert installs
    assert all(line.startswith("PIP_CONSTRAINT=constraints.txt ") for line in installs)


def test_every_package_is_tested():
    assert set(LONGEST_FIRST) == set(PACKAGES)


@pytest.fixture(name="broken")
def _broken(tmp_path, monkeypatch):
    """Install a package that cannot be imported, because a package that it needs is missing."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import a_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_test_is_skipped_if_its_package_is_not_installed():
    with pytest.raises(pytest.skip.Exception, match="no_such_package is not installed"):
        import_or_skip("no_such_package.part")
    assert import_or_skip("json.decoder").__name__ == "json.decoder"


@pytest.mark.usefixtures("broken")
def test_an_installed_and_broken_package_is_an_error():
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing"):
        import_or_skip("broken")


def test_a_required_package_is_never_skipped(monkeypatch):
    """The session of an engine requires the package of the engine."""
    monkeypatch.setenv(DEMANDED, "json no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_or_skip("no_such_package")


def test_a_distribution_without_its_package_is_an_error(monkeypatch):
    monkeypatch.setattr("ci.installed.distribution", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_or_skip("no_such_package")


def test_a_tool_of_ci_describes_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        short_report.main(["--help"])
    assert ended.value.code == 0
    assert "REPORT" in capsys.readouterr().out
