"""Run the suite against a backend: ``python -m paged_mla_conformance --backend MODULE:FACTORY``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from paged_mla_shared.dims import PRESETS


def main(arguments: list[str] | None = None) -> int:
    """Run pytest on the suite; return 0 when the backend conforms."""
    parser = argparse.ArgumentParser(
        prog="paged_mla_conformance",
        description="Prove a paged MLA backend right, or find where it is wrong.",
        epilog="Further arguments go to pytest.",
    )
    parser.add_argument("--backend", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--dims", choices=sorted(PRESETS), help="model dims (default: the mode's)")
    parser.add_argument("--dtypes", metavar="A,B", help="element types (default: the mode's)")
    parser.add_argument(
        "--profile", metavar="A,B", help="terms to speak in: names or TOML files (default: strict)"
    )
    parser.add_argument("--only", metavar="ID", help="replay one test or case id")
    parser.add_argument("--expected-failures", type=Path, metavar="TOML")
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="writes HTML and JUnit beside it"
    )
    parser.add_argument("--workers", default="0", help="processes (pytest-xdist), or 'auto'")
    options, passed_on = parser.parse_known_args(arguments)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins are none of the suite's
    return int(pytest.main(pytest_arguments(options, passed_on)))


def pytest_arguments(options: argparse.Namespace, passed_on: list[str]) -> list[str]:
    """Return pytest's command line for `options`."""
    suite = Path(__file__).with_name("suite")
    command = [
        str(suite),
        *("-c", str(suite / "pytest.ini")),  # the suite's own strictness, not the caller's
        *("-p", "paged_mla_conformance.plugin"),  # also where it is not installed
        "--quiet",
        "--tb=short",
        f"--mla-backend={options.backend}",
    ]
    if options.workers != "0":
        command += ["-p", "xdist", f"--numprocesses={options.workers}"]
    if options.dims:
        command.append(f"--mla-dims={options.dims}")
    if options.dtypes:
        command.append(f"--mla-dtypes={options.dtypes}")
    if options.profile:
        command.append(f"--mla-profile={options.profile}")
    if options.only:
        command.append(f"--mla-only={options.only}")
    if options.expected_failures:
        command.append(f"--mla-expected-failures={options.expected_failures}")
    if options.report:
        command.append(f"--mla-report={options.report}")
        command.append(f"--junitxml={options.report.with_suffix('.xml')}")
    return command + passed_on


if __name__ == "__main__":
    sys.exit(main())
