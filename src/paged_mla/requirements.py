"""The versions of other packages that paged-mla supports, from its installed metadata."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

_COMPARE = {">=": operator.ge, "<": operator.lt, "<=": operator.le, ">": operator.gt}
_NAME = re.compile(r"[\w.-]+")
_BOUND = re.compile(r"(>=|<=|>|<)\s*([\d.]+)")


@dataclass(frozen=True)
class Requirement:
    """The bounds on the version of a package.

    Parameters
    ----------
    text : str
        The requirement as in the metadata: "triton<3.10,>=3.6; extra == 'optimized'".
    """

    text: str

    @property
    def bounds(self) -> list[tuple[str, str]]:
        """Pairs of comparison and version, for example (">=", "3.6"); lower bounds come first."""
        return sorted(_BOUND.findall(self.text.partition(";")[0]), reverse=True)

    def allows(self, version: str) -> bool:
        """Return whether a version is inside the bounds.

        A release candidate counts as its release. A development build, for example
        ``0.1.dev7+g1a2b3c4``, is always allowed.
        """
        if "dev" in version:
            return True
        found = _release(version)
        return all(_COMPARE[sign](found, _release(bound)) for sign, bound in self.bounds)

    def __str__(self) -> str:
        return ", ".join(sign + version for sign, version in self.bounds)


def requirements() -> dict[str, Requirement]:
    """Return the requirements of the installed paged-mla by package name, with one for "python".

    The dict is empty if paged-mla is imported from a folder and not installed.
    """
    try:
        distribution = metadata.distribution("paged-mla")
    except metadata.PackageNotFoundError:
        return {}
    found = {"python": Requirement(distribution.metadata["Requires-Python"])}
    for text in distribution.requires or []:
        name = _NAME.match(text)
        if name is not None:
            found[name[0]] = Requirement(text)
    return found


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it; ``None`` if it is not installed."""
    try:
        return metadata.version(package) if find_spec(package) else None
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version without trailing zeros: "3.6.0+g1" is (3, 6)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
