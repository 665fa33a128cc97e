"""Right steps in every type and format, which no explanation may call broken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paged_mla_conformance.meta.explained.dumps import ASKED, in_noise
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.runners.recording_runner import RecordingBackend
from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.params import params_of_group
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.backend import ReferenceBackend
from paged_mla_shared.cases import CASES
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dump import Dump

DTYPES = ("float32", "bfloat16", "float16")
_LARGEST = 50_000  # pairs of query and key


def healthy(count: int, seed: int = 0) -> Iterator[tuple[str, Dump]]:
    """Yield up to `count` right steps with their ids.

    They are drawn from all cases except large ones, in all types and cache formats.
    """
    backend = RecordingBackend(ReferenceBackend())
    run = Run(backend, "x:y", "small", load_profile(STRICT), DTYPES)
    params = [
        param
        for group in CASES
        for param in params_of_group(run, group)
        if sum(r.seq_len * r.query_len for step in param.case.steps for r in step) < _LARGEST
    ]
    drawn = np.random.default_rng(seed).permutation(len(params))
    for made, i in enumerate(drawn[:count].tolist()):
        case, _ = adapt_case(params[i].case, run.backend.capabilities)
        ask = ASKED.get(case.group, Trial.check_attention)
        ask(Trial(backend, case, SMALL, params[i].dtype))
        assert backend.last is not None
        yield params[i].id, in_noise(backend.last.dump, made)
