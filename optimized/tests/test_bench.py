import json
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paged_mla_optimized.tensors.latent_cache import LatentCache, empty_cache
from paged_mla_optimized.tools.bench import (
    accuracy,
    append,
    formats,
    fp8,
    layer,
    lengths,
    parallel,
    peers,
    prefill,
    table,
    timing,
)
from paged_mla_optimized.tools.bench.__main__ import main, parse
from paged_mla_optimized.tools.bench.cases import GROUPS, MAIN, Case
from paged_mla_optimized.tools.bench.problem import build, error
from paged_mla_optimized.tools.bench.report import header, line, summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "torch finds no GPU"),
        ("--only (", "--only: got '('"),
        ("--only h17", "--only: got 'h17'"),
        ("--out nowhere/stem", "--out: got nowhere/stem"),
        ("--peers nowhere", "--peers: got nowhere"),
    ],
    ids=["no-gpu", "no-regex", "no-row", "no-folder", "no-peers"],
)
def test_a_table_that_cannot_be_made(monkeypatch, capsys, arguments, message):
    """S-20: refused in one line, before its first row is timed."""
    monkeypatch.setattr(sys, "argv", ["bench.layer", *arguments.split()])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as caught:
        layer.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_dot_in_the_stem_of_a_table_stays(monkeypatch, tmp_path):
    """S-20: the table of one version does not replace that of another."""
    monkeypatch.setattr(table, "device_record", dict)
    options = SimpleNamespace(only="", out=tmp_path / "h200.v2")
    table.run([SimpleNamespace(name="row")], lambda _: {}, lambda _: "| row |", "| name |", options)
    assert {path.name for path in tmp_path.iterdir()} == {"h200.v2.json", "h200.v2.md"}


def test_work_of_a_case():
    """S-5: two products over every key, each cached row read once."""
    case = Case("two rows", num_heads=16, query_len=2, seq_lens=(100, 28))
    assert case.flops == 2 * 16 * 2 * 128 * (576 + 512)
    assert case.bytes == 128 * 1152 + 2 * 2 * 16 * (576 + 512) * 2


def test_cases_have_names_of_their_own():
    """A table row names one case."""
    for cases in GROUPS.values():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
    assert len(MAIN) == 12


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "optimized" / "README.md", *sorted((ROOT / "optimized" / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^(?:\| `)?python -m paged_mla_optimized\.tools\.bench(?![.\w])([^`\n]*)", re.MULTILINE
)


def test_without_arguments_the_main_cases_are_timed():
    """S-20: the shortest command is the documented one."""
    assert parse([]).cases == list(MAIN)


def test_a_case_of_two_groups_is_timed_once():
    """S-20: or the geometric means of a report would count it twice."""
    cases = parse(["main", "pairs"]).cases
    assert len(set(cases)) == len(cases) == 16
    assert cases[:12] == list(MAIN)


def test_documented_commands_are_understood(tmp_path, monkeypatch):
    """S-20: every command of a page, wherever its folders are."""
    commands = [shlex.split(found) for page in PAGES for found in COMMAND.findall(page.read_text())]
    assert [] in commands
    assert len(commands) > 1
    monkeypatch.chdir(tmp_path)
    for folder in ("DIR", "optimized/bench/reports"):
        (tmp_path / folder).mkdir(parents=True)
    for command in commands:
        chosen = {case for group in GROUPS if group in command for case in GROUPS[group]}
        assert sorted(c.name for c in parse(command).cases) == sorted(
            c.name for c in chosen or MAIN
        )


def test_no_gpu_is_one_line(monkeypatch, capsys):
    """S-20: if there is nothing to time, the command reports it."""
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


