"""The attention of a model, read from the model's config in the transformers library."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from paged_mla_optimized.config.arguments import check_between, is_number
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Rope, RopePairing, Yarn
from paged_mla_shared.rope import legal_rope, yarn_mscale

_PAIRINGS = {
    "axk1": None,
    "deepseek_v2": RopePairing.INTERLEAVED,
    "deepseek_v3": None,
    "glm4_moe_lite": None,
    "kimi_k2": None,
    "longcat_flash": RopePairing.INTERLEAVED,
    "minicpm3": RopePairing.NEOX,
    "mistral4": None,
    "sarvam_mla": None,
    "youtu": None,
}
"""The rope pairing of each ``model_type`` with dense MLA; for ``None``, the config's
``rope_interleave`` decides."""

_MOST = 2**31 - 1  # heads or elements; far more than any model has
_YARN_TYPES = ("yarn", "deepseek_yarn")
_OTHER_ATTENTION = {
    "index_topk": "sparse attention",
    "sliding_window": "sliding-window attention",
}


@dataclass(frozen=True, kw_only=True)
class HfAttention:
    """The attention of one layer of a model, with all heads of the layer.

    Parameters
    ----------
    dims : MlaDims
    softmax_scale : float
        ``(N + P) ** -0.5``, times the squared mscale of the model's yarn (S-5).
    rope : Rope
        The rotation that the model applies to ``q_pe`` and ``k_pe`` (S-12).
    dtype : str
        The name in the config; "bfloat16" if the config has none.
    max_position_embeddings : int or None
    """

    dims: MlaDims
    softmax_scale: float
    rope: Rope
    dtype: str
    max_position_embeddings: int | None


def attention_of(config: object) -> HfAttention:
    """Return the attention that a model's config describes.

    Parameters
    ----------
    config : PretrainedConfig, or dict
        A config with the fields of DeepSeek-V3's ``config.json``: attributes, as in transformers 4
        and 5, or keys of a dict. For a multimodal model, its ``text_config`` is read. A config
        without ``model_type`` is read like DeepSeek-V3's.

    Raises
    ------
    InvalidArgument
        A field is missing or wrong; the error names the field.
    Unsupported
        The attention is not dense MLA, or no :class:`Rope` describes the rotation.

    Notes
    -----
    As in transformers 5.24, yarn whose ``mscale`` or ``mscale_all_dim`` is 0 or missing has the
    magnitude of ``mscale`` 1 divided by that of 0. DeepSeek-V2's softmax scale includes its mscale,
    as in DeepSeek's own code and transformers 5.24; transformers 4.57.1 omits it. The result does
    not include changes that a model makes to queries and latents between projection and rotation:
    the scale of Mistral Small 4's queries at far positions, and LongCat's low-rank scales.
    """
    if config is None or isinstance(config, (str, PathLike)):
        allowed = "a config of the transformers library, or the contents of config.json as a dict"
        raise InvalidArgument("config", repr(config), allowed)
    text = _field(config, "text_config")
    has_text = _field(config, "kv_lora_rank") is None and text is not None
    fields = text if has_text else config
    pairing = _pairing(fields)
    dims = MlaDims(
        num_heads=_integer(fields, "num_attention_heads"),
        kv_lora_rank=_integer(fields, "kv_lora_rank"),
        qk_rope_head_dim=_integer(fields, "qk_rope_head_dim"),
        qk_nope_head_dim=_integer(fields, "qk_nope_head_dim"),
        v_head_dim=_integer(fields, "v_head_dim"),
    )
    rope, mscale = _rotation(fields, dims, pairing)
    return HfAttention(
        dims=dims,
        softmax_scale=dims.softmax_scale * mscale * mscale,
        rope=rope,
        dtype=_dtype(fields) or _dtype(config) or "bfloat16",
        max_position_embeddings=_field(fields, "max_position_embeddings"),
    )


def _field(config: object, name: str, default: Any = None) -> Any:
    """Return a field of a config, or `default` if the config does not have the field."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _integer(config: object, name: str) -> int:
    """Return a field that must be an integer from 1 to ``_MOST``."""
    value = _field(config, name)
    if value is None:
        raise InvalidArgument(f"config.{name}", "none", "an integer >= 1; MLA requires this field")
    check_between(1, _MOST, **{f"config.{name}": value})
    return int(value)


def _pairing(config: object) -> RopePairing:
    """Return the pairing of a model's rope; raise an error if its attention is not dense MLA."""
    kind = _field(config, "model_type")
    if _field(config, "kv_lora_rank") is None:
        raise Unsupported(
            f"config.kv_lora_rank is missing, so model_type {kind!r} does not use MLA"
        )
    if not isinstance(kind, str | None):
        raise InvalidArgument("config.model_type", repr(kind), "the name of a model, or no value")
    if kind is not None and kind not in _PAIRINGS:
        known = ", ".join(_PAIRINGS)
        raise Unsupported(f"config.model_type {kind!r} is not supported; use one of {known}")
    for name, what in _OTHER_ATTENTION.items():
        if _field(config, name) is not None:
            raise Unsupported(f"config.{name}={_field(config, name)}: {what} is not supported")
    of_all = _PAIRINGS[kind or "deepseek_v3"]
    if of_all is not None:
        return of_all
    interleaved = _field(config, "rope_interleave", default=True)
    if not isinstance(interleaved, bool):
        raise InvalidArgument("config.rope_interleave", repr(interleaved), "True or False")
    return RopePairing.INTERLEAVED if interleaved else RopePairing.NEOX


