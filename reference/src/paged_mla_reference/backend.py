"""The specification as a backend. This backend must pass the suite that uses the specification."""

from __future__ import annotations

from dataclasses import dataclass

from paged_mla_reference.oracle import RIGHT, Oracle, ReferenceRunner, UncheckedRunner
from paged_mla_reference.rules.encoding import ENCODINGS
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_shared import __version__
from paged_mla_shared.backend import Capabilities, Runner, ops_of
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Problem

CAPABILITIES = Capabilities(
    ops=ops_of(ReferenceRunner),
    dtypes=frozenset(PLAIN_FORMAT_OF_DTYPE),
    cache_formats=frozenset(ENCODINGS),
    block_sizes=frozenset(range(1, 1057)),
    num_heads=frozenset(range(1, 129)),
    head_dims=frozenset((r, p) for r in (16, 32, 64, 128, 256, 512) for p in (8, 16, 32, 64)),
    masks=frozenset({"causal", "non_causal", "tree:qlen", "tree:full", "tree:packed"}),
    ropes=frozenset({"interleaved", "neox"}),
    features=frozenset(
        {
            "mixed",
            "padding",
            "replay",
            "strided_cache",
            "strided_inputs",
            "large_offsets",
            "explicit_slots",
            "validation",
            "batch_invariant",
            "bounded",
        }
    ),
    prefill_dims=frozenset(
        (n, p, v)
        for n in (16, 32, 64, 128, 192)
        for p in (8, 16, 32, 64)
        for v in (16, 32, 64, 128, 256)
    ),
    max_query_len=2**20,
)


@dataclass(frozen=True)
class ReferenceBackend:
    """Backend that computes in float64 with NumPy and rounds where the rules round.

    A faulty `oracle` makes a faulty backend.
    """

    name: str = "paged-mla-reference"
    version: str = __version__
    mode: str = "cpu"
    device: str = "NumPy"
    memory_bytes: int = 2**62  # the cache is sparse: any size fits
    capabilities: Capabilities = CAPABILITIES
    oracle: Oracle = RIGHT

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner for `problem` whose cache is all zeros.

        Raises
        ------
        InvalidArgument
            The rules forbid `problem`.
        Unsupported
            The declared capabilities do not cover `problem`.
        """
        validate_problem(problem)
        unmet = self.capabilities.unmet(problem, (), ())
        if unmet:
            raise Unsupported("; ".join(unmet))
        return ReferenceRunner(problem, self.oracle)

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Return a runner for `problem` without a check of `problem`.

        ``plan``, ``append``, ``attend`` and ``gather_context`` of the runner treat an illegal step
        as a legal one. ``quantize_queries``, ``prefill`` and ``layer`` raise ``InvalidArgument``.
        """
        return UncheckedRunner(problem, self.oracle)


def create() -> ReferenceBackend:
    """Return the reference as a backend."""
    return ReferenceBackend()
