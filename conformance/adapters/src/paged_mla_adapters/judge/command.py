"""``paged-mla judge``: find how a function is called and what it supports, then run the suite."""

from __future__ import annotations

import argparse
import ast
import json
import math
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paged_mla_adapters.judge.claims import Claims, Served, can_be_written, read, write
from paged_mla_adapters.judge.like import LIKE
from paged_mla_adapters.judge.probing import NOT_CALLABLE, TIMED_OUT, last_call
from paged_mla_adapters.judge.roles import roles_of
from paged_mla_adapters.judge.target import calls_of, file_of, is_solution, load, solution_of
from paged_mla_conformance.run import command as suite
from paged_mla_conformance.run.options import parse
from paged_mla_conformance.run.workers.child_process import kill
from paged_mla_conformance.runners.profile import load_profile
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.documents import printable
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.folders import check_files
from paged_mla_shared.options import OneLineParser
from paged_mla_shared.provenance import commit_of

_USAGE_ERROR = 2
_ABOUT = """\
Tests a paged MLA kernel without an adapter. The command finds the role of each parameter by its
name, calls the function with small steps to find what it supports, writes both to a claims file,
and runs the conformance suite.
"""
_EXAMPLE = """\
example: paged-mla judge my_kernels.py:mla_decode --map q=queries --quick
Options that are not listed here are passed to paged-mla conformance.
"""
_MOST_NUMBERS = 12
_SECONDS = 300.0  # the time limit of a call, which may compile a kernel
_MOST_DEATHS = 16  # the most processes that are started to probe: more than there are layouts


def main(arguments: list[str] | None = None) -> int:
    """Probe a function or read its claims file, then run the suite on it.

    Parameters
    ----------
    arguments : list of str or None
        The command line; ``None`` uses the arguments of the process.

    Returns
    -------
    int
        The exit status of ``paged-mla conformance``: 0 if every test that the claims cover passed.
        It is 2 if the function cannot be imported or called, if a call does not return while the
        function is probed, or if an option of this command is wrong.
    """
    options, rest = _parser().parse_known_args(arguments)
    path: Path = options.claims or _default_path(options.target)
    commit = commit_of(suite.__file__)  # before parse removes an older report, which may be in git
    try:
        if any(argument.split("=")[0] == "--backend" for argument in rest):
            raise InvalidArgument("--backend", "an option of conformance", "the target alone")
        parse(["--backend", str(path), *rest])  # report a wrong option before probing
        if options.profile is not None:
            load_profile(options.profile)
        if path.exists() and not options.probe:
            print(printable(f"{path} describes the function; --probe writes this file again"))
            claims = read(path)
            _hold_to(claims, options, path)
            _warn_of_changes(options.target, path)
        else:
            check_files(claims=path)
            claims = _probed(_described(options), path, _served(options))
    except (InvalidArgument, Unsupported, _NotCallable) as error:
        print(printable(f"paged-mla judge: {error}"), file=sys.stderr)
        return _USAGE_ERROR
    except _NotImported as error:
        print(printable(error), end="", file=sys.stderr)
        return _USAGE_ERROR
    print(printable("\n".join(_table(claims, path))), flush=True)
    command = ["--backend", str(path), "--profile", claims.profile]
    if not any(argument.startswith("--dims") for argument in rest):
        command += ["--dims", _dims(claims)]
    return suite.main([*command, *rest], commit)


def _warn_of_changes(target: str, path: Path) -> None:
    """Print a warning if the function's file changed after its claims file was written."""
    file = file_of(target)
    if file is not None and file.is_file() and file.stat().st_mtime > path.stat().st_mtime:
        text = (
            f"{file} changed after {path} was written; use --probe if it supports other calls now"
        )
        print(printable(text))


def _hold_to(claims: Claims, options: argparse.Namespace, path: Path) -> None:
    """Compare the options of the command line with a claims file that exists.

    Raises
    ------
    InvalidArgument
        The file describes another function, or was written with other options.
    """
    if claims.target != options.target:
        allowed = f"{options.target}; use --probe to replace the file, or --claims for another file"
        raise InvalidArgument(f"{path}: target", claims.target, allowed)
    held = {f"--map {role}={n}": claims.roles.get(n) == role for role, n in options.map}
    for name, text in options.set:
        stored = json.loads(json.dumps(_value("--set", name, text)))  # a file has no tuples
        held[f"--set {name}={text}"] = claims.given.get(name) == stored
    for name, text in options.served:
        said = claims.served.with_these({name: _value("--served", name, text)})
        held[f"--served {name}={text}"] = claims.served == said
    given = {"scale": claims.softmax_scale}
    given |= {name: getattr(claims, name) for name in ("like", "profile", "device")}
    for name, value in given.items():
        asked = getattr(options, name)
        held[f"--{name} {asked}"] = asked in {None, value}
    held[f"--{options.kind}"] = options.kind in {"attend", claims.kind}
    if others := ", ".join(option for option, holds in held.items() if not holds):
        allowed = f"the options that {path} was written with; use --probe to write the file again"
        raise InvalidArgument("options", others, allowed)


