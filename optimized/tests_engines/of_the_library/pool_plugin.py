"""A plugin for pytest under which the library's own tests of DeepSeek run on latents in a pool.

A model for which a test selects no attention gets ours, and a forward and ``generate`` without a
cache get one of ours. Rows of V2 are absorbed; the cost model decides for rows of V3. A forward in
evaluation runs without gradients, as the page about transformers requires.

Each failing test must fail with an error that ``refusals.toml`` lists, or must also fail without
this package. An entry that matches no failure is an error, and so is a run in which one form has no
rows.
"""

import functools
import re
import subprocess
import sys
import tomllib
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Model
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Model

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.engines.transformers import LatentPool, PagedMlaCache
from paged_mla_optimized.engines.transformers.attention import NAME
from paged_mla_optimized.planning.layer_cost import Forms
from paged_mla_optimized.triton_compat.unseen_work import leave_out_unseen_work

LISTED = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))
ERRORS = {name: re.compile(pattern) for name, pattern in LISTED.items()}
POOLS = weakref.WeakKeyDictionary()
ABSORBED = weakref.WeakSet()  # layers of pools of V2
ROWS = Counter()
PASSED = set()
FAILED = defaultdict(list)  # test to the errors in it, of which subtests have one each
VERDICT = []


def pytest_configure():
    """Put a pool under everything that tests do."""
    leave_out_unseen_work()
    MlaLayer.plan = counting(MlaLayer.plan)
    PreTrainedModel.get_correct_attn_implementation = by_default(
        PreTrainedModel.get_correct_attn_implementation
    )
    prepare = GenerationMixin._prepare_cache_for_generation
    GenerationMixin._prepare_cache_for_generation = generating(prepare)
    for model in (DeepseekV2Model, DeepseekV3Model):
        model.forward = with_cache(model.forward)


def counting(plan):
    """Count rows of each form, and absorb those of V2."""

    @functools.wraps(plan)
    def counted(self, step):
        if self in ABSORBED:
            with patch.object(Forms, "absorbed_rows", lambda forms: len(forms.absorbed)):
                planned = plan(self, step)
        else:
            planned = plan(self, step)
        for row, length in enumerate(step.query_lens):
            if length > 0:
                ROWS["absorbed" if row < self.absorbed_rows else "materialized"] += 1
        return planned

    return counted


def by_default(choose):
    """Give a model the attention of a pool where its test chooses none."""

    @functools.wraps(choose)
    def chosen(self, requested_attention, *args, **kwargs):
        requested = NAME if requested_attention is None else requested_attention
        return choose(self, requested, *args, **kwargs)

    return chosen


def generating(prepare):
    """Give ``generate`` a cache where it would make a dynamic one."""

    @functools.wraps(prepare)
    def prepared(self, config, model_kwargs, *args):
        is_ours = self.config._attn_implementation == NAME and not config.is_assistant
        has_none = model_kwargs.get("cache") is None and config.use_cache is not False
        if is_ours and has_none and config.cache_implementation in {None, "dynamic"}:
            model_kwargs["cache"] = PagedMlaCache(pool_of(self.model))
        return prepare(self, config, model_kwargs, *args)

    return prepared


def with_cache(forward):
    """Give a forward a cache where it has none, which its output lacks if it wants none."""

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        if self.config._attn_implementation != NAME:
            return forward(self, *args, **kwargs)
        has_none = kwargs.get("cache", kwargs.get("past_key_values")) is None
        if has_none:
            kwargs.pop("past_key_values", None)
            kwargs["cache"] = PagedMlaCache(pool_of(self))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            out = forward(self, *args, **kwargs)
        if has_none and kwargs.get("use_cache") is False and hasattr(out, "cache"):
            out.cache = None
        return out

    return wrapped


def pool_of(model):
    """Return the pool of a model in its present dtype and place."""
    pools = POOLS.setdefault(model, {})
    weight = model.layers[0].self_attn.kv_b_proj.weight
    key = weight.dtype, weight.device
    if key not in pools:
        # Tests of scaled ropes go past the model's length.
        longest = 2 * model.config.max_position_embeddings
        pools[key] = LatentPool(model, 1024, block_size=16, max_rows=64, max_length=longest)
        if isinstance(model, DeepseekV2Model):
            ABSORBED.add(pools[key].mla)
    return pools[key]


def pytest_runtest_logreport(report):
    """Keep what came of a test."""
    if report.failed:
        FAILED[report.nodeid].append(report.longreprtext)
    elif report.passed and report.when == "call":
        PASSED.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Hold the run against ``refusals.toml``."""
    reasons = {test: {reason_of(error) for error in errors} for test, errors in FAILED.items()}
    found = Counter(reason for all_of_test in reasons.values() for reason in all_of_test)
    unlisted = [test for test, all_of_test in reasons.items() if None in all_of_test]
    ours = [test for test in unlisted if passes_without(test)]
    wrong = [f"{test} fails by nothing that is listed" for test in ours]
    wrong += [f"no test fails by {name!r}" for name in ERRORS if not found[name]]
    wrong += [f"no row was {form}" for form in ("absorbed", "materialized") if not ROWS[form]]
    VERDICT.append(f"{len(PASSED - FAILED.keys())} passed, {len(FAILED)} failed, rows {dict(ROWS)}")
    VERDICT.extend(f"{count:4} {name or 'not listed'}" for name, count in found.most_common())
    VERDICT.extend(f"{test} fails without a pool too" for test in unlisted if test not in ours)
    VERDICT.extend(wrong)
    if wrong:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_unconfigure():
    """Print the verdict of the run, after pytest's own report of failures."""
    print(*VERDICT, sep="\n")


def reason_of(error):
    """Return what is listed of an error, or ``None``."""
    return next((name for name, pattern in ERRORS.items() if pattern.search(error)), None)


def passes_without(test):
    """Return whether a test passes with the library's own cache and attention."""
    command = (sys.executable, "-m", "pytest", "-q", test)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