BAD = {
    "group": ["mian"],
    "no-case": ["--only", "h17"],
    "no-regex": ["--only", "("],
    "no-folder": ["--out", "nowhere/stem"],
    "no-peers": ["--peers", "nowhere"],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_a_bad_option(arguments, capsys):
    """S-20: refused before anything is timed."""
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_summary_is_geometric_means():
    """Ratios multiply; cases without a peer do not count."""
    rows = [
        {"ratio": 2.0, "ratio_in_turns": 4.0},
        {"ratio": 0.5, "ratio_in_turns": 1.0},
        {"us": 1.0},
    ]
    assert summary(rows) == "geometric means over 2 cases: 1.000 alone, 2.000 interleaved"


def test_a_row_fills_its_header():
    """A peer that was there has a column, empty where it could not run."""
    numbers = dict.fromkeys(("plan_us", "us", "main_us", "portable_us"), 1.0)
    row = {"case": "h16", "tflops": 1.0, "gbs": 1.0, "of_floor": 1.0, "fa3": 2.0} | numbers
    head, rule = header(["flashmla", "fa3"]).splitlines()
    cells = line(row, ["flashmla", "fa3"])
    assert head.count("|") == rule.count("|") == cells.count("|")
    columns = dict(zip(head.split("|"), cells.split("|"), strict=True))
    assert (columns[" flashmla us "], columns[" fa3 us "]) == (" - ", " 2.0 ")


class FlashInferByHand:
    """Attends as FlashInfer documents: blocks of all rows in one list, causal from the end."""

    def __init__(self, _workspace):
        pass

    def plan(self, *, metadata, causal, sm_scale, q_data_type, kv_data_type, **sizes):
        assert causal
        assert q_data_type == kv_data_type == torch.bfloat16
        self.metadata, self.scale, self.sizes = metadata, sm_scale, sizes

    def run(self, *, query, kv_cache):
        assert self.sizes == {
            "num_heads": query.shape[1],
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": kv_cache.shape[1],
        }
        q_starts, starts, blocks, lens = self.metadata
        out = query.new_empty((*query.shape[:2], 512), dtype=torch.float32)
        for row, length in enumerate(lens):
            mine = blocks[starts[row] : starts[row + 1]].long()
            keys = kv_cache[mine].flatten(0, 1)[:length].float()
            tokens = slice(q_starts[row], q_starts[row + 1])
            q = query[tokens].float()
            scores = self.scale * torch.einsum("qhd,sd->qhs", q, keys)
            after = torch.ones(len(q), length).triu(length - len(q) + 1).bool()
            weights = scores.masked_fill(after[:, None], -torch.inf).softmax(-1)
            out[tokens] = weights @ keys[:, :512]
        return out


def test_flashinfer_gets_the_whole_step(monkeypatch):
    """S-5: every row's own blocks and length, for rows that share no length."""
    module = SimpleNamespace(
        BatchMLAPagedAttentionWrapper=FlashInferByHand,
        MLAPlanMetadata=SimpleNamespace(csr=lambda *tensors: tensors),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=module))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    tensors = build(Case("ragged", 4, 2, seq_lens=(70, 16, 5), block_size=16), "cpu")
    out = peers.load(None)["flashinfer"](tensors)()
    assert error(tensors, out) < 1e-5
    tensors.block_table = tensors.block_table.flip(0)
    with pytest.raises(ArithmeticError, match="row"):
        error(tensors, out)


def test_fp8_and_bfloat16_caches_hold_the_same_numbers():
    """S-11: codes times the scale are what the bfloat16 cache holds, bit for bit."""
    tensors = build(Case("one row", 4, 1, seq_lens=(70,), block_size=16), "cpu")
    held, codes, scale = fp8.quantized(tensors)
    assert torch.equal(codes.float() * scale, held.cache.float())
    assert (held.cache - tensors.cache).abs().max() <= tensors.cache.abs().max() / 16


def test_a_row_of_fp8_fills_its_header():
    """A peer that is not there leaves its cells, and the ratios to it, empty."""
    times = dict.fromkeys(("exact", "fast", "bf16"), 2.0)
    row = {"case": "h16", "errors": times, "alone": times, "in_turns": times | {"flashmla": 3.0}}
    head, rule = fp8.header().splitlines()
    cells = fp8.line(row)
    assert head.count("|") == rule.count("|") == cells.count("|")
    columns = dict(zip(head.split(" | "), cells.split(" | "), strict=True))
    assert (columns["FlashMLA / fast"], columns["FlashMLA / fast, interleaved"]) == ("-", "1.50")


def test_work_of_a_prefill():
    """S-4: the last query sees every key, each before it one fewer; 192 and 128 columns of each."""
    case = prefill.PrefillCase("chunk", 3, ((5, 2), (1, 1)))
    assert case.flops == 2 * 3 * (192 + 128) * (5 + 4 + 1)


