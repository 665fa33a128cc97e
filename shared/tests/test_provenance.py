import shutil
import subprocess

import pytest

from paged_mla_shared.provenance import commit_of


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_commit_of_a_checkout(tmp_path):
    """S-19: a report names the commit of the code that ran, and that it was changed since."""
    source = tmp_path / "module.py"
    source.write_text("")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    commit = commit_of(str(source))
    assert len(commit) == 12
    source.write_text("changed")
    assert commit_of(str(source)) == f"{commit}-dirty"


def test_commit_of_a_copy(tmp_path, monkeypatch):
    """S-19: without history, what the environment says."""
    monkeypatch.delenv("PAGED_MLA_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(str(tmp_path / "module.py")) == "unknown"
    monkeypatch.setenv("PAGED_MLA_COMMIT", "abc")
    assert commit_of(str(tmp_path / "module.py")) == "abc"
