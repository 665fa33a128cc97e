"""What is held of a whole layer beyond its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_conformance.suite.trials.layered import check_layer
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.backend import CAPABILITIES
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import GROUPS
from paged_mla_shared.dims import SMALL
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.problem import Output

[PROMPTS] = [case for case in GROUPS["layer"] if case.name == "prompts"]
ALL_TOKENS = sum(row.query_len for row in PROMPTS.rows)


class Wide(ForwardingRunner):
    """Answers come as they were accumulated."""

    def layer(self, batch: LayerBatch) -> Output:
        """Widen."""
        answer = self.inner.layer(batch)
        return Output(answer.out.astype(np.float32), answer.lse)


class WideInChunks(Wide):
    """Answers come as they were accumulated, those of whole prompts do not."""

    def layer(self, batch: LayerBatch) -> Output:
        """Widen what is shorter."""
        whole = batch.num_tokens == ALL_TOKENS
        return self.inner.layer(batch) if whole else super().layer(batch)


@pytest.mark.parametrize("wide", [Wide, WideInChunks])
def test_answers_of_layers_have_the_type_of_the_problem(wide: type[ForwardingRunner]):
    """S-5: a wider one is as wrong as any other."""
    backend = MutantBackend(wrap=wide, capabilities=CAPABILITIES)
    with pytest.raises(Mismatch, match="dtype float32, expected bfloat16"):
        check_layer(Trial(backend, PROMPTS, SMALL, "bfloat16"))
