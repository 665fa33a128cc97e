"""The suite works with an invented cache format whose scales are in a separate tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.runners.profile_adapter import adapted
from paged_mla_conformance.runners.protocol_guard import GuardedBackend
from paged_mla_conformance.search.corpus import load_case, save_case
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.params import (
    CaseParam,
    allows,
    params_of_group,
    trace_params,
    why_skip,
)
from paged_mla_conformance.suite.trials.traces import TraceTrial
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.encoding import ENCODINGS
from paged_mla_reference.rules.slots import Encoding, Slots, Tokens
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.backend import Backend, Runner
from paged_mla_shared.cases import GROUPS, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import (
    FORMATS,
    PLAIN_FORMAT_OF_DTYPE,
    CacheFormat,
    ScaleTensor,
)
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

QUARTERS = CacheFormat("quarters", "float32", "float32", scale_tensor=ScaleTensor.PER_GROUP)
BACKEND = ReferenceBackend(
    capabilities=replace(
        CAPABILITIES, cache_formats=frozenset({*PLAIN_FORMAT_OF_DTYPE.values(), "quarters"})
    )
)


def _store(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Encode a quarter of each number, with 4 as the scale of each quarter of a block."""
    slots.field("ckv")[slots.at] = ckv * np.float32(0.25)
    slots.field("k_pe")[slots.at] = k_pe * np.float32(0.25)
    slots.scales[slots.scale_at] = 4


def _load(slots: Slots) -> Tokens:
    scale = slots.scales[slots.scale_at][:, None]
    return slots.field("ckv")[slots.at] * scale, slots.field("k_pe")[slots.at] * scale


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FORMATS, "quarters", QUARTERS)
    monkeypatch.setitem(ENCODINGS, "quarters", Encoding(_store, _load))


def run_of(backend: Backend = BACKEND) -> Run:
    """Return a run with two dtypes."""
    return Run(backend, "made:up", "small", load_profile(STRICT), ("float32", "float16"))


def case_of(group: str, name: str) -> Case:
    """Return a case in the invented format."""
    [case] = [case for case in GROUPS[group] if case.name == name]
    return replace(case, cache_format="quarters")


class LosesScales(ForwardingRunner):
    """Loads 1 in place of every scale."""

    def load_cache(self, image: CacheImage) -> None:
        """Load with other scales."""
        blocks = image.blocks.copy()
        image.layout.scales(blocks)[...] = 1
        self.inner.load_cache(replace(image, blocks=blocks))


class ForgetsAScale(ForwardingRunner):
    """Does not write the scale of the first new token."""

    def append(self, batch: Batch) -> None:
        """Append, and restore the old scale."""
        layout, every = self.problem.layout, np.arange(self.problem.num_blocks)
        before = self.inner.read_cache(every)
        self.inner.append(batch)
        blocks = self.inner.read_cache(every)
        changed = layout.scale_bytes(blocks) != layout.scale_bytes(before)
        block, scale, _ = np.argwhere(changed)[0]
        layout.scales(blocks)[block, scale] = layout.scales(before)[block, scale]
        image = CacheImage.without_blocks(layout, np.zeros(1, np.uint8))
        self.inner.load_cache(replace(image, block_ids=every, blocks=blocks))


def wrong(wrap: Callable[[Problem, Runner], Runner]) -> MutantBackend:
    """Return a wrong backend that supports the format."""
    return MutantBackend(capabilities=BACKEND.capabilities, wrap=wrap)


