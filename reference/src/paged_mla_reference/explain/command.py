"""``paged-mla explain``: name the rule that a recorded step breaks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_mla_reference.explain.checks.limits import check_keys, check_pairs
from paged_mla_reference.explain.explanation import Explanation, explain
from paged_mla_reference.explain.joint_explanation import JointExplanation, explain_jointly
from paged_mla_reference.explain.render.maps import maps_of
from paged_mla_reference.explain.render.page import render
from paged_mla_reference.explain.render.picture import draw
from paged_mla_reference.explain.render.summary import summary, summary_of_several
from paged_mla_reference.explain.render.tap_comparison import TapComparison, compare_taps
from paged_mla_reference.explain.render.trace import Trace, trace_of
from paged_mla_shared.documents import one_line
from paged_mla_shared.dump import load_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.folders import check_files
from paged_mla_shared.options import OneLineParser, refuse_idle, whole
from paged_mla_shared.taps import load_taps

_ABOUT = """\
Computes the right output of a recorded step. Prints the first rule that the recorded output breaks,
and the known bugs that produce the same numbers. The exit status is 1 if a rule is broken.
"""
_EXAMPLE = "example: paged-mla explain step.safetensors --html out/step.html"
_PICTURES = ("html", "png")
_TRACE = ("token", "head", "splits")


def main(arguments: list[str] | None = None) -> int:
    """Explain dumps; return 1 if a rule is broken, 2 if a file or an option is wrong, else 0."""
    options = _parser().parse_args(arguments)
    try:
        text, status = explain_file(options)
    except (OSError, InvalidArgument) as error:
        print(f"paged-mla explain: {one_line(error)}", file=sys.stderr)
        return 2
    print(text)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla explain", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument(
        "dumps",
        type=Path,
        nargs="+",
        metavar="DUMP",
        help="a dump (shared/docs/dump.md); several dumps are explained together, as one bug",
    )
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the pictures")
    parser.add_argument(
        "--token",
        type=whole(0),
        metavar="T",
        help="print the intermediate values of a token's right output",
    )
    parser.add_argument(
        "--head", type=whole(0), metavar="H", help="with --token: the head (default: 0)"
    )
    parser.add_argument(
        "--splits", type=whole(1), metavar="N", help="with --token: splits of its keys (default: 1)"
    )
    parser.add_argument(
        "--taps",
        type=Path,
        metavar="FILE",
        help="compare with a kernel's intermediate values, as paged-mla taps records them",
    )
    return parser


def explain_file(options: argparse.Namespace) -> tuple[str, int]:
    """Explain dumps and write the pictures; return the text to print and the exit status.

    The status is 1 if an explanation finds a broken rule. It is 0 with ``--token`` or ``--taps``.

    Raises
    ------
    InvalidArgument
        A file is not valid, has too many keys or cannot be written; the dump lacks data for an
        option, or has no token or head of the given number; the token sees no key, or fewer keys
        than ``--splits``; or an option has no effect with the other options.
    """
    if len(options.dumps) > 1:
        refuse_idle(options, (*_PICTURES, *_TRACE, "taps"), "one dump")
    if options.taps is not None:
        refuse_idle(options, (*_PICTURES, *_TRACE), "a dump, without --taps")
    if options.token is None:
        refuse_idle(options, _TRACE, "--token")
    else:
        refuse_idle(options, _PICTURES, "an explanation, without --token")
    if len(options.dumps) > 1:
        return _explain_together(options)
    check_files(html=options.html, png=options.png)
    path = options.dumps[0]
    dump = load_dump(path)
    with _naming(path):
        check_keys(dump)
    if options.taps is not None:
        taps = load_taps(options.taps)
        with _naming(path):
            found = compare_taps(dump, taps)
        return (_json(found) if options.json else found.text()), 0
    if options.token is not None:
        with _naming(path):
            trace = trace_of(dump, options.token, options.head or 0, splits=options.splits or 1)
        return (_json(trace) if options.json else trace.text()), 0
    with _naming(path):
        check_pairs(dump)
        explanation = explain(dump)
    maps = maps_of(explanation.found)
    if options.html:
        options.html.write_text(render(explanation, maps))
    if options.png:
        draw(explanation, maps, options.png)
    if options.json:
        text = _json(explanation)
    else:
        text = summary(explanation, maps, colour=sys.stdout.isatty())
    return text, int(explanation.is_broken)


def _explain_together(options: argparse.Namespace) -> tuple[str, int]:
    explanations = []
    for path, dump in [(path, load_dump(path)) for path in options.dumps]:
        with _naming(path):
            check_keys(dump)
            check_pairs(dump)
            explanations.append(explain(dump))
    found = explain_jointly(explanations)
    if options.json:
        text = _json(found)
    else:
        text = summary_of_several(found, [str(path) for path in options.dumps])
    return text, int(found.is_broken)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's path to errors about its contents."""
    try:
        yield
    except InvalidArgument as error:
        raise error.inside(str(path)) from None


def _json(found: Explanation | JointExplanation | Trace | TapComparison) -> str:
    return json.dumps(found.as_dict(), allow_nan=False)
