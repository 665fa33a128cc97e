"""Tests of ``paged-mla judge``: probing, the claims file and the exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import judged
import pytest

from paged_mla_adapters.judge import command
from paged_mla_adapters.judge.backend import backend_of
from paged_mla_adapters.judge.claims import Claims, Served, read, write
from paged_mla_adapters.judge.command import main
from paged_mla_adapters.judge.probes import LostDevice, Probe, probe
from paged_mla_adapters.judge.probing import (
    ANYTHING,
    HEADS,
    LOST,
    NotCallable,
    Recorded,
    beginnings,
    find,
)
from paged_mla_adapters.judge.roles import ALIASES, KINDS, roles_of
from paged_mla_adapters.judge.target import calls_of, load
from paged_mla_adapters.mutants.kill import ask as ask_backend
from paged_mla_conformance.run.reports.nan_origin import NanOrigin
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases.case import Row
from paged_mla_shared.errors import InvalidArgument

FILE = Path(judged.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "judge.md"
SMALLEST = Served(
    dtypes=("float32",),
    cache_formats=("fp32",),
    num_heads=(9,),
    block_sizes=(64,),
    head_dims=((32, 16),),
)


def described(name: str, kind: str = "attend", file: Path = FILE) -> Claims:
    target = f"{file}:{name}"
    return Claims(target, kind, roles=roles_of(calls_of(load(target)), kind, {}, {}))


def found(name: str, kind: str = "attend") -> Claims:
    return find(described(name, kind), lambda _key, *asked, **how: probe(*asked, **how))


def ask(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``paged-mla judge`` in a folder, on two processes."""
    return subprocess.run(
        [sys.executable, "-m", "paged_mla", "judge", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def test_a_name_has_one_role():
    names = [name for names in ALIASES.values() for name in names]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


def test_roles_follow_from_names_in_any_case():
    def kernel(Q, KV_Cache, Page_Table, Cache_Seqlens, unused=3, *more, **others): ...

    found = roles_of([kernel], "attend", {}, {})
    assert found == {
        "Q": "q",
        "KV_Cache": "kv_cache",
        "Page_Table": "block_table",
        "Cache_Seqlens": "seq_lens",
    }


def test_options_take_precedence_over_names():
    def kernel(a, kv_cache, block_table, seq_lens, num_splits, q=None): ...

    found = roles_of([kernel], "attend", {"q": "a"}, {"num_splits": 4})
    assert found["a"] == "q"
    assert "q" not in found
    assert "num_splits" not in found


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        ("q, kv_cache, block_table, seq_lens, wanted", "attend", "parameter wanted"),
        ("q, query, kv_cache, block_table", "attend", "parameters q and query"),
        ("q, kv_cache, seq_lens", "attend", "the blocks of each row"),
        ("q_nope, kv_cache, block_table", "attend", "queries of the function"),
        ("ckv, k_pe, slots", "append", "a cache of the function"),
        ("out_a, lse_a, out_b", "merge", "two partial results"),
    ],
)
def test_a_signature_that_cannot_be_called(names: str, kind: str, message: str):
    """The error names the parameter and the option that gives it a role."""
    kernel = eval(f"lambda {names}: None")
    with pytest.raises(InvalidArgument, match=message) as error:
        roles_of([kernel], kind, {}, {})
    assert "--map" in error.value.allowed


def test_parameters_that_cannot_be_named():
    with pytest.raises(InvalidArgument, match="a positional-only parameter"):
        roles_of([lambda _q, /: None], "attend", {}, {})
    with pytest.raises(InvalidArgument, match="--map: got lens"):
        roles_of([judged.decode], "attend", {"lens": "seq_lens"}, {})
    with pytest.raises(InvalidArgument, match="seq_lens=lens"):
        roles_of([judged.decode], "attend", {"seq_lens": "lens"}, {})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("decode", "MODULE:FUNCTION"),
        ("judged:nothing", "without nothing"),
        ("nowhere.py:decode", "a file that exists"),
        ("judged:LN2", "a float"),
    ],
)
def test_a_target_that_does_not_exist(target: str, message: str):
    with pytest.raises(InvalidArgument, match=message):
        load(target)


def test_a_class_without_plan():
    with pytest.raises(InvalidArgument, match="plan and run"):
        calls_of(dict)


