"""The weights between latents and heads, as views of the model's tensors."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.arguments import check_at_least, check_kind
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_optimized.tensors.overlap import check_apart, check_places
from paged_mla_shared.errors import InvalidArgument


class HeadWeights:
    """W_UK and W_UV of one layer (S-21), for the heads of this rank only.

    The weights are views of the caller's tensors, with their strides, and never copies. In-place
    updates of these tensors take effect at the next call. If a tensor is replaced (``.data`` of a
    parameter, ``.to(...)``), make new `HeadWeights`. Gradients are not computed.

    Parameters
    ----------
    by_head : dtype [H, N + V, R]
        For each head, the rows that project latents to keys without position, followed by the rows
        that project latents to values. Any strides. If the rows of all heads are evenly spaced,
        one matrix product computes keys and values; otherwise two batched products do.
    qk_nope_head_dim : int
        N.

    Raises
    ------
    InvalidArgument
        `by_head` is not a tensor of three axes, `qk_nope_head_dim` is less than 1, or no rows
        remain for values.
    """

    def __init__(self, by_head: torch.Tensor, qk_nope_head_dim: int) -> None:
        check_tensor("by_head", by_head, (None, None, None), None, None)
        _check_lines("by_head", by_head.shape[1], qk_nope_head_dim)
        by_head = by_head.detach()
        self.w_uk, self.w_uv = by_head[:, :qk_nope_head_dim], by_head[:, qk_nope_head_dim:]
        follow = by_head.stride(0) == by_head.shape[1] * by_head.stride(1)
        self._lines = by_head.flatten(0, 1) if follow or len(by_head) < 2 else None

    @classmethod
    def of_kv_b_proj(
        cls, kv_b_proj: torch.Tensor, num_heads: int, qk_nope_head_dim: int
    ) -> HeadWeights:
        """Return the weights of a checkpoint's ``kv_b_proj`` [H * (N + V), R], without a copy.

        For each head the lines of W_UK come first, and those of W_UV follow.

        Raises
        ------
        InvalidArgument
            `num_heads` does not divide the lines, or a head has `qk_nope_head_dim` lines or fewer.
        """
        check_tensor("kv_b_proj", kv_b_proj, (None, None), None, None)
        check_at_least(1, num_heads=num_heads)
        if len(kv_b_proj) % num_heads:
            allowed = f"a multiple of num_heads = {num_heads}"
            raise InvalidArgument("kv_b_proj", f"{len(kv_b_proj)} lines", allowed)
        lines = len(kv_b_proj) // num_heads
        _check_lines("kv_b_proj", lines, qk_nope_head_dim)
        by_head = kv_b_proj.reshape(num_heads, lines, kv_b_proj.shape[1])
        return cls(by_head, qk_nope_head_dim)

    @classmethod
    def of_halves(cls, w_uk: torch.Tensor, w_uv: torch.Tensor) -> HeadWeights:
        """Return the weights of W_UK [H, N, R] and W_UV [H, V, R], without a copy.

        Raises
        ------
        InvalidArgument
            The shapes, dtypes or devices do not match, or N or V is 0.
        """
        check_tensor("w_uk", w_uk, (None, None, None), None, None)
        shape = (w_uk.shape[0], None, w_uk.shape[2])
        check_tensor("w_uv", w_uv, shape, w_uk.dtype, w_uk.device)
        for name, half in (("w_uk", w_uk), ("w_uv", w_uv)):
            if half.shape[1] < 1:
                raise InvalidArgument(name, "no lines", "at least one line per head")
        weights = cls.__new__(cls)
        weights.w_uk, weights.w_uv, weights._lines = w_uk.detach(), w_uv.detach(), None
        return weights

    @property
    def kv_b_proj(self) -> torch.Tensor:
        """Both weights as in checkpoints, [H * (N + V), R].

        A view if the rows of all heads are evenly spaced in one tensor, otherwise a copy.
        """
        if self._lines is not None:
            return self._lines
        return torch.cat([self.w_uk, self.w_uv], dim=1).flatten(0, 1)

    def of_heads(self, heads: range) -> HeadWeights:
        """Return the weights of consecutive heads, as one rank has them, without a copy.

        Raises
        ------
        InvalidArgument
            `heads` is not a range with step 1 of at least one of the heads.
        """
        num_heads = self.w_uk.shape[0]
        check_kind("heads", heads, range)
        if heads.step != 1 or not 0 <= heads.start < heads.stop <= num_heads:
            raise InvalidArgument(
                "heads", heads, f"a non-empty range with step 1 in range(0, {num_heads})"
            )
        part = slice(heads.start, heads.stop)
        weights = HeadWeights.of_halves(self.w_uk[part], self.w_uv[part])
        if self._lines is not None:
            weights._lines = self._lines.view(num_heads, -1, self._lines.shape[1])[part].flatten(
                0, 1
            )
        return weights

    @torch.no_grad()
    def absorb(self, q_nope: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the queries over latents of a layer's queries (S-21).

        Parameters
        ----------
        q_nope : dtype [T, H, N]
        out : dtype [T, H, R] or None
            Where to write; ``None`` allocates.

        Returns
        -------
        out : dtype [T, H, R]

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype or device is wrong, or `out` overlaps an input or itself.
        """
        return _by_head("q_nope", q_nope, self.w_uk, out)

    @torch.no_grad()
    def project(self, latents: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of heads, projected from attention outputs over latents (S-21).

        Parameters
        ----------
        latents : dtype [T, H, R]
            The output of absorbed attention.
        out : dtype [T, H, V] or None
            Where to write; ``None`` allocates.

        Returns
        -------
        out : dtype [T, H, V]

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype or device is wrong, or `out` overlaps an input or itself.
        """
        return _by_head("latents", latents, self.w_uv.mT, out)

    @torch.no_grad()
    def materialize(self, ckv: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """Write the keys without position and the values of every head for latents [K, R].

        `keys_and_values` is contiguous, [K, H * (N + V)]. The method does not check its arguments.
        """
        if self._lines is not None:
            torch.mm(ckv, self._lines.T, out=keys_and_values)
            return
        num_heads, nope = self.w_uk.shape[:2]
        shape = (len(ckv), num_heads, nope + self.w_uv.shape[1])
        by_head = keys_and_values.view(shape).transpose(0, 1)  # [H, K, N + V]
        of_all = ckv.expand(num_heads, *ckv.shape)
        torch.bmm(of_all, self.w_uk.mT, out=by_head[..., :nope])
        torch.bmm(of_all, self.w_uv.mT, out=by_head[..., nope:])


def _check_lines(name: str, lines: int, qk_nope_head_dim: int) -> None:
    """Check that a head has lines for keys without position and lines for values."""
    check_at_least(1, qk_nope_head_dim=qk_nope_head_dim)
    if lines <= qk_nope_head_dim:
        allowed = f"more than qk_nope_head_dim = {qk_nope_head_dim}"
        raise InvalidArgument(name, f"{lines} lines per head", allowed)


def _by_head(
    name: str, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Return [T, H, m], the product of `x` [T, H, n] with the weights [H, n, m] of each head."""
    num_heads, given, returned = weights.shape
    check_tensor(name, x, (None, num_heads, given), weights.dtype, weights.device)
    shape = (len(x), num_heads, returned)
    if out is None:
        out = x.new_empty(shape)
    else:
        check_tensor("out", out, shape, weights.dtype, weights.device)
        check_places(out=out)
        check_apart({"out": out}, {name: x, "the weights": weights})
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out
