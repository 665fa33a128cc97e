"""``paged-mla judge``: finds how a function is called and what it serves, then runs the suite."""

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
from typing import Any, NoReturn

import torch

from paged_mla_adapters.judge.claims import Claims, Served, read, write
from paged_mla_adapters.judge.like import LIKE
from paged_mla_adapters.judge.probing import NOT_CALLABLE
from paged_mla_adapters.judge.roles import roles_of
from paged_mla_adapters.judge.target import calls_of, is_solution, load, solution_of
from paged_mla_conformance.run.command import main as conformance
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.documents import one_line, printable
from paged_mla_shared.errors import InvalidArgument, Unsupported

_USAGE_ERROR = 2
_ABOUT = """\
Judges a paged MLA kernel by its signature: finds the role of each parameter by its name, finds by
small calls what the function serves, writes both to a claims file, and runs the suite.
"""
_EXAMPLE = """\
example: paged-mla judge my_kernels.py:mla_decode --map q=queries --quick
Options that are not listed here go to paged-mla conformance.
"""
_MOST_NUMBERS = 12
_MOST_DEATHS = 16  # of the process that probes: more than there are layouts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line."""
        self.exit(_USAGE_ERROR, f"{self.prog}: {one_line(message)}\n")


def main(arguments: list[str] | None = None) -> int:
    """Judge a function; return 0 when it passed everything that it serves.

    Returns
    -------
    int
        That of ``paged-mla conformance``; 2 where the function cannot be called, or the command
        line is wrong.
    """
    options, rest = _parser().parse_known_args(arguments)
    path: Path = options.claims or _default_path(options.target)
    try:
        if path.exists() and not options.probe:
            print(printable(f"{path} says how the function is called; --probe finds it anew"))
            claims = read(path)
            _hold_to(claims, options, path)
        else:
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
    return conformance([*command, *rest])


def _hold_to(claims: Claims, options: argparse.Namespace, path: Path) -> None:
    """Hold what the command line says against what a claims file says.

    Raises
    ------
    InvalidArgument
        The file is of another function, or was written with other options.
    """
    if claims.target != options.target:
        allowed = f"{options.target}; --probe replaces the file, --claims names another"
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
        allowed = f"the claims file {path} was written without them; use --probe to write it anew"
        raise InvalidArgument("options", others, allowed)


def _served(options: argparse.Namespace) -> dict[str, Any]:
    return {name: _value("--served", name, text) for name, text in options.served}


def _dims(claims: Claims) -> str:
    """Return the name of dims that the function serves: on a CPU the smallest."""
    names = ("deepseek-v3", "mistral-small-4", "small")
    for name in names if claims.device == "cuda" else names[::-1]:
        if (PRESETS[name].kv_lora_rank, PRESETS[name].qk_rope_head_dim) in claims.served.head_dims:
            return name
    return names[0]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="paged-mla judge",
        description=_ABOUT,
        epilog=_EXAMPLE,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="module:function, file.py:function, or solution.json")
    add("--append", dest="kind", action="store_const", const="append", help="it writes a cache")
    add("--csr", dest="kind", action="store_const", const="csr", help="it makes page lists")
    add("--merge", dest="kind", action="store_const", const="merge", help="it merges two answers")
    add(
        "--map",
        type=_pair,
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="a parameter's role",
    )
    add(
        "--set",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the value of a parameter without a role, as Python writes it",
    )
    add(
        "--served",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what it serves, where a call without an error does not show it",
    )
    add("--like", choices=sorted(LIKE), help="the known signature that it has")
    add("--scale", type=_scale, help="the softmax scale of a function without a parameter for it")
    add("--profile", metavar="A,B", help="terms to judge it in (default: by what it returns)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--claims", type=Path, metavar="TOML", help="where claims are written, and read")
    add("--probe", action="store_true", help="find anew what claims say, and write them again")
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
    return Path("out", "judge", f"{Path(where).stem}-{name}.toml")


def _described(options: argparse.Namespace) -> Claims:
    """Return what the command line and the signature say of a function."""
    given = {name: _value("--set", name, text) for name, text in options.set}
    target, roles = _loaded(options.target), {}
    like = LIKE.get(options.like)
    if like is None or like.bind is None:
        roles = roles_of(calls_of(target), options.kind, dict(options.map), given)
        told = options.kind != "attend" or "softmax_scale" in roles.values()
        if not told and options.scale is None:
            allowed = "--map softmax_scale=NAME, or --scale of a function with one of its own"
            raise InvalidArgument("the softmax scale", "no parameter", allowed)
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
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number > 0")
    return scale


