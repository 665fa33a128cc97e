"""Backends that do what the protocol forbids: to inputs, in what they return, to the test run.

Ignored types are the point: what is returned there is not what the protocol has.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_reference.faults.runner.contract import TheImageBecomesTheCache
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


class WritesQueries(ForwardingRunner):
    """Scaled in place."""

    def attend(self, batch: Batch) -> Output:
        """Double the queries."""
        answer = self.inner.attend(batch)
        batch.q_nope[0] *= 2
        return answer


class WritesLengths(ForwardingRunner):
    """Advanced in place."""

    def plan(self, batch: Batch) -> Metadata:
        """Add one."""
        planned = self.inner.plan(batch)
        batch.seq_lens[-1] += 1
        return planned


class WritesLatents(ForwardingRunner):
    """Rotated in place."""

    def append(self, batch: Batch) -> None:
        """Negate."""
        self.inner.append(batch)
        batch.k_pe[...] *= -1


class WritesTheImage(ForwardingRunner):
    """The image becomes the cache."""

    def load_cache(self, image: CacheImage) -> None:
        """Clear a byte."""
        self.inner.load_cache(image)
        image.blocks[0, 0] ^= 1


class WritesPartials(ForwardingRunner):
    """Merged in place."""

    def merge(self, partials: Sequence[Output]) -> Output:
        """Spoil the first."""
        merged = self.inner.merge(partials)
        partials[0].lse[0, 0] = 7
        return merged


class AnswersWithItsInput(ForwardingRunner):
    """The answer lies where the queries did."""

    def attend(self, batch: Batch) -> Output:
        """Return a view."""
        return Output(batch.q_nope[:], self.inner.attend(batch).lse)


class ReturnsNone(ForwardingRunner):
    """It forgets to return."""

    def attend(self, batch: Batch) -> Output:
        """Forget."""
        self.inner.attend(batch)
        return None  # type: ignore[return-value]


class ReturnsATuple(ForwardingRunner):
    """It returns what kernels do."""

    def attend(self, batch: Batch) -> Output:
        """Unpack."""
        answer = self.inner.attend(batch)
        return (answer.out, answer.lse)  # type: ignore[return-value]


class ReturnsLists(ForwardingRunner):
    """It has no arrays."""

    def attend(self, batch: Batch) -> Output:
        """Convert."""
        answer = self.inner.attend(batch)
        return Output(answer.out.tolist(), answer.lse)  # type: ignore[arg-type]


class ReturnsMaskedArrays(ForwardingRunner):
    """Whose comparisons hide what is masked."""

    def attend(self, batch: Batch) -> Output:
        """Mask everything."""
        answer = self.inner.attend(batch)
        return Output(np.ma.masked_all_like(answer.out), answer.lse)


class ReturnsFlatAnswers(ForwardingRunner):
    """It leaves the heads in the width."""

    def attend(self, batch: Batch) -> Output:
        """Flatten."""
        answer = self.inner.attend(batch)
        return Output(answer.out.reshape(len(answer.out), -1), answer.lse)


class PlansADict(ForwardingRunner):
    """It has no Metadata."""

    def plan(self, batch: Batch) -> Metadata:
        """Return names and arrays."""
        return vars(self.inner.plan(batch))  # type: ignore[return-value]


class ReadsBytes(ForwardingRunner):
    """It has no array."""

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return bytes."""
        return self.inner.read_cache(block_ids).tobytes()  # type: ignore[return-value]


class ReadsWords(ForwardingRunner):
    """It counts in 32 bits."""

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """View bytes as words."""
        return self.inner.read_cache(block_ids).view(np.int32)  # type: ignore[return-value]


class GathersOneArray(ForwardingRunner):
    """Latents and keys lie side by side."""

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Join them."""
        return np.concatenate(self.inner.gather_context(batch), axis=1)  # type: ignore[return-value]


class QuantizesAlone(ForwardingRunner):
    """It keeps the scales."""

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return codes."""
        return self.inner.quantize_queries(batch, scale)[:1]  # type: ignore[return-value]


class ScalesQueries(ForwardingRunner):
    """Divided in place."""

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Halve."""
        found = self.inner.quantize_queries(batch, scale)
        batch.q_pe[...] /= 2
        return found


class WritesKeys(ForwardingRunner):
    """Scaled in place."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Double a key."""
        answer = self.inner.prefill(batch)
        batch.k_nope[0] *= 2
        return answer


