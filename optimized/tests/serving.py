"""The serving loop of the examples, and each of its requests computed densely, alone."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import serving_loop
from serving_loop import Server
from tiny_model import Model, config_of


def dense(model: Model, tokens: list[int]) -> list[int]:
    """Return what follows each token, by attention to all tokens before it in plain torch."""
    config, device = model.config.attention, model.embedding.device
    frequencies = config.rope.theta ** -torch.arange(0, 1, 2 / config.qk_rope_head_dim)
    angles = torch.arange(len(tokens))[:, None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles).to(device)  # [T, P / 2]

    def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def attend(layer, q_nope, q_pe, ckv, k_pe):
        weights = model.heads[layer]
        scores = torch.einsum("thn,hnr,sr->hts", q_nope, weights.w_uk, ckv)
        scores += torch.einsum("thp,sp->hts", rotate(q_pe, turns[:, None]), rotate(k_pe, turns))
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril()
        shares = (scores * config.softmax_scale).masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hts,sr,hvr->thv", shares, ckv, weights.w_uv)

    return model(torch.tensor(tokens, device=device), attend).tolist()


def assert_serves(
    model: Model, device: str, prompts: list[list[int]], new: int, num_blocks: int = 16
) -> Server:
    """Serve prompts in float32; every token is the one that dense computation gives."""
    server = Server(model, device, num_blocks=num_blocks)
    for prompt in prompts:
        server.add(prompt, new)
    done = []
    while server.waiting or server.running:
        done += server.step()
    assert len(done) == len(prompts)
    for prompt in prompts:
        [tokens] = [r.tokens for r in done if r.tokens[: len(prompt)] == prompt]
        assert len(tokens) == len(prompt) + new
        assert tokens[len(prompt) :] == dense(model, tokens)[len(prompt) - 1 : -1]
    assert len(server.blocks.free) == num_blocks
    assert not any(server.blocks.users)
    return server


__all__ = ["Model", "Server", "assert_serves", "config_of", "serving_loop"]