@pytest.mark.parametrize(
    ("group", "name", "check"),
    [
        ("decode", "h9", Trial.check_replay),
        ("append", "padded-rows", Trial.check_append),
        ("mixed", "bs16", Trial.check_step),
        ("gather", "bs16", partial(Trial.check_read, name="gather_context")),
        ("large_offsets", GROUPS["large_offsets"][0].name, Trial.check_step),
        ("layouts", GROUPS["layouts"][0].name, Trial.check_attention),
    ],
)
def test_cases_run_in_the_format(group: str, name: str, check: Callable[[Trial], object]):
    """S-10, S-11: images, poison, append, attention, gathering and comparisons work."""
    trial = Trial(GuardedBackend(BACKEND, Counter()), case_of(group, name), SMALL, "float32")
    check(trial)
    assert trial.checks


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_outputs_are_those_of_the_plain_format(dtype: str):
    """S-5, S-11: a quarter times 4 is the number, so only the bytes differ."""
    case = case_of("decode", "h9")
    [stage] = Trial(BACKEND, case, SMALL, dtype).stages()
    [plain] = Trial(BACKEND, replace(case, cache_format=None), SMALL, dtype).stages()
    assert stage.after.blocks.shape[1] > plain.after.blocks.shape[1]
    np.testing.assert_array_equal(stage.answers()[0].out, plain.answers()[0].out)


def test_lost_scales_are_found():
    """S-9, S-5: attention and the comparison of bytes find wrong scales."""
    trial = Trial(wrong(LosesScales), case_of("decode", "h9"), SMALL, "float32")
    with pytest.raises(Mismatch, match=r"\[S-5\] out"):
        trial.check_attention()
    with pytest.raises(Mismatch, match=r"\[S-10\] cache: .* of its scales: "):
        trial.check_append()


def test_a_scale_that_is_not_written_is_found():
    """S-10: the error names the scales."""
    trial = Trial(wrong(ForgetsAScale), case_of("append", "padded-rows"), SMALL, "float32")
    with pytest.raises(Mismatch, match=r"\[S-10\] cache: \d bytes wrong, .* of its scales: "):
        trial.check_append()


@pytest.mark.parametrize("reserved", [False, True])
def test_profiles_replace_poisoned_scales(reserved: bool):  # noqa: FBT001 - a case
    """S-9: scales that must not be read are plain numbers, and written bytes are read back."""
    shown: list[CacheImage] = []

    class Looks(ForwardingRunner):
        def load_cache(self, image: CacheImage) -> None:
            shown.append(image)
            self.inner.load_cache(image)

    profile = replace(load_profile(STRICT), unread="stale", reserved_block=reserved)
    trial = Trial(adapted(wrong(Looks), profile), case_of("mixed", "bs16"), SMALL, "float32")
    trial.check_step()
    for image in shown:
        values = image.read(np.arange(image.layout.num_blocks)).view(np.float32)
        assert (np.abs(values) < 1e4).all()


def test_a_trace_runs_in_the_format():
    """S-19: a schedule on one cache is right byte for byte."""
    [param] = [p for p in trace_params(run_of()) if p.scenario.name == "preemption"]
    scenario = replace(param.scenario, cache_format="quarters")
    assert TraceTrial(BACKEND, scenario, SMALL, "float32").check() > 0


def test_chosen_cases_run_in_declared_formats():
    """S-11: chosen cases run in each dtype, plain and in the format; others are plain."""
    ids = [param.id for param in params_of_group(run_of(), "decode")]
    kinds = ["fp32", "fp32-quarters", "fp16", "fp16-quarters"]
    assert [name for name in ids if "-h9-" in name] == [f"decode-h9-{kind}" for kind in kinds]
    assert [name for name in ids if "-h3-" in name] == ["decode-h3-fp32", "decode-h3-fp16"]


def test_illegal_block_sizes_do_not_run_in_the_format():
    """S-11: blocks of one token have no quarters."""
    ids = [param.id for param in params_of_group(run_of(), "decode")]
    assert "decode-bs16-fp32-quarters" in ids
    assert "decode-bs1-fp32-quarters" not in ids


def test_slots_with_holes_do_not_run_if_tokens_share_scales():
    """S-11: the numbers before a written slot affect its scale, so they must be a token."""
    ids = [param.id for param in params_of_group(run_of(), "append")]
    assert "append-explicit-slots-swapped-fp32-quarters" in ids
    assert "append-explicit-slots-fp32-quarters" not in ids
    assert "append-explicit-slots-fp32" in ids