class PrefillsWithItsInput(ForwardingRunner):
    """Answers lie where values lay."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Answer with values."""
        answer = self.inner.prefill(batch)
        return Output(batch.v[: len(answer.out)], answer.lse)


class Raises(ForwardingRunner):
    """Something is not implemented."""

    def attend(self, batch: Batch) -> Output:
        """Say so."""
        raise NotImplementedError("no such kernel")


class LosesPadding(ForwardingRunner):
    """It answers the tokens that somebody wants."""

    def attend(self, batch: Batch) -> Output:
        """Cut."""
        answer, live = self.inner.attend(batch), int(batch.cu_seqlens_q[-1])
        return Output(answer.out[:live].copy(), answer.lse[:live].copy())


class RaisesStrangely(ForwardingRunner):
    """It says what no screen and no file has letters for."""

    def attend(self, batch: Batch) -> Output:  # noqa: ARG002 - it never looks
        """Say so."""
        raise RuntimeError("\N{GREEK SMALL LETTER MU}s, a byte of a path: \udc80, and \0")


class CastsQueries(ForwardingRunner):
    """It takes queries of another type, which it should refuse."""

    def attend(self, batch: Batch) -> Output:
        """Cast."""
        return self.inner.attend(replace(batch, q_pe=batch.q_pe.astype(batch.q_nope.dtype)))


class Warns(ForwardingRunner):
    """It speaks up twice in every call."""

    def attend(self, batch: Batch) -> Output:
        """Warn."""
        for _ in range(2):
            warnings.warn("slow path", RuntimeWarning, stacklevel=1)
        return self.inner.attend(batch)


def _ending(end: Callable[[], Any]) -> type[ForwardingRunner]:
    class Excused(ForwardingRunner):
        """It asks pytest to look away."""

        def attend(self, batch: Batch) -> Output:
            """Ask."""
            end()
            return self.inner.attend(batch)

    return Excused


def _raise(error: BaseException) -> None:
    raise error


_RUNNERS: dict[str, Callable[..., ForwardingRunner]] = {
    "writes-queries": WritesQueries,
    "writes-lengths": WritesLengths,
    "writes-latents": WritesLatents,
    "writes-the-image": WritesTheImage,
    "writes-the-image-later": TheImageBecomesTheCache.change,
    "writes-partials": WritesPartials,
    "answers-with-its-input": AnswersWithItsInput,
    "returns-none": ReturnsNone,
    "returns-a-tuple": ReturnsATuple,
    "returns-lists": ReturnsLists,
    "returns-masked-arrays": ReturnsMaskedArrays,
    "returns-flat-answers": ReturnsFlatAnswers,
    "plans-a-dict": PlansADict,
    "reads-bytes": ReadsBytes,
    "reads-words": ReadsWords,
    "gathers-one-array": GathersOneArray,
    "quantizes-alone": QuantizesAlone,
    "scales-queries": ScalesQueries,
    "writes-keys": WritesKeys,
    "prefills-with-its-input": PrefillsWithItsInput,
    "raises": Raises,
    "loses-padding": LosesPadding,
    "raises-strangely": RaisesStrangely,
    "casts-queries": CastsQueries,
    "warns": Warns,
    "skips": _ending(lambda: pytest.skip("not today")),
    "skips-as-unittest": _ending(lambda: _raise(unittest.SkipTest("not today"))),
    "xfails": _ending(lambda: pytest.xfail("known")),
    "exits-pytest": _ending(lambda: pytest.exit("enough", returncode=0)),
    "exits-python": _ending(lambda: sys.exit(0)),
    "interrupts": _ending(lambda: _raise(KeyboardInterrupt())),
}


class SkipsInPrepare(MutantBackend):
    """It will not even be prepared."""

    def prepare(self, problem: Problem) -> Any:  # noqa: ARG002 - it never gets that far
        """Skip."""
        pytest.skip("not today")


def skips_in_prepare() -> MutantBackend:
    return SkipsInPrepare(name="skips-in-prepare")


def warns_while_loaded() -> MutantBackend:
    warnings.warn("old driver", UserWarning, stacklevel=1)
    return MutantBackend(name="warns-while-loaded")


def without_a_device() -> object:
    right = MutantBackend()
    names = ("name", "version", "mode", "memory_bytes", "capabilities", "prepare")
    return SimpleNamespace(**{name: getattr(right, name) for name in names})


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of one of them."""
    if name not in _RUNNERS:
        raise AttributeError(name)
    return lambda: MutantBackend(name=name, wrap=_RUNNERS[name])
