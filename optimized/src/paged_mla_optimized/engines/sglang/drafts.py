"""Drafts: the backend of a draft model's steps, and how SGLang comes to make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from paged_mla_optimized.engines.sglang.backend import PagedMlaBackend
from paged_mla_optimized.engines.sglang.versions import with_ours
from paged_mla_shared.errors import Unsupported


class PagedMlaDraftBackend:
    """Every step of a chain of drafts: one graph has them all, so that each is planned apart.

    Parameters
    ----------
    model_runner : ModelRunner
        Of the draft model.
    topk, steps : int
        The last of the steps runs no attention.

    Raises
    ------
    Unsupported
        Drafts branch: each branch would need a map of its own.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any, topk: int, steps: int) -> None:
        if topk > 1:
            raise Unsupported(
                f"paged_mla: speculative_eagle_topk {topk} of drafts: 1, or "
                'speculative_draft_attention_backend="triton"'
            )
        self.attn_backends = [PagedMlaBackend(model_runner, ahead=i) for i in range(1, steps)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Hold the largest graph against the buffers."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan all steps, where there is no graph."""
        self.init_forward_metadata_out_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan all steps."""
        view = build_inner_fb_view(
            forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
        )
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record nothing: steps are planned before a replay."""


def add_to_table(name: str) -> Callable[..., Any]:
    """Return a hook around ``DraftBackendFactory._create_backend`` that knows `name` too."""

    def create(
        original: Callable[..., Any],
        factory: Any,
        backend_name: str,
        backend_map: dict[str, Callable[[], Any]],
        *args: Any,
        **named: Any,
    ) -> Any:
        is_decode = backend_map["triton"] == factory._create_triton_decode_backend
        runner = factory.draft_model_runner

        def ours() -> Any:
            if is_decode:
                return PagedMlaDraftBackend(runner, factory.topk, factory.speculative_num_steps)
            return PagedMlaBackend(runner)

        makers = with_ours(original, backend_map, name, ours)
        return original(factory, backend_name, makers, *args, **named)

    return create
