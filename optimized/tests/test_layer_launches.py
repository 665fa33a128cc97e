"""Launches of a layer are remembered, wherever its groups of rows begin."""

import pytest
import torch
from mla_step import build
from test_layer import attend, layer_config, lens_of, plan, queries_of, weights_of
from triton.runtime.jit import JITFunction

from paged_mla_optimized import MlaLayer
from paged_mla_optimized.operations.prefill.key_chunks import KeyChunk
from paged_mla_optimized.runtime.launch import Fixed, Launcher

HEADS = 4  # so many lse of a token are 16 bytes


def tensors_of(argument):
    """Return the tensors of an argument of a launch."""
    argument = argument.record if isinstance(argument, Fixed) else argument
    parts = argument if isinstance(argument, tuple) else (argument,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.fixture
def looked_for(monkeypatch):
    """Note launches that Triton has to look for a binary for, because of an address."""
    found, launch = [], Launcher.__call__

    def noting(self, grid, key, *arguments):
        params = JITFunction(self._kernel.fn, **self._kernel.kwargs).params
        found.extend(
            f"{self._kernel.__name__}: {param.name}"
            for param, argument in zip(params, arguments, strict=False)
            if not param.do_not_specialize_on_alignment
            if any(tensor.data_ptr() % 16 for tensor in tensors_of(argument))
        )
        launch(self, grid, key, *arguments)

    monkeypatch.setattr(Launcher, "__call__", noting)
    return found


@pytest.mark.parametrize("absorbed", [0, 1, 2, 3])
def test_no_binary_is_looked_for(looked_for, absorbed):
    """S-21: however many rows are absorbed, and in later parts too."""
    step = build((33, 1), (70, 3), (50, 20), (60, 7), num_heads=HEADS)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, 64), "cpu")
    plan(layer, step, absorbed_rows=absorbed, **lens_of(step))
    attend(layer, step, q, weights)
    assert looked_for == []


@pytest.mark.parametrize("max_rows", range(1, 9))
def test_spans_begin_on_16_bytes(max_rows):
    """What a part is described by is read by kernels that are compiled for such addresses."""
    part = KeyChunk(max_rows, 64, torch.device("cpu"))
    part.num_rows = max_rows
    for spans in (part.query_starts, part.key_starts, part.first_tokens):
        assert spans.data_ptr() % 16 == 0
    assert (
        len(part.first_tokens) == len(part.key_starts) - 1 == len(part.query_starts) - 1 == max_rows
    )
