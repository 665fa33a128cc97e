"""Find words that the style page excludes, in messages, docstrings and pages.

    python -m ci.check_words [FILE...]    # all tracked files without FILE

CONTRIBUTING.md has the table of the words. Code, links and the lines that name parameters are not
searched.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ci.packages import ROOT, tracked

WORDS = (
    "answers?|answered|answering",
    "asks?|asked|asking",
    "says?|said|saying",
    "tells?|told|telling",
    "speaks?|spoken|spoke",
    "besides?",
    "lies?|lay|lying",
    "stands?|stood|standing",
    "whatever",
    "nobody",
    "owe|owes|owed",
    "anew|afresh",
    "begun",
    "mends?|mended",
    r"in\s+turns",
    r"no\s+number(?!\s+of)",
    "spoils?|spoiled|spoilt",
    "bends?|bent|bending",
    "strangers?",
    r"rid\s+of",
    "scenes?",
)
FOUND = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)
PARAMETER = re.compile(r"^ *[\w*, ]+ : .*$", re.MULTILINE)
ASSEMBLER = "inline_asm_elementwise"  # its instructions are code
SKIPPED = re.compile(r"optimized/bench/reports/")  # tools write these pages


def prose(text: str) -> str:
    """Return a text without code, links and parameters; its lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return PARAMETER.sub(blank, CODE.sub(blank, text))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each text of a file that people read, and the number of its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, source
        return
    tree = ast.parse(source)
    assembly = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(ASSEMBLER)
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in assembly:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def found(path: Path) -> list[tuple[int, str]]:
    """Return the line and the text of each excluded word in a file."""
    words = []
    for first, text in texts(path):
        clean = prose(text)
        words += [
            (first + clean.count("\n", 0, match.start()), match[0])
            for match in FOUND.finditer(clean)
        ]
    return sorted(words)


def main(arguments: list[str]) -> int:
    """Print each excluded word; return 1 if there is one, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m ci.check_words", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", default=["*.py", "*.md", "*.html"])
    files = parser.parse_args(arguments).files
    names = [name for name in tracked(*files) if not SKIPPED.search(name)]
    lines = [f"{name}:{line}: {word}" for name in names for line, word in found(ROOT / name)]
    print("\n".join([*lines, f"{len(names)} files, {len(lines)} excluded words"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
