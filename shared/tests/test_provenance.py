import shutil
import subprocess

import pytest

from paged_mla_shared.provenance import commit_of


@pytest.fixture(autouse=True)
def _without_the_variable(monkeypatch):
    monkeypatch.delenv("PAGED_MLA_COMMIT", raising=False)


@pytest.fixture
def source(tmp_path):
    """Return a file of the only commit of a repository."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    source = tmp_path / "module.py"
    source.write_text("")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    return source


def test_commit_of_a_checkout(source):
    """S-19: a report names the commit of the code, and whether the code has changed since."""
    commit = commit_of(str(source))
    assert len(commit) == 12
    source.write_text("changed")
    assert commit_of(str(source)) == f"{commit}-dirty"


def test_commit_of_an_install_inside_another_repository(source):
    """S-19: a repository's commit is not that of a file that it does not track."""
    installed = source.parent / "site-packages" / "module.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert commit_of(str(installed)) == "not in a checkout"


def test_the_environment_variable_overrides_the_commit(source, monkeypatch):
    """S-19: PAGED_MLA_COMMIT names the commit of copied code."""
    monkeypatch.setenv("PAGED_MLA_COMMIT", "abc")
    assert commit_of(str(source)) == "abc"


def test_commit_of_a_copy(tmp_path, monkeypatch):
    """S-19: without a repository, the commit is that of the environment variable."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(str(tmp_path / "module.py")) == "not in a checkout"
    monkeypatch.setenv("PAGED_MLA_COMMIT", "abc")
    assert commit_of(str(tmp_path / "module.py")) == "abc"
