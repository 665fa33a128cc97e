"""A kernel of the suite that calls a judged function."""

from __future__ import annotations

from dataclasses import replace

import torch

from paged_mla_adapters.call import AppendCall, Call, MergeCall, starts_of
from paged_mla_adapters.judge import csr
from paged_mla_adapters.judge.answers import answers_of, by_token, layout_of
from paged_mla_adapters.judge.append_arguments import AppendArguments
from paged_mla_adapters.judge.arguments import invoke
from paged_mla_adapters.judge.attend_arguments import AttendArguments
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.judge.like import LIKE
from paged_mla_adapters.judge.merge_arguments import MergeArguments
from paged_mla_adapters.judge.target import calls_of, load


class JudgedKernel:
    """A kernel that calls a function as its claims describe it.

    Parameters
    ----------
    claims : Claims

    Attributes
    ----------
    layouts : list of str
        The layouts of output and lse in the last call; "" if the function returns no lse.
    """

    def __init__(self, claims: Claims) -> None:
        self.claims = claims
        target = load(claims.target)
        like = LIKE.get(claims.like)
        self._known = like.bind(target) if like is not None and like.bind is not None else None
        self._functions = [] if self._known is not None else calls_of(target)
        self.layouts = ["[T, H]", "[T, H]"]

    def __call__(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [T, H, R] and lse [T, H]; the lse is 0 if the function returns none."""
        if self._known is not None:
            self.layouts = ["[T, H]", "[T, H]" if LIKE[self.claims.like].has_lse else ""]
            return self._known(call)
        if self.claims.kind == "csr":
            lists = csr.CsrArguments(call, self.claims)
            made = lists.lists(invoke(self._functions, lists, self.claims))
            return csr.attend(call, made, self.claims)
        arguments = AttendArguments(call, self.claims)
        plans = len(self._functions) > 1
        before = AttendArguments(another_step(call), self.claims) if plans else None
        result = invoke(self._functions, arguments, self.claims, before)
        out, lse = answers_of(result, arguments)
        tokens, heads = call.q.shape[:2]
        sizes = tokens, heads, len(call.seq_lens)
        rank = call.problem.dims.kv_lora_rank
        first = layout_of("out", out, sizes, (rank,), self.claims.out)
        self.layouts = [first, ""]
        if lse is None:
            return by_token(out, first), torch.zeros(tokens, heads, device=out.device)
        second = layout_of("lse", lse, sizes, (), self.claims.lse_layout)
        self.layouts = [first, second]
        return by_token(out, first), by_token(lse, second)

    def append(self, call: AppendCall) -> None:
        """Call the function, which writes tokens to the cache of the call."""
        invoke(self._functions, AppendArguments(call, self.claims), self.claims)

    def merge(self, call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the merge of two partial results, out [T, H, R] and lse [T, H].

        Raises
        ------
        TypeError
            The function returned no lse.
        """
        arguments = MergeArguments(call, self.claims)
        out, lse = answers_of(invoke(self._functions, arguments, self.claims), arguments)
        if lse is None:
            raise TypeError("the function returned no lse; allowed: out and lse")
        return out, by_token(lse, self.claims.lse_layout)


def another_step(call: Call) -> Call:
    """Return a call with the same shapes, the rows in reverse order and another softmax scale."""
    lens = call.cu_seqlens_q.diff().flip(0)
    return replace(
        call,
        problem=replace(call.problem, softmax_scale=1.25 * call.problem.softmax_scale),
        cu_seqlens_q=starts_of(lens),
        block_table=call.block_table.flip(0),
        seq_lens=call.seq_lens.flip(0),
    )