def test_drawn_prefills_stay_the_same():
    """More cases change none; all have names of their own and fit in memory."""
    assert prefill.drawn(10)[:3] == prefill.drawn(3)
    assert len({case.name for case in prefill.CASES}) == len(prefill.CASES) == 16
    for case in prefill.CASES:
        assert all(1 <= queries <= keys for keys, queries in case.rows)
        assert case.num_heads * sum(keys for keys, _ in case.rows) <= 1 << 21


def test_prefills_are_held_against_plain_attention():
    """S-5: torch's attention of two prompts passes, the same a query later does not."""
    tensors = prefill.build(prefill.PrefillCase("two", 2, ((300, 300), (300, 300))), "cpu")
    heads = [t.float().unflatten(0, (2, 300)).transpose(1, 2) for t in tensors.whole]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=192**-0.5)
    out = out.transpose(1, 2).flatten(0, 1)
    assert prefill.error(tensors, out) < 1e-5
    with pytest.raises(ArithmeticError, match="row"):
        prefill.error(tensors, out.roll(1, 0))


def test_a_row_of_prefill_fills_its_header():
    """A peer that is not there leaves its cells, and the ratios to it, empty."""
    times = dict.fromkeys(("with plan", "attend", "FA3"), 2.0)
    row = {"case": "h16", "flops": 10**9, "errors": times, "alone": times}
    row["in_turns"] = times | {"FA3": 3.0}
    head, rule = prefill.header().splitlines()
    cells = prefill.line(row)
    assert head.count("|") == rule.count("|") == cells.count("|")
    columns = dict(zip(head.split(" | "), cells.split(" | "), strict=True))
    assert columns["TFLOP/s with plan"] == "500"
    assert columns["cuDNN / with plan"] == "-"
    assert columns["FA3 / with plan, interleaved"] == "1.500"


def put(cache, values, scale):
    """Write values over one scale for everything, as codes; keys of 656-byte rows as they are."""
    codes = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    if cache.format == "fp8_ds_mla":
        cache.latents[..., :512] = codes[..., :512]
        cache.latents[..., 512:528].view(torch.float32).fill_(scale)
        cache.latents[..., 528:].view(torch.bfloat16).copy_(values[..., 512:])
    else:
        cache.latents.view(torch.uint8).copy_(codes)
        cache.scales.fill_(scale)


def test_a_row_of_formats_fills_its_header():
    """S-11: a report has the cost of a format relative to the flat one, for both products."""
    kinds = [f"{name} {products}" for name in formats.FP8_NAMES for products in formats.PRODUCTS]
    times = {kind: 10.0 + place for place, kind in enumerate(kinds)}
    row = {"case": "h16", "alone": times, "in_turns": times}
    head, rule = formats.header().splitlines()
    assert head.count("|") == rule.count("|") == formats.line(row).count("|")
    assert "| 10.0 / 10.0 | 12.0 / 12.0 (1.20 / 1.20) |" in formats.line(row)


@pytest.mark.parametrize("name", accuracy.FORMAT_NAMES[1:])
def test_held_returns_the_values_of_a_cache(name):
    """S-11: codes times scales, for any layout; other scales change only their tokens."""
    tensors = build(Case("one row", 4, 1, seq_lens=(16,), block_size=8), "cpu")
    cache = empty_cache(replace(tensors.config, cache_format=name), 2, "cpu")
    values = torch.arange(2 * 8 * 576).remainder(15).sub(7).view(2, 8, 576) / 4
    put(cache, values, 0.25)
    assert torch.equal(accuracy.held(cache), values.double())
    if cache.scales is not None and cache.scales.dim():
        cache.scales[1, 0, -1] = 0.5
        last = 8 // cache.scales.shape[2]
        values[1, -last:] *= 2
        assert torch.equal(accuracy.held(cache), values.double())


def test_errors_are_zero_if_outputs_are_correct(monkeypatch):
    """S-5: keys are where the block table specifies; a dominant key has almost all weight."""
    monkeypatch.setattr(accuracy, "KEYS", 128)
    tensors, latents = accuracy.inputs("peaked", 2, "cpu")
    numbers = accuracy.by_blocks(latents.double(), tensors)
    want = accuracy.attend(tensors, numbers)
    keys = latents.double().view(len(tensors.seq_lens), 128, 576)
    weights = (accuracy.SCALE * tensors.q[:, 0].double() @ keys.mT).softmax(2)
    assert weights.amax(2).min() > 0.9
    assert accuracy.errors(weights @ keys[..., :512], want) == pytest.approx((0, 1))
    assert accuracy.errors(2 * want, want) == pytest.approx((1, 1))