def test_the_simplest_function():
    """Supported values are those of calls that return; rows have one query token each."""
    claims = found("decode")
    served = claims.served
    assert (claims.query, claims.cache, claims.lse) == ("[T, H, D]", "[blocks, size, D]", "natural")
    assert set(served.dtypes) == {"float32", "float16", "bfloat16"}
    assert served.num_heads == HEADS
    assert {1, 64, 256} < set(served.block_sizes)
    assert (512, 64) in served.head_dims
    assert served.max_query_len == 1
    assert not served.mixed
    assert served.padding
    assert served.strided_cache


def test_an_error_is_not_supported_and_a_wrong_output_is():
    """A call that raises is not supported; the suite tests a call with a wrong output."""
    assert set(found("refuses_odd_heads").served.num_heads) == {16, 32, 48, 64, 96, 128}
    assert found("sixteen_heads_at_a_time").served.num_heads == HEADS


def test_lengths_without_the_steps_own_tokens():
    """S-2: these lengths have their own role, which the user passes."""
    target = f"{FILE}:behind_a_prefix"
    mapped = {"prefix_lens": "cache_seqlens"}
    roles = roles_of(calls_of(load(target)), "attend", mapped, {})
    assert roles["cache_seqlens"] == "prefix_lens"
    claims = find(Claims(target, roles=roles), lambda _key, *asked, **how: probe(*asked, **how))
    case, dims, dtype = next(beginnings(claims))
    assert probe(claims, case, dims, dtype).error < 0.01


def test_layouts_follow_from_the_nearest_output():
    claims = found("with_a_head_axis")
    assert claims.query == "[B, Q, H, D]"
    assert claims.cache == "[blocks, size, 1, D]"
    assert (claims.out, claims.lse_layout) == ("[B, Q, H]", "[B, H, Q]")
    assert claims.served.masks == ("causal", "non_causal")
    assert claims.served.max_query_len > 1000
    assert not claims.served.mixed


def test_slots_of_requests_and_a_flat_cache():
    claims = found("over_requests")
    assert claims.cache == "[slots, 1, D]"
    assert claims.lse == "none"
    assert not claims.served.strided_cache


def test_a_class_over_csr():
    claims = found("Wrapper")
    assert claims.lse == "base 2"
    assert claims.served.mixed
    assert claims.served.masks == ("causal", "non_causal")


def test_writers_and_merges():
    assert found("write", "append").cache == "[blocks, size, D]"
    assert found("write_whatever_the_slot", "append").cache == "[slots, D]"
    assert found("merge", "merge").lse_layout == "[H, T]"
    assert found("merge_in_base_2", "merge").lse == "base 2"


def test_wrong_page_lists_count_as_supported():
    """Wrong lists raise no Python error, so that the suite tests them."""
    for name in ("page_lists", "page_lists_of_full_pages"):
        assert {1, 64} < set(found(name, "csr").served.block_sizes)


def test_a_function_with_a_scale_of_its_own_is_called_at_this_scale():
    """The function has no parameter for the scale; a probe at another scale would fail."""
    claims = find(
        replace(described("with_a_scale_of_its_own"), softmax_scale=0.125),
        lambda _key, *asked, **how: probe(*asked, **how),
    )
    assert claims.lse == "natural"
    assert {1, 64} < set(claims.served.block_sizes)


def test_a_layout_in_which_a_bug_cannot_show_is_not_taken():
    """Only the row whose last page is full is right, which is enough to find the layout."""
    claims = found("last_pages_are_full")
    assert claims.cache == "[blocks, size, D]"
    assert claims.lse == "natural"


@pytest.mark.parametrize("name", ["reads_the_table_of_the_row_before", "reads_the_rows_in_reverse"])
def test_a_function_that_reads_another_row_is_called_with_the_right_layouts(name: str):
    """No row of such a function is right, so rows with almost the same keys give the layout."""
    right, claims = found("decode"), found(name)
    assert (claims.query, claims.cache, claims.lse) == (right.query, right.cache, right.lse)


def test_a_class_plans_another_step_before():
    """S-17: a function that keeps the plan of the other step fails."""
    with pytest.raises(Mismatch, match="S-5"):
        ask_backend(backend_of(replace(described("PlansOnce"), served=ANYTHING)), "attend")


