"""The output of a whole layer must have the dtype of the problem."""

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
    """Returns outputs in float32."""

    def layer(self, batch: LayerBatch) -> Output:
        """Convert the output to float32."""
        answer = self.inner.layer(batch)
        return Output(answer.out.astype(np.float32), answer.lse)


class WideInChunks(Wide):
    """Returns outputs in float32, except those of whole prompts."""

    def layer(self, batch: LayerBatch) -> Output:
        """Convert the outputs of chunks to float32."""
        whole = batch.num_tokens == ALL_TOKENS
        return self.inner.layer(batch) if whole else super().layer(batch)


@pytest.mark.parametrize("wide", [Wide, WideInChunks])
def test_outputs_of_layers_have_the_dtype_of_the_problem(wide: type[ForwardingRunner]):
    """S-5: a wider dtype is wrong too."""
    backend = MutantBackend(wrap=wide, capabilities=CAPABILITIES)
    with pytest.raises(Mismatch, match="dtype float32, expected bfloat16"):
        check_layer(Trial(backend, PROMPTS, SMALL, "bfloat16"))
