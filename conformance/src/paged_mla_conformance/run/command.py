"""``paged-mla conformance``: run the suite on a backend and print the verdict."""

from __future__ import annotations

import sys

from paged_mla_conformance.run.options import parse
from paged_mla_conformance.run.status import INTERRUPTED
from paged_mla_conformance.run.workers.worker import Worker, ignored_variables, threads_of_each
from paged_mla_shared.provenance import commit_of


def main(arguments: list[str] | None = None, commit: str = "") -> int:
    """Run the suite and return the exit status: 0 if there is no reason against the backend.

    Parameters
    ----------
    arguments : list of str or None
        The command line; ``None`` uses the arguments of the process.
    commit : str
        The commit of the suite's source, if the caller has looked it up; "" looks it up.
    """
    # First: removing an older report that is in git changes the tree.
    commit = commit or commit_of(__file__)
    options = parse(arguments)
    for name in ignored_variables():
        print(f"The environment variable {name} is set; the suite ignores it.")
    first = Worker(
        options.pytest_arguments,
        on_screen=options.on_screen,
        threads=threads_of_each(options.workers),
    )
    try:
        # The first worker collects the tests while this process imports the code for reports.
        from paged_mla_conformance.run.whole_run import run_suite  # noqa: PLC0415 - see above
    except KeyboardInterrupt:
        first.stop()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return run_suite(options, first, commit)
