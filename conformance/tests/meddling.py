"""Backends that break the protocol: they change inputs, return wrong types, or end tests.

Type errors are ignored where a backend returns a wrong type on purpose.
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
    """Scales queries in place."""

    def attend(self, batch: Batch) -> Output:
        """Double the queries of the first token."""
        answer = self.inner.attend(batch)
        batch.q_nope[0] *= 2
        return answer


class WritesLengths(ForwardingRunner):
    """Increases lengths in place."""

    def plan(self, batch: Batch) -> Metadata:
        """Add 1 to the last length."""
        planned = self.inner.plan(batch)
        batch.seq_lens[-1] += 1
        return planned


class WritesLatents(ForwardingRunner):
    """Changes keys in place."""

    def append(self, batch: Batch) -> None:
        """Negate the keys."""
        self.inner.append(batch)
        batch.k_pe[...] *= -1


class WritesTheImage(ForwardingRunner):
    """Changes the loaded image."""

    def load_cache(self, image: CacheImage) -> None:
        """Invert a bit."""
        self.inner.load_cache(image)
        image.blocks[0, 0] ^= 1


class WritesPartials(ForwardingRunner):
    """Changes partial results in place."""

    def merge(self, partials: Sequence[Output]) -> Output:
        """Change the lse of the first."""
        merged = self.inner.merge(partials)
        partials[0].lse[0, 0] = 7
        return merged


class AnswersWithItsInput(ForwardingRunner):
    """Returns an output that shares memory with the queries."""

    def attend(self, batch: Batch) -> Output:
        """Return a view of the queries."""
        return Output(batch.q_nope[:], self.inner.attend(batch).lse)


class ReturnsNone(ForwardingRunner):
    """Returns no output."""

    def attend(self, batch: Batch) -> Output:
        """Return None."""
        self.inner.attend(batch)
        return None  # type: ignore[return-value]


class ReturnsATuple(ForwardingRunner):
    """Returns a tuple of two arrays."""

    def attend(self, batch: Batch) -> Output:
        """Return the fields of the output."""
        answer = self.inner.attend(batch)
        return (answer.out, answer.lse)  # type: ignore[return-value]


class ReturnsLists(ForwardingRunner):
    """Returns lists in place of arrays."""

    def attend(self, batch: Batch) -> Output:
        """Convert `out` to a list."""
        answer = self.inner.attend(batch)
        return Output(answer.out.tolist(), answer.lse)  # type: ignore[arg-type]


class ReturnsMaskedArrays(ForwardingRunner):
    """Returns a masked array, whose comparisons ignore masked elements."""

    def attend(self, batch: Batch) -> Output:
        """Mask all elements."""
        answer = self.inner.attend(batch)
        return Output(np.ma.masked_all_like(answer.out), answer.lse)


class ReturnsFlatAnswers(ForwardingRunner):
    """Returns `out` with two axes."""

    def attend(self, batch: Batch) -> Output:
        """Join the axes of heads and elements."""
        answer = self.inner.attend(batch)
        return Output(answer.out.reshape(len(answer.out), -1), answer.lse)


class PlansADict(ForwardingRunner):
    """Returns a dict from plan."""

    def plan(self, batch: Batch) -> Metadata:
        """Return the fields of Metadata."""
        return vars(self.inner.plan(batch))  # type: ignore[return-value]


class ReadsBytes(ForwardingRunner):
    """Returns bytes from read_cache."""

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the blocks as bytes."""
        return self.inner.read_cache(block_ids).tobytes()  # type: ignore[return-value]


class ReadsWords(ForwardingRunner):
    """Returns int32 from read_cache."""

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return a view of the blocks as int32."""
        return self.inner.read_cache(block_ids).view(np.int32)  # type: ignore[return-value]


class GathersOneArray(ForwardingRunner):
    """Returns one array from gather_context."""

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Join latents and keys."""
        return np.concatenate(self.inner.gather_context(batch), axis=1)  # type: ignore[return-value]


class QuantizesAlone(ForwardingRunner):
    """Returns no scales from quantize_queries."""

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return only the codes."""
        return self.inner.quantize_queries(batch, scale)[:1]  # type: ignore[return-value]


class ScalesQueries(ForwardingRunner):
    """Changes queries in place."""

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Halve the rotated part of the queries."""
        found = self.inner.quantize_queries(batch, scale)
        batch.q_pe[...] /= 2
        return found


class WritesKeys(ForwardingRunner):
    """Changes keys of a prefill in place."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Double a key."""
        answer = self.inner.prefill(batch)
        batch.k_nope[0] *= 2
        return answer


class PrefillsWithItsInput(ForwardingRunner):
    """Returns an output that shares memory with the values."""

    def prefill(self, batch: PrefillBatch) -> Output:
        """Return a view of the values."""
        answer = self.inner.prefill(batch)
        return Output(batch.v[: len(answer.out)], answer.lse)


class Raises(ForwardingRunner):
    """Raises an exception."""

    def attend(self, batch: Batch) -> Output:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError("no such kernel")


class LosesPadding(ForwardingRunner):
    """Returns outputs without padded tokens."""

    def attend(self, batch: Batch) -> Output:
        """Cut the padded tokens off."""
        answer, live = self.inner.attend(batch), int(batch.cu_seqlens_q[-1])
        return Output(answer.out[:live].copy(), answer.lse[:live].copy())


class RaisesStrangely(ForwardingRunner):
    """Raises an exception whose message cannot be encoded."""

    def attend(self, batch: Batch) -> Output:  # noqa: ARG002 - not used
        """Raise ``RuntimeError``."""
        raise RuntimeError("\N{GREEK SMALL LETTER MU}s, a byte of a path: \udc80, and \0")


class CastsQueries(ForwardingRunner):
    """Accepts queries of another type, which it should refuse."""

    def attend(self, batch: Batch) -> Output:
        """Cast the queries and attend."""
        return self.inner.attend(replace(batch, q_pe=batch.q_pe.astype(batch.q_nope.dtype)))


class Warns(ForwardingRunner):
    """Gives two warnings in every call."""

    def attend(self, batch: Batch) -> Output:
        """Warn and attend."""
        for _ in range(2):
            warnings.warn("slow path", RuntimeWarning, stacklevel=1)
        return self.inner.attend(batch)


def _ending(end: Callable[[], Any]) -> type[ForwardingRunner]:
    class Excused(ForwardingRunner):
        """Tries to end or skip the test."""

        def attend(self, batch: Batch) -> Output:
            """Call `end` and attend."""
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
    """Skips the test in prepare."""

    def prepare(self, problem: Problem) -> Any:  # noqa: ARG002 - not used
        """Skip the test."""
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
    """Return the factory of a backend by its name."""
    if name not in _RUNNERS:
        raise AttributeError(name)
    return lambda: MutantBackend(name=name, wrap=_RUNNERS[name])