def test_a_function_that_ends_its_process_is_not_supported():
    claims = replace(described("exits"), served=ANYTHING)
    assert probe(claims, *next(beginnings(claims))).why_not == "SystemExit: 0"


def test_a_call_that_loses_the_device_counts_as_supported(tmp_path: Path):
    """S-9: the probing process ends, and the next process continues after this call."""
    progress, path = tmp_path / "probes.jsonl", tmp_path / "claims.toml"
    with pytest.raises(LostDevice, match="illegal memory access"):
        find(described("loses_the_device"), Recorded(progress, seconds=60))
    found = find(described("loses_the_device"), Recorded(progress, seconds=60))
    assert {4, 5, 6} < set(found.served.num_heads)
    write(described("loses_the_device"), path)
    command = [sys.executable, "-m", "paged_mla_adapters.judge.probing", str(path)]
    ended = subprocess.run([*command, str(tmp_path / "new.jsonl"), "60"], check=False)
    assert ended.returncode == LOST


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("merge_in_place", "merge", "merge: the input out_a was changed"),
        ("clears_queries", "attend", "attend: the input q_pe was changed"),
        ("clears_keys", "attend", "cache: .* bytes wrong"),
    ],
)
def test_inputs_that_a_function_may_only_read(name: str, kind: str, said: str):
    """S-10: parts of queries and caches are inputs too. The suite fails, but no probe does."""
    claims = replace(described(name, kind), served=ANYTHING)
    case, dims, dtype = next(beginnings(claims))
    assert not probe(claims, case, dims, dtype).why_not
    with pytest.raises(Mismatch, match=rf"^\[S-10\] {said}"):
        ask_backend(backend_of(claims), kind)


def test_a_table_by_rows_and_buffers_of_splits():
    """``req_to_tokens`` with a page size and without request numbers is a block table."""
    claims = found("in_splits")
    assert claims.roles["req_to_tokens"] == "block_table"
    assert (claims.cache, claims.lse) == ("[blocks, size, D]", "none")
    case, dims, dtype = next(beginnings(claims))
    assert probe(claims, case, dims, dtype).error < 0.01


def test_slots_in_blocks_of_a_known_size():
    """Without lengths an entry is the slot of one key, in a block of the passed size."""
    claims = found("in_blocks_of_slots")
    assert claims.cache == "[blocks, size, D]"
    assert {1, 64} < set(claims.served.block_sizes)
    case, dims, dtype = next(beginnings(claims))
    assert case.block_size == 64
    assert probe(claims, case, dims, dtype).error < 0.01


def test_sizes_and_a_scale_in_a_tensor():
    claims = found("with_every_size")
    assert (claims.query, claims.out) == ("[B, Q, H, D]", "[B, Q, H]")
    assert "fp8_e4m3" in claims.served.cache_formats
    assert claims.served.max_query_len == 1


def test_lists_of_tokens():
    """The outputs decide whether lists have pages or slots."""
    assert found("token_lists", "csr").cache == "[slots, D]"
    assert found("page_lists", "csr").cache == "[blocks, size, D]"


def test_options_replace_supported_values():
    served = Served(mixed=True).with_these({"mixed": False, "num_heads": 16, "masks": ("causal",)})
    assert (served.mixed, served.num_heads, served.masks) == (False, (16,), ("causal",))
    for wrong, message in (({"heads": 16}, "unknown field 'heads'"), ({"mixed": 1}, "mixed")):
        with pytest.raises(InvalidArgument, match=message):
            Served().with_these(wrong)


def test_a_function_that_raises_in_every_call():
    """The error lists the first errors, each once."""

    def ask(*_asked, **_how):
        return Probe(why_not="RuntimeError: no kernel image")

    with pytest.raises(NotCallable) as error:
        find(described("decode"), ask)
    assert str(error.value).count("no kernel image") == 1


def test_sizes_of_which_the_suite_has_no_step():
    """There is no call to try; the error names the sizes and those that are allowed."""
    claims = replace(described("decode"), served=Served(head_dims=((64, 3),)))
    with pytest.raises(NotCallable, match=r"no step has head_dims \(\(64, 3\),\).*\(512, 64\)"):
        find(claims, Recorded(Path("unused"), seconds=60))