def test_a_row_of_accuracy_fills_its_header():
    """A peer that is not there leaves its cells empty."""
    head, rule = accuracy.header().splitlines()
    for row in ({"step": "h16"}, {"step": "h16", "given": (0.1, 0.9), "cached": (0.01, 1.0)}):
        assert head.count("|") == rule.count("|") == accuracy.line(row).count("|")
    names = [step.name for step in accuracy.steps()]
    assert len(set(names)) == len(names)


def test_lengths_round_once():
    """S-22: float64 to bfloat16 in one rounding; torch's two roundings lose bits above a middle."""
    above = 1 + 2**-8 + 2**-40
    values = torch.tensor([1 + 2**-8, above, 1 + 3 * 2**-8, -0.7, 0.0], dtype=torch.float64)
    assert lengths.rounded(values.numpy()).tolist() == [1, 1 + 2**-7, 1 + 2**-6, -0.69921875, 0]
    assert values[1].bfloat16() == 1
    many = torch.randn(1000, dtype=torch.float64).float().double()
    assert torch.equal(torch.from_numpy(lengths.rounded(many.numpy())), many.bfloat16().double())


def cache_by_hand(tensors, config):
    """Return the cache of a case in a config's format."""
    if config.cache_format == "bf16":
        return LatentCache("bf16", tensors.cache)
    _, codes, scale = fp8.quantized(tensors)
    return LatentCache("fp8_e4m3", codes, scale)


def step_on_a_cpu(monkeypatch, ours):
    """Let ``lengths`` measure a step of few numbers here, with `ours` in place of our kernel."""
    monkeypatch.setattr(lengths, "ROWS", 2)
    monkeypatch.setattr(lengths, "inputs", partial(lengths.inputs, device="cpu"))
    monkeypatch.setattr(lengths, "cache_of", cache_by_hand)
    monkeypatch.setattr(lengths, "attention", lambda tensors, *_: partial(ours, tensors))


def by_hand(tensors, factor=1.0):
    """Attend row by row over the keys that ``seq_lens`` counts, in blocks as the table has them."""
    out = torch.zeros(len(tensors.q), 1, tensors.case.num_heads, 512, dtype=torch.bfloat16)
    for row, length in enumerate(tensors.seq_lens.tolist()):
        keys = tensors.cache[tensors.block_table[row].long()].flatten(0, 1)[:length].double()
        scores = tensors.q[row, 0].double() @ keys.T * accuracy.SCALE
        out[row, 0] = (factor * scores.softmax(1) @ keys[:, :512]).bfloat16()
    return out


@pytest.mark.parametrize("keys", [1, 70])
def test_errors_by_length_are_of_the_keys_that_a_row_has(monkeypatch, keys):
    """S-5: memory after a row's last key has no effect; numbers are N(0, 1)."""
    step_on_a_cpu(monkeypatch, by_hand)
    step = lengths.Step(2, "bf16", keys)
    tensors = lengths.inputs(step)
    assert tensors.cache.float().std() == pytest.approx(1, abs=0.05)
    assert tensors.q.float().std() == pytest.approx(1, abs=0.05)
    assert torch.equal(torch.cat([tensors.q_nope, tensors.q_pe], 2), tensors.q[:, 0])
    plain = {"FA3": lambda tensors: partial(by_hand, tensors, 2.0), "FlashInfer": lambda _: None}
    before = {step.name: [0.1, 0.2, 0.3]}
    row = lengths.measure(step, plain, None, before)
    assert row["step"] == step.name
    assert set(row["errors"]) == {lengths.OURS, lengths.BEFORE, "FA3"}
    ours, twice = row["errors"][lengths.OURS], row["errors"]["FA3"]
    assert ours.differing == 0
    assert (ours.rms == 0) == (keys == 1)
    assert ours.rms < 2**-8
    assert twice.rms == pytest.approx(1, abs=0.01)
    assert twice.largest > 2
    assert twice.differing > 0.99
    assert row["errors"][lengths.BEFORE] == (0.1, 0.2, 0.3)