class _NotImported(Exception):
    """The user's module raised; the text is its traceback."""


def _loaded(target: str) -> Callable[..., Any]:
    try:
        return load(target)
    except InvalidArgument:
        raise
    except Exception as error:
        raise _NotImported(traceback.format_exc()) from error


def _value(option: str, name: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise InvalidArgument(f"{option} {name}", text, "a value as Python writes it") from error


class _NotCallable(Exception):
    """The function could not be probed; the text says why."""


def _probed(claims: Claims, path: Path, said: Mapping[str, Any]) -> Claims:
    """Return the claims as probing, in a process of its own, completes them; write them.

    What the user says is served replaces what was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        draft, progress = Path(folder, "claims.toml"), Path(folder, "probes.jsonl")
        write(claims, draft)
        command = [sys.executable, "-m", "paged_mla_adapters.judge.probing"]
        for _ in range(_MOST_DEATHS):
            done = subprocess.run(
                [*command, str(draft), str(progress)], capture_output=True, text=True, check=False
            )
            if done.returncode in {0, NOT_CALLABLE}:
                break
        if done.returncode != 0:
            why = done.stderr.strip() or f"the process ended with status {done.returncode}"
            raise _NotCallable(f"{claims.target} answered no call. The first errors:\n{why}")
        found = read(draft)
        if claims.kind != "merge" and not found.served.dtypes:
            raise _NotCallable(f"{claims.target} ended its process at the first call")
    profile = claims.profile or ",".join(_profiles(found))
    found = replace(found, profile=profile, served=found.served.with_these(said))
    write(found, path)
    return found


def _profiles(claims: Claims) -> Iterable[str]:
    names = {"base 2": "base-2", "none": "no-lse"}
    return filter(None, ("kernel", names.get(claims.lse)))


def _table(claims: Claims, path: Path) -> list[str]:
    """Return what a reader should hold against the function: how it is called, what it serves."""
    served, roles = claims.served, claims.roles
    called = ", ".join(n if n == r else f"{n} is {r}" for n, r in roles.items())
    rows = [("parameters", called or f"those of {LIKE[claims.like].of}")]
    if claims.kind == "attend":
        rows.append(("layouts", f"queries {claims.query}, cache {claims.cache}"))
        rows.append(
            ("lse", "none" if claims.lse == "none" else f"{claims.lse}, {claims.lse_layout}")
        )
    if claims.kind == "append":
        rows.append(("layouts", f"cache {claims.cache}"))
    if claims.kind == "merge":
        rows.append(("lse", f"{claims.lse}, {claims.lse_layout}"))
        return _aligned([*rows, ("claims", str(path))])
    formats = [name for name in served.cache_formats if name.startswith("fp8")]
    rows += [
        ("dtypes", ", ".join((*served.dtypes, *(f"caches {name}" for name in formats)))),
        ("dims (R, P)", ", ".join(f"({r}, {p})" for r, p in served.head_dims)),
        ("block sizes", _numbers(served.block_sizes)),
        ("strided caches", "served" if served.strided_cache else "not served"),
    ]
    if claims.kind == "attend":
        rows += [
            ("heads", _numbers(served.num_heads)),
            ("query lengths", _query_lengths(served)),
            ("masks", ", ".join(served.masks)),
            ("rows without keys", "served" if served.padding else "not served"),
        ]
    return _aligned([*rows, ("claims", str(path))])


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def _query_lengths(served: Served) -> str:
    if served.max_query_len == 1:
        return "1"
    longest = "any" if served.max_query_len >= 1 << 20 else f"1 to {served.max_query_len}"
    return f"{longest}, {'mixed in a call' if served.mixed else 'one in a call'}"


def _numbers(values: Sequence[int]) -> str:
    """Return what was served of what was asked: all numbers, or their range where they are many."""
    if len(values) > _MOST_NUMBERS:
        return f"{len(values)} of them from {min(values)} to {max(values)}"
    return ", ".join(map(str, values)) or "none"