def test_a_wrong_option_of_the_suite_is_an_error_before_probing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    claims = tmp_path / "claims.toml"
    with pytest.raises(SystemExit):
        main([f"{FILE}:never_returns", "--claims", str(claims), "--workers", "many"])
    assert "--workers: got 'many'" in capsys.readouterr().err
    assert not claims.exists()


def test_the_commit_is_read_before_an_older_report_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """S-20: writing a committed report again does not make the commit dirty."""
    claims, report, commits = tmp_path / "claims.toml", tmp_path / "report.json", []
    write(described("decode"), claims)
    report.write_text("{}")
    monkeypatch.setattr(command, "commit_of", lambda _: "clean" if report.exists() else "dirty")
    monkeypatch.setattr(command.suite, "main", lambda _, commit: commits.append(commit))
    main([read(claims).target, "--claims", str(claims), "--report", str(report)])
    assert commits == ["clean"]


def test_a_call_that_does_not_return_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The message names the call and the line, because an endless loop is a bug too."""
    monkeypatch.setattr(command, "_SECONDS", 15.0)
    claims = tmp_path / "claims.toml"
    assert main([f"{FILE}:never_returns", "--device", "cpu", "--claims", str(claims)]) == 2
    said = capsys.readouterr().err
    assert "did not return within 15 s" in said
    assert "(num_heads 5)" in said
    assert "in never_returns" in said
    assert not claims.exists()


@pytest.mark.parametrize("name", ["changes_the_folder", "starts_a_process"])
def test_what_a_function_does_to_its_process_does_not_stop_probing(name: str, tmp_path: Path):
    """A relative target is found again, and a process that the function started is killed."""
    claims = tmp_path / "claims.toml"
    once = ["--served", "num_heads=4", "--served", "block_sizes=16", "--only", "decode-bs16-fp32"]
    started = time.monotonic()
    done = ask(f"judged.py:{name}", "--claims", str(claims), *once, folder=FILE.parent)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 300
    assert read(claims).target == f"judged.py:{name}"


def test_a_claims_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The error comes before any call."""
    (tmp_path / "file").write_text("")
    claims = tmp_path / "file" / "claims.toml"
    assert main([f"{FILE}:never_returns", "--device", "cpu", "--claims", str(claims)]) == 2
    assert str(claims) in capsys.readouterr().err


def test_claims_without_a_size_are_an_error():
    """S-20: the suite would test nothing and find no error."""
    with pytest.raises(
        InvalidArgument, match=r"served.max_query_len: got 0; allowed: numbers >= 1"
    ):
        Claims("f.py:f", served=Served(max_query_len=0))


def test_a_probe_that_ended_its_process_counts_as_supported(tmp_path: Path):
    """S-9: a crash is not a Python error, so that the suite tests the call."""
    path = tmp_path / "probes.jsonl"
    path.write_text(json.dumps({"key": "num_heads 5", "probe": None}) + "\n")
    claims = find(described("refuses_odd_heads"), Recorded(path, seconds=60))
    assert 5 in claims.served.num_heads
    assert 6 not in claims.served.num_heads


def test_claims_are_read_as_they_were_written(tmp_path: Path):
    path = tmp_path / "out" / "claims.toml"
    served = Served(dtypes=("float16",), head_dims=((512, 64),), num_heads=(16,), padding=False)
    claims = replace(
        described("Wrapper"),
        given={"splits": 4, "lse": None, "größe": "\U0001f600"},
        softmax_scale=0.125,
        served=served,
    )
    write(claims, path)
    assert read(path) == claims
    assert claims.capabilities.softmax_scale == 0.125
    assert "padding" not in claims.capabilities.features


@pytest.mark.parametrize("name", ["kind", "device", "query", "cache", "out", "lse_layout", "lse"])
def test_claims_with_an_unknown_word(name: str):
    with pytest.raises(InvalidArgument, match=f"{name}: got 'other'"):
        Claims("judged:decode", **{name: "other"})