def test_fp8_errors_by_length_are_next_to_the_numbers_of_the_cache(monkeypatch):
    """S-11: FlashMLA gets codes and their scale; kernels without FP8 caches are not called."""
    step_on_a_cpu(monkeypatch, by_hand)  # over the latents as they were

    def flashmla(tensors, codes, scale):
        return partial(by_hand, replace(tensors, cache=codes.float() * scale))

    plain = {"FA3": lambda _: pytest.fail("FA3 reads no FP8 cache")}
    found = lengths.measure(lengths.Step(2, "fp8_e4m3", 4), plain, flashmla, {})["errors"]
    assert set(found) == {lengths.OURS, "FlashMLA"}
    assert found["FlashMLA"].differing == 0
    assert found[lengths.OURS].rms > 0.01


def test_a_row_of_lengths_fills_its_header():
    """A kernel that is not there leaves its cell empty; each figure is of at least 1e5 elements."""
    head, rule = lengths.header().splitlines()
    row = {"step": "h16", "errors": {lengths.OURS: (1.5e-3, 2e-2, 0.125)}}
    assert head.count("|") == rule.count("|") == lengths.line(row).count("|")
    assert lengths.line(row) == "| h16 | 1.50e-03 / 2.0e-02 / 12.50% | - | - | - | - |"
    assert len({step.name for step in lengths.STEPS}) == len(lengths.STEPS) == 28
    assert min(step.num_heads for step in lengths.STEPS) * lengths.ROWS * 512 >= 100_000


def test_errors_before_are_those_of_our_kernels(monkeypatch, capsys, tmp_path):
    """S-20: a file that is none is refused before anything is measured."""
    path = tmp_path / "lengths.json"
    rows = [{"step": "a", "errors": {lengths.OURS: [1.0, 2.0, 0.5], "FA3": [3.0, 4.0, 1.0]}}]
    path.write_text(json.dumps({"facts": {}, "rows": rows}))
    assert lengths.errors_before(path) == {"a": [1.0, 2.0, 0.5]}
    assert lengths.errors_before(None) == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for content in ("{", "[]", '{"rows": [{"step": "a", "errors": {}}]}', None):
        path.unlink() if content is None else path.write_text(content)
        monkeypatch.setattr(sys, "argv", ["bench.lengths", "--before", str(path)])
        with pytest.raises(SystemExit) as caught:
            lengths.main()
        assert caught.value.code == 2
        assert f"--before: got {path}; allowed: a JSON file" in capsys.readouterr().err