def test_schedules_run_in_formats_without_shared_scales(
    monkeypatch: pytest.MonkeyPatch,
):
    """S-19: all schedules run plain; some run in the format, unless tokens share its scales."""
    plain = [param.id for param in trace_params(run_of())]
    assert plain[:2] == ["trace-chunks-fp32", "trace-prefixes-fp16"]
    assert not any("quarters" in name for name in plain)
    monkeypatch.setitem(FORMATS, "quarters", replace(QUARTERS, scale_tensor=ScaleTensor.NONE))
    more = [param.id for param in trace_params(run_of())]
    assert more[: len(plain)] == plain
    assert more[len(plain) :][:2] == [
        "trace-prefixes-fp16-quarters",
        "trace-preemption-fp16-quarters",
    ]


EVERY = sorted(name for name, stored in FORMATS.items() if not stored.is_plain)
READS_ALL = replace(
    BACKEND,
    capabilities=replace(CAPABILITIES, cache_formats=CAPABILITIES.cache_formats | set(EVERY)),
)


def test_cases_run_in_every_format_with_the_first_dtype():
    """S-11: the formats rotate with the other dtypes, and every format is used."""
    asked: dict[str, Counter[str]] = {"float32": Counter(), "float16": Counter()}
    for param in params_of_group(run_of(READS_ALL), "decode"):
        if param.case.cache_format:
            asked[param.dtype][param.case.cache_format] += 1
    assert sorted(asked["float32"]) == sorted(asked["float16"]) == EVERY
    assert asked["float16"].total() < asked["float32"].total() / 2


def test_cases_run_in_one_format_on_interpreters():
    """S-11: the formats rotate over the cases that allow them all, and every format is used."""
    run = run_of(replace(READS_ALL, mode="interpreter"))
    asked = Counter(
        param.case.cache_format
        for param in params_of_group(run, "append")
        if param.case.cache_format and all(allows(FORMATS[name], param.case) for name in EVERY)
    )
    assert sorted(asked) == EVERY
    assert max(asked.values()) - min(asked.values()) <= 2 * len(run.dtypes)
    of_group = Counter(param.case.cache_format for param in params_of_group(run, "formats"))
    assert {*of_group} - {None} == set(EVERY)
    assert max(of_group.values()) <= len(run.dtypes) * len(GROUPS["formats"]) / 2


@pytest.mark.parametrize("name", ["33k-keys-h16", "bs1-66k-keys"])
def test_long_cases_do_not_run_on_interpreters(name: str):
    """The tests are skipped, and no capability is missing."""
    param = CaseParam(case_of("decode", name), "float32")
    assert why_skip(run_of(), param, ()) is None
    skip = why_skip(run_of(replace(BACKEND, mode="interpreter")), param, ())
    assert skip is not None
    assert "interpreter" in skip.reason
    assert not skip.undeclared_core


def test_scales_count_towards_the_memory_a_case_needs():
    """S-11: a case whose cache only fits without its scales does not run."""
    case = case_of("decode", "h9")
    layout = case.problem(SMALL, "float32").layout
    backend = replace(BACKEND, memory_bytes=layout.num_blocks * layout.block_bytes - 1)
    param = CaseParam(case, "float32")
    assert why_skip(run_of(), param, ()) is None
    skip = why_skip(run_of(backend), param, ())
    assert skip is not None
    assert "needs a cache of" in skip.reason


def test_a_replay_file_names_the_format(tmp_path: Path):
    """S-11: a case is read back in its format, and an unknown format is refused."""
    path, case = tmp_path / "case.json", case_of("decode", "h9")
    save_case(case, "float16", path)
    assert load_case(path) == (case, "float16")
    save_case(replace(case, cache_format="int4"), "float16", path)
    with pytest.raises(InvalidArgument, match=r"case.cache_format: got 'int4'"):
        load_case(path)