def _served(options: argparse.Namespace) -> dict[str, Any]:
    return {name: _value("--served", name, text) for name, text in options.served}


def _dims(claims: Claims) -> str:
    """Return the name of dims that the function supports: on a CPU the smallest.

    The result is the first name of the list if the function supports none of them.
    """
    names = ("deepseek-v3", "mistral-small-4", "small")
    for name in names if claims.device == "cuda" else names[::-1]:
        if (PRESETS[name].kv_lora_rank, PRESETS[name].qk_rope_head_dim) in claims.served.head_dims:
            return name
    return names[0]


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="paged-mla judge",
        description=_ABOUT,
        epilog=_EXAMPLE,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:function, file.py:function, or solution.json")
    add(
        "--append",
        dest="kind",
        action="store_const",
        const="append",
        help="the function writes tokens to a cache",
    )
    add(
        "--csr",
        dest="kind",
        action="store_const",
        const="csr",
        help="the function makes page lists (kv_indptr, kv_indices) from a block table",
    )
    add(
        "--merge",
        dest="kind",
        action="store_const",
        const="merge",
        help="the function merges two partial results",
    )
    add(
        "--map",
        type=_pair,
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="gives the parameter NAME the role ROLE; "
        "the error for an unknown role lists all roles",
    )
    add(
        "--set",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="passes VALUE, a Python literal, to the parameter NAME, which has no role",
    )
    add(
        "--served",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="sets the field NAME of [served] in the claims file to VALUE, a Python literal, "
        "instead of the value that probing finds",
    )
    add("--like", choices=sorted(LIKE), help="the known signature that the function has")
    add(
        "--scale",
        type=_scale,
        help="the fixed softmax scale of a function that has no parameter for the scale",
    )
    add(
        "--profile",
        metavar="A,B",
        help="profiles of the suite (default: those that fit the outputs of the function)",
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="where the function runs (default: cuda if there is a CUDA device)",
    )
    add(
        "--claims",
        type=Path,
        metavar="TOML",
        help="the claims file, which later runs read (default: a file in out/judge)",
    )
    add("--probe", action="store_true", help="probe again and replace a claims file that exists")
    parser.set_defaults(kind="attend")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: NAME=VALUE")
    return name, value


def _default_path(target: str) -> Path:
    if is_solution(target):
        return Path("out", "judge", f"{Path(target).stem}.toml")
    where, _, name = target.rpartition(":")
    stem = Path(where).stem if where.endswith(".py") else where
    return Path("out", "judge", f"{stem}-{name}.toml")


def _described(options: argparse.Namespace) -> Claims:
    """Return the claims that follow from the command line and the signature, before probing.

    Raises
    ------
    InvalidArgument
        An option is wrong, or a parameter that is required has no role.
    """
    given = {name: _value("--set", name, text) for name, text in options.set}
    target, roles = _loaded(options.target), {}
    like = LIKE.get(options.like)
    if like is None or like.bind is None:
        roles = roles_of(calls_of(target), options.kind, dict(options.map), given)
        told = options.kind != "attend" or "softmax_scale" in roles.values()
        if not told and options.scale is None:
            allowed = (
                "--map softmax_scale=NAME for the parameter that takes the scale, "
                "or --scale VALUE for a function with a fixed scale"
            )
            raise InvalidArgument("the softmax scale", "no parameter with this role", allowed)
    served = like.served if like is not None else Served()
    if is_solution(options.target):
        served = solution_of(options.target).served
    return Claims(
        target=options.target,
        served=served.with_these(_served(options)),
        kind=options.kind,
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        like=options.like or "",
        profile=options.profile or ("" if like is None else like.profile),
        roles=roles,
        given=given,
        softmax_scale=options.scale,
    )


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a finite number > 0")
    return scale


class _NotImported(Exception):
    """The import of the user's module raised an error; the text is the traceback."""


def _loaded(target: str) -> Callable[..., Any]:
    try:
        return load(target)
    except InvalidArgument:
        raise
    except Exception as error:
        raise _NotImported(traceback.format_exc()) from error


