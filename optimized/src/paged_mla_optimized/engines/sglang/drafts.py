"""The backend of a draft model's steps, and the hook by which SGLang creates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from paged_mla_optimized.engines.sglang.backend import PagedMlaBackend
from paged_mla_optimized.engines.sglang.versions import with_ours
from paged_mla_shared.errors import Unsupported


class PagedMlaDraftBackend:
    """The steps in which a draft model drafts a chain.

    One CUDA graph contains all steps, so each step has a backend, and thus a plan, of its own.

    Parameters
    ----------
    model_runner : ModelRunner
        The runner of the draft model.
    topk : int
        The number of branches of a draft; only 1 is supported.
    steps : int
        The number of draft steps, ``speculative_num_steps``. The last step runs no attention.

    Raises
    ------
    Unsupported
        `topk` is above 1: each branch would need a request map of its own.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any, topk: int, steps: int) -> None:
        if topk > 1:
            raise Unsupported(
                f"speculative_eagle_topk={topk} is not supported by paged_mla for a draft model; "
                'use 1, or set speculative_draft_attention_backend="triton"'
            )
        self.attn_backends = [PagedMlaBackend(model_runner, ahead=i) for i in range(1, steps)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Check that the largest graph fits the buffers of every step."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan all steps for a run outside of a CUDA graph."""
        self.init_forward_metadata_out_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan all steps before the capture or the replay of their graph."""
        view = build_inner_fb_view(
            forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
        )
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: all steps are planned before a replay."""


def add_to_table(name: str) -> Callable[..., Any]:
    """Return a hook around ``DraftBackendFactory._create_backend`` that adds the backend `name`."""

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
