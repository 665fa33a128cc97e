"""Folders of what commands write."""

from pathlib import Path

from paged_mla_shared.errors import InvalidArgument


def make_folders(*files: Path | None) -> None:
    """Make the folders that `files` will lie in, where there are none."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)


def check_files(**files: Path | None) -> None:
    """Check that files can be written, before the work whose results they are to hold.

    Their folders are made. A file that is there stays as it is.

    Parameters
    ----------
    **files
        By the names of their options; ``None`` for one that is not given.

    Raises
    ------
    InvalidArgument
        Names the option, the file and what is wrong.
    """
    for name, file in files.items():
        if file is None:
            continue
        try:
            make_folders(file)
            is_new = not file.exists()
            with file.open("ab"):
                pass
            if is_new:
                file.unlink()
        except OSError as error:
            given = f"{file}, which cannot be written: {error.strerror}"
            raise InvalidArgument(f"--{name}", given, "a place that is writable") from error
