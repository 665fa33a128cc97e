"""Folders of what commands write."""

from pathlib import Path


def make_folders(*files: Path | None) -> None:
    """Make the folders that `files` will lie in, where there are none."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
