"""The example of a serving loop generates what dense computation of each request gives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from serving import Model, Server, assert_serves, config_of, serving_loop


def test_serving_loop():
    """S-13, S-15, S-19: too many requests for rows and blocks; long prompts that begin alike."""
    model = Model(config_of("cpu"), "cpu")
    prompts = [[*range(40 - 2 * n), 50 + n, 50 + n] for n in range(5)]
    server = assert_serves(model, "cpu", prompts, 10, num_blocks=9)
    counted = ("chunks", "reused", "preempted", "accepted_drafts", "rejected_drafts")
    assert all(server.counts[name] > 0 for name in counted)


def test_nothing_to_do():
    """S-19: a server that waits for requests steps all the same."""
    assert Server(Model(config_of("cpu"), "cpu"), "cpu", num_blocks=16).step() == []


def test_padded_tokens_have_an_id():
    """S-6: the embedding gets it when a graph is captured, and after a shorter step."""
    server = Server(Model(config_of("cpu"), "cpu"), "cpu", num_blocks=16)
    assert not server.inputs.tokens["ids"].any()


@pytest.mark.parametrize(("prompt", "new"), [([], 1), ([1], 0), ([1] * 250, 7)])
def test_requests_that_never_fit(prompt, new):
    server = Server(Model(config_of("cpu"), "cpu"), "cpu", num_blocks=16)
    with pytest.raises(ValueError, match=f"{len(prompt)} tokens and {new} new"):
        server.add(prompt, new)


def test_the_example_is_short():
    """Its lines of code: neither blank lines nor docstrings."""
    source = Path(serving_loop.__file__).read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    code = [line for number, line in lines if line.strip() and number not in docstrings]
    assert len(code) <= 150