def _rotation(config: object, dims: MlaDims, pairing: RopePairing) -> tuple[Rope, float]:
    """Return a model's rotation, and the factor whose square multiplies the softmax scale."""
    place, given = _rope_parameters(config)
    theta = given.get("rope_theta")
    theta = _field(config, "rope_theta") if theta is None else theta
    if theta is None:
        raise InvalidArgument("config.rope_theta", "none", f"a number >= 1, here or in {place}")
    part, of_part = given.get("partial_rotary_factor"), place
    if part is None:  # transformers 5.24 moves the factor from here to the dict
        part, of_part = _field(config, "partial_rotary_factor"), "config"
    whole = dims.qk_rope_head_dim / (dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    if part is not None and not (is_number(part) and part in {1, whole}):
        raise Unsupported(
            f"{of_part}.partial_rotary_factor={part} is not supported; all elements of "
            "qk_rope_head_dim must rotate"
        )
    name = "rope_type" if "rope_type" in given else "type"
    kind = given.get(name)
    if kind is None and "factor" in given:
        raise InvalidArgument(f"{place}.{name}", "none", "'yarn' or 'default' if there is a factor")
    if not isinstance(kind, str | None):
        raise InvalidArgument(f"{place}.{name}", repr(kind), "'yarn' or 'default'")
    if kind in {None, "default"}:
        return legal_rope(Rope(pairing, theta)), 1.0
    if kind not in _YARN_TYPES:
        raise Unsupported(
            f"{place}.{name}={kind!r} is not supported; use 'default', 'yarn' or 'deepseek_yarn'"
        )
    yarn = _yarn(config, given, place)
    of_all_dims = _number(given, place, "mscale_all_dim") or 0.0
    legal_rope(Rope(pairing, theta, replace(yarn, mscale_all_dim=of_all_dims)))
    rope = legal_rope(Rope(pairing, theta, yarn))
    return rope, yarn_mscale(given["factor"], of_all_dims)


def _rope_parameters(config: object) -> tuple[str, Mapping[str, Any]]:
    """Return the path of the dict of rope parameters in the config, and the dict.

    If the config has both dicts, ``rope_scaling`` is used, as in ``RotaryEmbeddingConfigMixin`` of
    transformers 5.24.
    """
    for name in ("rope_scaling", "rope_parameters"):
        given, place = _field(config, name), f"config.{name}"
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise InvalidArgument(place, repr(given), "a dict, or None")
        for kind, of_kind in given.items():
            if isinstance(of_kind, Mapping):
                raise Unsupported(
                    f"{place}.{kind} is not supported; all layers must share one rope"
                )
        if given:
            return place, given
    return "config.rope_parameters", {}


def _yarn(config: object, given: Mapping[str, Any], place: str) -> Yarn:
    """Return the yarn that a dict of parameters describes; the caller checks the ranges later."""
    if given.get("truncate", True) is not True:
        raise Unsupported(
            f"{place}.truncate={given['truncate']} is not supported; use True, with which yarn "
            "rounds its range of pairs"
        )
    original = "original_max_position_embeddings"
    factor: Any = given.get("factor")
    trained: Any = _field(config, original)
    if trained is None:
        trained = given.get(original)
    for name, value in (("factor", factor), (original, trained)):
        if value is None:
            raise InvalidArgument(f"{place}.{name}", "none", "a number; yarn requires this field")
    fast, slow = (_number(given, place, name) for name in ("beta_fast", "beta_slow"))
    return Yarn(factor, trained, fast or 32.0, slow or 1.0, *_magnitudes(given, place))


def _magnitudes(given: Mapping[str, Any], place: str) -> tuple[float, float]:
    """Return ``mscale`` and ``mscale_all_dim`` of the rotation of queries and keys."""
    names = ("attention_factor", "mscale", "mscale_all_dim")
    wanted, mscale, of_all_dims = (_number(given, place, name) for name in names)
    if wanted is not None:
        return _mscales_of(wanted, given["factor"], place)
    return (mscale, of_all_dims) if mscale and of_all_dims else (1.0, 0.0)


def _mscales_of(wanted: float, factor: Any, place: str) -> tuple[float, float]:
    """Return ``mscale`` and ``mscale_all_dim`` whose magnitudes have the ratio `wanted`."""
    if wanted == 1:
        return 1.0, 1.0
    if not is_number(factor) or factor <= 1 or wanted <= 0:
        given = f"{place}.attention_factor={wanted} with factor={factor!r}"
        raise Unsupported(f"{given} is not supported; use 1, or a value > 0 with a factor > 1")
    distance = 0.1 * math.log(factor)
    over, under = (wanted - 1) / distance, (1 / wanted - 1) / distance
    return (over, 0.0) if wanted > 1 else (0.0, under)


def _number(given: Mapping[str, Any], place: str, name: str) -> float | None:
    """Return a finite parameter as a float, or ``None`` if it is missing."""
    value = given.get(name)
    if value is None:
        return None
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise InvalidArgument(f"{place}.{name}", repr(value), "a finite number, or no value")
    return float(value)


def _dtype(config: object) -> str | None:
    """Return the dtype name of a config, or ``None``; transformers 4 names it ``torch_dtype``."""
    given = _field(config, "dtype")
    given = _field(config, "torch_dtype") if given is None else given
    return None if given is None else str(given).removeprefix("torch.")