def _value(option: str, name: str, text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise InvalidArgument(
            f"{option} {name}", text, "a Python literal, for example 4"
        ) from error
    if not can_be_written(value):
        raise InvalidArgument(f"{option} {name}", text, "numbers, strings, and tuples of these")
    return value


class _NotCallable(Exception):
    """The function could not be probed; the text has the reason."""


def _probed(claims: Claims, path: Path, said: Mapping[str, Any]) -> Claims:
    """Complete the claims by probing in a process of its own; write and return them.

    Parameters
    ----------
    claims : Claims
    path : Path
        The claims file to write.
    said : mapping of str to Any
        Values of ``--served``, which replace the values that probing finds.

    Raises
    ------
    _NotCallable
        No call returned a result, a call did not return, or too many calls ended their process.
    """
    with tempfile.TemporaryDirectory() as folder:
        draft, progress = Path(folder, "claims.toml"), Path(folder, "probes.jsonl")
        write(claims, draft)
        command = [sys.executable, "-m", "paged_mla_adapters.judge.probing"]
        for _ in range(_MOST_DEATHS):
            status, errors = _run([*command, str(draft), str(progress), str(_SECONDS)], folder)
            if status in {0, NOT_CALLABLE}:
                break
            if TIMED_OUT in errors:
                raise _NotCallable(
                    f"a call of {claims.target} did not return within {_SECONDS:g} s; use --served "
                    f"to call fewer values. The call was ({last_call(progress)}):\n"
                    f"{errors[errors.index(TIMED_OUT) :].strip()}"
                )
        if status != 0:
            why = errors.strip() or f"The process ended with status {status}."
            raise _NotCallable(f"no call of {claims.target} returned. The first errors:\n{why}")
        found = read(draft)
        if claims.kind != "merge" and not found.served.dtypes:
            raise _NotCallable(f"the first call of {claims.target} ended the process")
    profile = claims.profile or ",".join(_profiles(found))
    found = replace(found, profile=profile, served=found.served.with_these(said))
    write(found, path)
    return found


def _run(command: list[str], folder: str) -> tuple[int, str]:
    """Run a command; return its exit status and what it printed to stderr.

    Processes that it leaves behind are killed. A pipe would wait for them.
    """
    with Path(folder, "errors.txt").open("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            kill(process)
            process.wait()
        errors.seek(0)
        return status, errors.read()


def _profiles(claims: Claims) -> Iterable[str]:
    names = {"base 2": "base-2", "none": "no-lse"}
    return filter(None, ("kernel", names.get(claims.lse)))


def _table(claims: Claims, path: Path) -> list[str]:
    """Return lines that describe how the function is called and what it supports.

    A user compares them with the function.
    """
    served, roles = claims.served, claims.roles
    called = ", ".join(n if n == r else f"{n} has the role {r}" for n, r in roles.items())
    rows = [("parameters", called or f"those of {LIKE[claims.like].of}")]
    if claims.kind == "attend":
        rows.append(("layouts", f"queries {claims.query}, cache {claims.cache}"))
        rows.append(
            (
                "lse",
                "not returned" if claims.lse == "none" else f"{claims.lse}, {claims.lse_layout}",
            )
        )
    if claims.kind == "append":
        rows.append(("layouts", f"cache {claims.cache}"))
    if claims.kind == "merge":
        rows.append(("lse", f"{claims.lse}, {claims.lse_layout}"))
        return _aligned([*rows, ("claims file", str(path))])
    formats = [name for name in served.cache_formats if name.startswith("fp8")]
    rows += [
        ("data types", ", ".join((*served.dtypes, *(f"{name} caches" for name in formats)))),
        (
            "kv_lora_rank, qk_rope_head_dim",
            ", ".join(f"({r}, {p})" for r, p in served.head_dims),
        ),
        ("block sizes", _numbers(served.block_sizes)),
        ("caches with gaps", "supported" if served.strided_cache else "not supported"),
    ]
    if claims.kind == "attend":
        rows += [
            ("query heads", _numbers(served.num_heads)),
            ("query lengths", _query_lengths(served)),
            ("masks", ", ".join(served.masks)),
            ("rows without keys", "supported" if served.padding else "not supported"),
        ]
    return _aligned([*rows, ("claims file", str(path))])


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def _query_lengths(served: Served) -> str:
    if served.max_query_len == 1:
        return "1"
    longest = "any" if served.max_query_len >= 1 << 20 else f"1 to {served.max_query_len}"
    return f"{longest}, {'different ones in a call' if served.mixed else 'the same in a call'}"


def _numbers(values: Sequence[int]) -> str:
    """Return the values as text; for many values, their number and range."""
    if len(values) > _MOST_NUMBERS:
        return f"{len(values)} values from {min(values)} to {max(values)}"
    return ", ".join(map(str, values)) or "none"
