"""``paged-mla conformance``: run the suite against a backend and print the verdict."""

from __future__ import annotations

import sys

from paged_mla_conformance.run.options import parse
from paged_mla_conformance.run.status import INTERRUPTED
from paged_mla_conformance.run.workers.worker import Worker, ignored_variables, threads_of_each
from paged_mla_shared.provenance import commit_of


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return 0 when the backend conforms, or passed what was asked of it."""
    commit = commit_of(__file__)  # before an older report is removed, which commits may have
    options = parse(arguments)
    for name in ignored_variables():
        print(f"{name} is set and not used")
    first = Worker(
        options.pytest_arguments,
        on_screen=options.on_screen,
        threads=threads_of_each(options.workers),
    )
    try:
        # The first process collects the tests while this one imports what judges their results.
        from paged_mla_conformance.run.whole_run import run_suite  # noqa: PLC0415 - see above
    except KeyboardInterrupt:
        first.stop()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return run_suite(options, first, commit)