@pytest.mark.parametrize(
    ("name", "options", "status", "expected"),
    [
        ("Wrapper", [], 0, "profile kernel,base-2"),
        ("write", ["--append"], 0, "PASSED in part"),
        ("sixteen_heads_at_a_time", ["--only", "decode-h9-fp32"], 1, "S-5"),
        ("write_whatever_the_slot", ["--append", "--only", "append-idle-fp32"], 1, "S-10"),
        ("merge_in_base_2", ["--merge", "--only", "one-holes"], 1, "S-8"),
        (
            "page_lists_of_full_pages",
            ["--csr", "--only", "decode-h9-fp32"],
            1,
            "pages of 64 tokens",
        ),
    ],
)
def test_the_exit_status(name: str, options: list[str], status: int, expected: str, tmp_path: Path):
    """A right function passes, and a wrong function fails with its rule."""
    few = [] if "--only" in options else ["--quick"]
    done = ask(f"{FILE}:{name}", *options, *few, folder=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert expected in done.stdout


def test_a_later_run_uses_the_claims_file(tmp_path: Path):
    """The suite tests values of the claims file, also if the function raises now."""
    target = f"{FILE}:refuses_odd_heads"
    path = tmp_path / "claims.toml"
    write(replace(found("decode"), target=target), path)
    done = ask(target, "--claims", str(path), "--only", "decode-h9-fp32", folder=tmp_path)
    assert "--probe writes this file again" in done.stdout
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError: heads" in done.stdout


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("my.kernels:decode", "my.kernels-decode"),
        ("my.other:decode", "my.other-decode"),
        ("folder/kernels.py:decode", "kernels-decode"),
    ],
)
def test_the_default_path_names_the_whole_module(target: str, name: str):
    """Functions of two modules of one package have two files."""
    assert command._default_path(target) == Path("out", "judge", f"{name}.toml")


@pytest.mark.parametrize("role", ["rank", "queries"])
def test_claims_with_an_unknown_role(role: str, tmp_path: Path):
    """The error names the parameter, the role and all roles."""
    path = tmp_path / "claims.toml"
    write(Claims("judged:decode", roles={"query": "q"}), path)
    path.write_text(path.read_text().replace('query = "q"', f'query = "{role}"'))
    allowed = ", ".join(ALIASES)
    with pytest.raises(InvalidArgument, match=rf"roles.query: got '{role}'; allowed: {allowed}$"):
        read(path)


