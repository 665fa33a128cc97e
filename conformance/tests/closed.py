"""Right backends without a feature; they raise ``Unsupported`` for every step that needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paged_mla_conformance.meta.mutants.backends import EVERY_FORMAT, MutantBackend
from paged_mla_shared.backend import OPERATIONS, Runner
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Problem

CALLS = {*OPERATIONS} - {"merge"}


class Closed:
    """A right runner that refuses batches which need an undeclared feature."""

    lacking = ""

    def __init__(self, _: Problem, inner: Runner) -> None:
        self._inner = inner
        self._first: dict[bool, tuple[bytes, bytes]] = {}  # lengths, by whether it is a prefill

    def __getattr__(self, name: str) -> Any:
        """Return a call that may raise ``Unsupported`` after it ran."""
        call = getattr(self._inner, name)
        return call if name not in CALLS else lambda batch, *more: self._ask(call, batch, *more)

    def _ask(self, call: Callable[..., Any], batch: Any, *more: Any) -> Any:
        answer = call(batch, *more)  # an illegal batch raises another error
        rows = getattr(batch, "step", batch)
        lens, live = rows.query_lens, rows.query_lens[rows.query_lens > 0]
        lengths = rows.cu_seqlens_q.tobytes(), rows.seq_lens.tobytes()
        first = self._first.setdefault(hasattr(rows, "k_nope"), lengths)
        needed = {
            "mixed": len({*live.tolist()}) > 1,
            "padding": not rows.seq_lens.all() or not lens.all() or lens.sum() < rows.num_tokens,
            "replay": first != lengths,
            "explicit_slots": getattr(rows, "slot_mapping", None) is not None,
        }
        if needed[self.lacking]:
            raise Unsupported(f"{self.lacking} is not declared")
        return answer


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of a backend without a feature, ``without_padding``."""
    _, without, lacking = name.partition("without_")
    if not without:
        raise AttributeError(name)
    features = EVERY_FORMAT.features - {lacking}
    wrap = type(name, (Closed,), {"lacking": lacking})
    capabilities = replace(EVERY_FORMAT, features=features)
    return lambda: MutantBackend(name=name, wrap=wrap, capabilities=capabilities)
