"""Paged MLA for a serving engine: plan once per step, append and attend once per layer."""

from __future__ import annotations

import math

import torch

from paged_mla_optimized import checks
from paged_mla_optimized.append import launch_append
from paged_mla_optimized.attend import Attention
from paged_mla_optimized.config import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.device import device_facts
from paged_mla_optimized.gather import launch_gather
from paged_mla_optimized.plan import Plan
from paged_mla_optimized.rotary import rope_tables
from paged_mla_optimized.tables import RequestMap
from paged_mla_optimized.values import check_values
from paged_mla_optimized.variants import AttendVariant, attend_variant
from paged_mla_shared.errors import InvalidArgument

_LOG2_E = 1 / math.log(2)


class PagedMla:
    """Paged multi-head latent attention. Every buffer is allocated here, none later.

    ``plan``, ``append`` and ``attend`` launch kernels on the current stream, allocate nothing and
    never wait for the device, so they can be captured in a CUDA graph. A replay reads lengths,
    tables and masks from the same tensors again.

    Parameters
    ----------
    config : MlaConfig
    device : str or torch.device
        A CUDA device; a CPU where Triton's interpreter runs (``TRITON_INTERPRET=1``).
    variant : AttendVariant or None
        Tile sizes; ``None`` takes those of :mod:`paged_mla_optimized.variants`.

    Raises
    ------
    Unsupported
        No kernel runs on `device`.
    """

    def __init__(
        self,
        config: MlaConfig,
        device: str | torch.device = "cuda",
        *,
        variant: AttendVariant | None = None,
    ) -> None:
        self.config = config
        self.device = torch.empty(0, device=device).device  # "cuda" names its index
        facts = device_facts(self.device)
        self.variant = variant or attend_variant(
            facts.arch,
            DTYPE_NAMES[config.dtype],
            config.num_heads,
            config.max_query_len,
            is_tree=config.is_tree,
        )
        cos, sin = torch.empty(0), torch.empty(0)
        if config.rope is not None:
            cos, sin = rope_tables(
                config.rope, config.qk_rope_head_dim, config.max_model_len, config.dtype
            )
        self._tables = (cos.to(self.device), sin.to(self.device))
        self._plan = Plan(config, self.variant, self.device)
        self._attention = Attention(config, self.variant, facts.num_sms, self._tables, self.device)
        shape = (config.max_query_tokens, config.num_heads)
        self._out = torch.empty(
            (*shape, config.kv_lora_rank), dtype=config.dtype, device=self.device
        )
        self._lse = torch.empty(shape, dtype=torch.float32, device=self.device)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the planned step (S-3), int64 [T]; 0 for padding."""
        return self._plan.positions[: self._plan.num_tokens]

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the planned step (S-1), int64 [T]; -1 for padding."""
        return self._plan.slot_mapping[: self._plan.num_tokens]

    @property
    def block_table(self) -> torch.Tensor:
        """Block table of the planned step, int32 [B, M]: the one given, or the one built."""
        return self._plan.block_table

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of the planned step's ``seq_lens``, int32 [B + 1]."""
        return self._plan.key_starts[: self._plan.num_rows + 1]

    def plan(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe a step. Two launches; lengths are read on the device only.

        Parameters
        ----------
        cu_seqlens_q : int32 [B + 1]
            Prefix sums of query lengths; tokens at or past the last entry are padding (S-6).
        seq_lens : int32 [B]
            Tokens of each row, this step's included; 0 marks a padded row (S-2).
        block_table : int32 [B, M], or RequestMap
            Read again by ``attend``: keep it unchanged until then. Entries past a row's last
            block are never read (S-9). From a request map, :attr:`block_table` is built.
        num_tokens : int
            T, the tokens of the step's tensors, padded ones included.
        mask : bool [..] or uint8 [T, W], or None
            The draft trees, spelled as the config says (S-14).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or capacity is wrong. Values are not looked at:
            :meth:`check` does that.
        """
        checks.check_lengths(
            self.config,
            cu_seqlens_q,
            seq_lens,
            block_table,
            num_tokens=num_tokens,
            device=self.device,
        )
        checks.check_mask(self.config, mask, num_tokens, self.device)
        self._plan.fill(cu_seqlens_q, seq_lens, block_table, num_tokens, mask)

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Write the planned step's latents and keys to the cache (S-10, S-12).

        Parameters
        ----------
        ckv : dtype [T, R]
        k_pe : dtype [T, P]
            Unrotated if the config has a rope, else as it will be cached.
        cache : dtype [num_blocks, block_size, R + P]
            Any strides, the last one 1.
        slot_mapping : int64 [T] or None
            Where to write; ``None`` takes the plan's slots. Negative slots write nothing.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        num_tokens = self._plan.num_tokens
        checks.check_latents(self.config, ckv, k_pe, num_tokens, self.device)
        checks.check_cache(self.config, cache, self.device)
        slots = self.slot_mapping if slot_mapping is None else slot_mapping
        checks.check_tensor("slot_mapping", slots, (num_tokens,), torch.int64, self.device)
        if num_tokens > 0:
            launch_append(
                self.config,
                ckv,
                k_pe,
                cache,
                slot_mapping=slots,
                positions=self._plan.positions,
                tables=self._tables,
            )

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every query of the planned step to the cache (S-4 to S-7).

        Parameters
        ----------
        q_nope : dtype [T, H, R]
            Absorbed queries.
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        cache : dtype [num_blocks, block_size, R + P]
            Any strides, the last one 1.
        out : dtype [T, H, R] or None
        lse : float32 [T, H] or None
            Where to write; ``None`` takes a buffer that the next call overwrites.

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            In the config's base. Queries that see nothing, and padded tokens, have (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        num_tokens = self._plan.num_tokens
        checks.check_queries(self.config, q_nope, q_pe, num_tokens, self.device)
        checks.check_cache(self.config, cache, self.device)
        out = self._out[:num_tokens] if out is None else out
        lse = self._lse[:num_tokens] if lse is None else lse
        checks.check_tensor(
            "out", out, tuple(q_nope.shape), self.config.dtype, self.device, unit_stride=True
        )
        checks.check_tensor("lse", lse, tuple(q_nope.shape[:2]), torch.float32, self.device)
        if num_tokens > 0:
            self._attention.launch(self._plan, q_nope, q_pe, cache, out=out, lse=lse)
            if self.config.lse_base == "2":
                lse.mul_(_LOG2_E)
        return out, lse

    def gather_context(self, cache: torch.Tensor, ckv: torch.Tensor, k_pe: torch.Tensor) -> None:
        """Read every planned row's cached tokens, row after row (S-1, S-9). One launch.

        Row b fills lines ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``; lines past the last are
        left as they were.

        Parameters
        ----------
        cache : dtype [num_blocks, block_size, R + P]
            Any strides, the last one 1.
        ckv : dtype [K, R]
        k_pe : dtype [K, P]
            Where to write; K is at least the sum of ``seq_lens``, what passes it is dropped.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        checks.check_latents(self.config, ckv, k_pe, ckv.shape[0], self.device)
        checks.check_cache(self.config, cache, self.device)
        if ckv.shape[0] > 0 and self._plan.num_rows > 0:
            launch_gather(self.config, self._plan, cache, ckv, k_pe)

    def check(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        num_blocks: int,
        num_tokens: int,
        mask: torch.Tensor | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Hold the *values* of a step against the rules; for debugging, since it synchronises.

        Parameters are those of :meth:`plan` and :meth:`append`; `num_blocks` is the cache's.

        Raises
        ------
        InvalidArgument
            Names the argument that no rule allows.
        """
        if num_blocks < 1:
            raise InvalidArgument("num_blocks", num_blocks, ">= 1")
        checks.check_lengths(
            self.config,
            cu_seqlens_q,
            seq_lens,
            block_table,
            num_tokens=num_tokens,
            device=self.device,
        )
        checks.check_mask(self.config, mask, num_tokens, self.device)
        if slot_mapping is not None:
            checks.check_tensor(
                "slot_mapping", slot_mapping, (num_tokens,), torch.int64, self.device
            )
        check_values(
            self.config,
            cu_seqlens_q=cu_seqlens_q.cpu().numpy(),
            seq_lens=seq_lens.cpu().numpy(),
            block_table=block_table.cpu().numpy(),
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            mask=None if mask is None else mask.cpu().numpy(),
            slot_mapping=None if slot_mapping is None else slot_mapping.cpu().numpy(),
        )