def test_claims_of_another_function_are_an_error(tmp_path: Path):
    """Two files with one name share the default path, but not their claims."""
    path = tmp_path / "claims.toml"
    write(Claims(f"{FILE}:decode"), path)
    done = ask(f"{FILE}:without_lse", "--claims", str(path), folder=tmp_path)
    assert done.returncode == 2
    assert "use --probe to replace the file" in done.stderr


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--map", "q=queries"], "--map q=queries"),
        (["--set", "splits=8", "--scale", "0.5"], "--set splits=8, --scale 0.5"),
        (["--like", "flash_mla"], "--like flash_mla"),
        (["--merge"], "--merge"),
        (["--set", "splits=(4, 4)", "--set", "more=1"], "--set more=1"),
        (["--map", "q=query", "--set", "splits=(4, 4)", "--scale", "0.25", "--append"], ""),
    ],
)
def test_options_that_a_claims_file_was_written_without(
    options: list[str],
    refused: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The error names these options; options with which the file was written are accepted."""
    path = tmp_path / "claims.toml"
    given = {"splits": [4, 4]}
    roles = {"query": "q"}
    write(Claims("judged:gone", "append", roles=roles, given=given, softmax_scale=0.25), path)
    monkeypatch.setattr(command.suite, "main", lambda *_: 0)
    status = command.main(["judged:gone", "--claims", str(path), *options])
    said = capsys.readouterr().err
    if refused:
        assert status == 2
        assert f"options: got {refused}; allowed: the options that {path} was written" in said
        assert "use --probe to write the file again" in said
    else:
        assert (status, said) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["judged.py"], "allowed: MODULE:FUNCTION"),
        ([f"{FILE}:decode", "--map", "q"], "allowed: NAME=VALUE"),
        ([f"{FILE}:decode", "--set", "x=a b"], "a Python literal"),
        ([f"{FILE}:decode", "--served", "heads=16"], "--served: got an unknown field"),
        ([f"{FILE}:decode", "--scale", "-1"], "a finite number > 0"),
        ([f"{FILE}:decode", "--backend", "a:b"], "--backend: got an option of conformance"),
        ([f"{FILE}:is_a_coroutine"], "target: got the coroutine is_a_coroutine"),
        ([f"{FILE}:decode", "--map", "workspace=softmax_scale"], "the softmax scale"),
        ([f"{FILE}:decode", "--set", "zzz=1"], "--set: got zzz; allowed: the parameters q,"),
        ([f"{FILE}:decode", "--served", "num_heads=-4"], "num_heads: got -4; allowed: numbers"),
        ([f"{FILE}:decode", "--served", "num_heads={4}"], "num_heads: got {4}; allowed: numbers"),
        ([f"{FILE}:decode", "--served", "products='best'"], "products: got 'best'; allowed: exact"),
        ([f"{FILE}:decode", "--set", "x={1: 2}"], "--set x: got {1: 2}; allowed: numbers"),
        ([f"{FILE}:decode", "--set", "x={[]: 1}"], "--set x: got {[]: 1}; allowed: a Python"),
        ([f"{FILE}:decode", "--set", f"x={'-' * 9999}1"], "1; allowed: a Python literal"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The error has one line and is printed before any call."""
    monkeypatch.chdir(tmp_path)
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_module_that_cannot_be_imported(tmp_path: Path):
    """The command prints the user's traceback and does not report skipped tests."""
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    done = ask("broken:decode", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "a_package_that_is_not_there" in done.stderr


def test_the_page_has_every_role_and_its_names():
    page = PAGE.read_text()
    for role, names in ALIASES.items():
        assert f"| `{role}` | {', '.join(names)} |" in page
    assert set(KINDS) == {"attend", "append", "merge", "csr"}


def test_the_page_has_a_kernel_with_a_bug_and_its_fix(tmp_path: Path):
    """The first kernel leaves out a last block that is not full; the fixed lines read it."""
    kernel, fix = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    fixed = kernel
    for line in fix.splitlines():
        name = line.partition(" = ")[0]
        fixed = re.sub(rf"^{name} = .*$", lambda _, line=line: line, fixed, flags=re.MULTILINE)
    errors = {}
    for name, source in (("bug", kernel), ("fixed", fixed)):
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        claims = replace(described("decode", file=file), served=ANYTHING)
        case, dims, dtype = next(beginnings(claims))
        assert case.block_size == 64
        for keys in (128, 40):
            probed = probe(claims, replace(case, rows=(Row(keys, 1),)), dims, dtype)
            errors[name, keys] = (probed.error, probed.lse_errors.get("natural"))
    assert max(errors["bug", 128] + errors["fixed", 128] + errors["fixed", 40]) < 0.01
    error, lse_error = errors["bug", 40]
    assert error > 0.9
    assert lse_error == float("inf")


def test_the_screen_names_the_origin_of_a_nan(tmp_path: Path):
    """S-9: the test runs again, with zeros in one kind of memory at a time."""
    claims = replace(described("leaves_its_last_head_unwritten"), served=SMALLEST)
    write(claims, tmp_path / "claims.toml")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paged_mla", "conformance", "--backend", "claims.toml"),
            *("--dims", "small", "--dtypes", "float32", "--only", "decode-h9-fp32"),
            *("--profile", "kernel", "--report", "found.json"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1, done.stderr
    causes = json.loads((tmp_path / "found.json").read_text())["causes"]
    [cause] = [cause for cause in causes if cause["what"] == "out"]
    assert cause["rule"] == "S-5"
    assert NanOrigin.BUFFERS.phrase in cause["sentence"]


def test_an_unknown_profile_is_an_error_before_any_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The error names the profiles that exist."""
    status = command.main([f"{FILE}:decode", "--profile", "none", "--claims", str(tmp_path / "c")])
    assert status == 2
    assert "profile: got 'none'; allowed: " in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_file_that_changed_after_its_claims_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The claims may be wrong for the new function."""
    kernel, path = tmp_path / "kernel.py", tmp_path / "claims.toml"
    kernel.touch()
    write(Claims(f"{kernel}:gone", "append", roles={"slots": "slot_mapping"}), path)
    monkeypatch.setattr(command.suite, "main", lambda *_: 0)
    arguments = [f"{kernel}:gone", "--claims", str(path)]
    os.utime(kernel, (1, 1))
    assert command.main(arguments) == 0
    assert "changed after" not in capsys.readouterr().out
    os.utime(path, (0, 0))
    assert command.main(arguments) == 0
    assert f"{kernel} changed after {path} was written; use --probe" in capsys.readouterr().out
