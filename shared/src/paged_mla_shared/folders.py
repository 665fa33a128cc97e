"""The paths and folders of output files, and checks that files can be written."""

from pathlib import Path

from paged_mla_shared.errors import InvalidArgument


def with_ending(stem: Path, ending: str) -> Path:
    """Return `stem` with `ending`, for example ``.json``, unless it has it; other dots stay."""
    return stem if stem.suffix == ending else stem.with_name(stem.name + ending)


def make_folders(*files: Path | None) -> None:
    """Create the parent folders of `files` that do not exist; ignore ``None``."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)


def check_files(**files: Path | None) -> None:
    """Check that output files can be written, before the work starts.

    Missing parent folders are created. Existing files stay unchanged.

    Parameters
    ----------
    **files
        The files by the names of their options; ``None`` for an option that is not set.

    Raises
    ------
    InvalidArgument
        A file cannot be written. The message names the option, the file and the reason.
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
            raise InvalidArgument(f"--{name}", given, "a path that can be written") from error