def test_bytes_of_an_append():
    """S-10: latents and keys in bfloat16 once, rows with their scales once."""
    sizes = {step.name: step.bytes // append.TOKENS for step in append.STEPS}
    assert sizes["bf16, rotates nothing"] == 2 * 1152
    assert sizes["fp8_e4m3, rotates keys"] == 1152 + 576
    assert sizes["fp8_ds_mla, rotates keys"] == 1152 + 656
    assert sizes["fp8_block_token, rotates nothing"] == 1152 + 576 + 4
    queries = sizes["bf16, rotates keys and queries"] - sizes["bf16, rotates keys"]
    assert queries == 2 * 2 * append.HEADS * 64


def test_a_row_of_appends_fills_its_header():
    """S-10: what an append reaches of a copy is the last cell."""
    row = {"step": "h16", "bytes": 10**6, "append": 2.0, "copy": 1.0}
    row |= {"append_gbs": 500.0, "copy_gbs": 1000.0}
    head, rule = append.header().splitlines()
    assert head.count("|") == rule.count("|") == append.line(row).count("|")
    assert append.line(row).endswith(" 0.50 |")


def test_a_row_of_layers_fills_its_header():
    """S-21: both forms with the chosen one, and a chunk with the other kernels that were timed."""
    forms = {"step": "h16", "chosen": "materialized", "errors": {"absorbed": 1e-3}}
    forms["us"] = {"absorbed": 10.0, "materialized": 12.0}
    chunk = forms | {"us": {"ours": 10.0, "fa3": 15.0, "gather": 1.0}}
    head, rule = layer.header().splitlines()
    for row, ratio in ((forms, "chosen / better 1.20"), (chunk, "fa3 1.50")):
        assert head.count("|") == rule.count("|") == layer.line(row).count("|")
        assert f"| {ratio} |" in layer.line(row)
    names = [step.name for step in (*layer.CHUNKS, *layer.CROSSOVER)]
    assert len(set(names)) == len(names)


def test_a_row_of_ranks_fills_its_header():
    """S-18: what a rank sends in the time of the exchange alone is the last cell."""
    times = dict.fromkeys(parallel.KINDS, 10.0)
    head, rule = parallel.header().splitlines()
    cells = parallel.line({"step": "h16", "ranks": 2, "us": times, "bytes": 3_000_000})
    assert head.count("|") == rule.count("|") == cells.count("|")
    assert cells.endswith("| 3.00 | 300 |")


def test_ranks_are_timed_on_their_own_tokens():
    """S-18: of two ranks the second has each odd token, in the order of rows."""
    tensors = build(Case("two rows", 2, 1, seq_lens=(32, 32), block_size=8), "cpu")
    table, cache = parallel.share_of_rank(tensors, 2, 1)
    assert table.shape == (2, 2)
    row = tensors.cache[tensors.block_table[1].long()].flatten(0, 1)
    assert torch.equal(cache[table[1].long()].flatten(0, 1), row[1::2])


def test_ranks_need_two_gpus(monkeypatch, capsys):
    """S-18: the error is one line if there is one GPU."""
    monkeypatch.setattr(sys, "argv", ["parallel"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as caught:
        parallel.main()
    assert caught.value.code == 2
    assert (
        capsys.readouterr().err
        == "this command needs two GPUs, but torch finds 1; run it on another machine\n"
    )


def test_a_layer_is_timed_on_correct_outputs():
    """S-21: both forms of a step pass the benchmark's own check; other keys do not."""
    problem = layer.Problem(layer.Step("h2", 2, 3, 61), "cpu", torch.float32)
    for absorbed in (1, 0):
        problem.plan(absorbed)
        out, _ = problem.attend()
        assert problem.error(out) < 1e-5
    problem.cache = problem.cache.flip(1)
    with pytest.raises(ArithmeticError, match="h2"):
        problem.error(out)


def test_a_table_is_written_as_it_grows(tmp_path, monkeypatch):
    """Rows that were measured are kept where a later one fails; ``--only`` chooses by name."""
    monkeypatch.setattr(table, "device_record", lambda: {"device": "none"})
    steps = [SimpleNamespace(name=name) for name in ("h16 a", "h32", "h16 b")]
    options = SimpleNamespace(only="h16", out=tmp_path / "stem")

    def measure(step):
        if step.name == "h16 b":
            raise ArithmeticError(step.name)
        return {"step": step.name}

    with pytest.raises(ArithmeticError, match="h16 b"):
        table.run(steps, measure, lambda row: f"| {row['step']} |", "| step |\n|---|", options)
    assert (tmp_path / "stem.md").read_text().splitlines()[2:] == ["| step |", "|---|", "| h16 a |"]
    assert json.loads((tmp_path / "stem.json").read_text())["rows"] == [{"step": "h16 a"}]


def test_alone_each_is_timed_in_both_orders_on_a_warm_device(monkeypatch):
    """S-20: which comes first decides nothing."""
    replayed = []

    def milliseconds(replay):
        replayed.append(replay)
        return 6.0 + len(replayed) / 1000  # it grows warmer

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    monkeypatch.setattr(
        timing,
        "_captured",
        lambda launches, _: {n: (SimpleNamespace(replay=n), 1) for n in launches},
    )
    times = timing.alone({"ours": print, "theirs": print})
    ours, theirs = ["ours"] * 50, ["theirs"] * 50
    assert replayed[-200:] == ours + theirs + theirs + ours
    assert replayed[:-200].count("ours") == replayed[:-200].count("theirs") == 100
    assert times["ours"] == pytest.approx(times["theirs"], rel=1e-3)
    replayed.clear()
    timing.alone({"ours": print, "theirs": print}, passes=4)
    ours, theirs = ["ours"] * 25, ["theirs"] * 25
    assert replayed[-200:] == 2 * (ours + theirs + theirs + ours)
    replayed.clear()
    timing.alone({"ours": print, "theirs": print}, passes=4, seconds=3)
    ours, theirs = ["ours"] * 75, ["theirs"] * 75
    assert replayed[-600:] == 2 * (ours + theirs + theirs + ours)
