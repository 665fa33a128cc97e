"""The report: JSON is the source, everything else is rendered from it."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import platform
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_mla_conformance import __version__
from paged_mla_conformance.profile import SUITE_GROUPS, Run
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.provenance import commit_of

SCHEMA = Path(__file__).with_name("report.schema.json")

OUTCOMES = ("passed", "failed", "skipped", "expected-failure", "unexpected-pass")
FAILING = ("failed", "unexpected-pass")
_PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "pytest")


@dataclass(frozen=True)
class Result:
    """What became of one test.

    Parameters
    ----------
    test : str
        ``test_function[id]``, exact.
    group : str
    rules : list of str
    why : str
        What the case guards against.
    outcome : {"passed", "failed", "skipped", "expected-failure", "unexpected-pass"}
    reason : str
        Of a skip, or of an expected failure.
    undeclared_core : bool
        A skip that costs the verdict.
    message : str
        The failure.
    replay : str
        Command that runs this test alone.
    checks : list of dict
        ``what``, ``error`` and ``budget`` of each comparison that held.
    ms : float
    """

    test: str
    group: str
    rules: list[str]
    why: str
    outcome: str
    reason: str = ""
    undeclared_core: bool = False
    message: str = ""
    replay: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    ms: float = 0.0


@dataclass
class Report:
    """Everything a run found out.

    Parameters
    ----------
    run : Run
    results : list of Result
    partial : bool
        True when the user asked for one case: then there is no verdict on the backend.
    errors : list of str
        What kept the run from finishing.
    """

    run: Run
    results: list[Result] = field(default_factory=list)
    partial: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def totals(self) -> dict[str, int]:
        """How many tests ran, and what became of them."""
        found = Counter(result.outcome for result in self.results)
        counts = {outcome: found[outcome] for outcome in OUTCOMES}
        return {"all": len(self.results), "run": len(self.results) - counts["skipped"], **counts}

    @property
    def skip_reasons(self) -> dict[str, int]:
        """How many tests each reason skipped."""
        return dict(Counter(r.reason for r in self.results if r.outcome == "skipped"))

    @property
    def reasons_against(self) -> list[str]:
        """Why the backend is not conformant; empty when it is."""
        against = list(self.errors)
        failing = sum(r.outcome in FAILING for r in self.results)
        if failing:
            against.append(f"{failing} failing tests")
        undeclared = {r.reason for r in self.results if r.undeclared_core}
        against += [f"core capability missing: {reason}" for reason in sorted(undeclared)]
        ran = {r.group for r in self.results if r.outcome != "skipped"}
        excused = {r.group for r in self.results if r.outcome == "skipped"}
        if not self.partial:
            missing = [group for group in SUITE_GROUPS if group not in ran | excused]
            against += [f"group {group} was not asked" for group in missing]
        if not ran:
            against.append("no test ran")
        return against

    @property
    def verdict(self) -> str:
        """One line: does the backend conform, where, and on how much evidence."""
        word = "NOT CONFORMANT" if self.reasons_against else "CONFORMANT"
        if self.partial:
            word = "FAILED (one case)" if self.reasons_against else "PASSED (one case)"
        t = self.totals
        backend = self.run.backend
        return (
            f"{word}: {backend.name} {backend.version} in mode {backend.mode} on {backend.device}, "
            f"dims {self.run.dims_name}, {'/'.join(self.run.dtypes)}, "
            f"profile {self.run.profile.name}: {t['run']} run, "
            f"{t['skipped']} skipped, {t['expected-failure']} expected-failed of {t['all']}; "
            f"{t['failed'] + t['unexpected-pass']} failed"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document (see ``report.schema.json``)."""
        backend = self.run.backend
        return {
            "schema": 1,
            "suite": {"name": "paged-mla-conformance", "version": __version__},
            "commit": commit_of(__file__),
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "backend": {
                "factory": self.run.factory,
                "name": backend.name,
                "version": backend.version,
                "mode": backend.mode,
                "device": backend.device,
                "capabilities": _capabilities(backend.capabilities),
            },
            "environment": {"python": platform.python_version(), **versions()},
            "dims": self.run.dims_name,
            "dtypes": list(self.run.dtypes),
            "profile": self.run.profile.name,
            "conformant": not self.reasons_against,
            "reasons_against": self.reasons_against,
            "verdict": self.verdict,
            "totals": self.totals,
            "results": [asdict(r) for r in sorted(self.results, key=lambda r: r.test)],
        }

    def write(self, path: Path) -> dict[str, Any]:
        """Write the JSON report to `path`; return the document."""
        document = self.as_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        return document


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    return {
        k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(capabilities).items()
    }


def versions() -> dict[str, str]:
    """Return the version of each package in use, which need not be the one installed."""
    found = {}
    for package in _PACKAGES:
        version = getattr(sys.modules.get(package), "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = "absent"
        found[package] = str(version)
    return found
