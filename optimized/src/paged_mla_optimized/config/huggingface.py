"""What a model's config, as the transformers library has it, says of the model's attention."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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
"""The models of dense MLA, by ``model_type``; where it is ``None``, ``rope_interleave`` says it."""

_MOST = 2**31 - 1  # heads or elements, which is far past what any model has
_YARN_TYPES = ("yarn", "deepseek_yarn")
_OTHER_ATTENTION = {
    "index_topk": "sparse attention",
    "sliding_window": "attention in a window",
}


@dataclass(frozen=True, kw_only=True)
class HfAttention:
    """The attention of one layer of a model, all heads of it.

    Parameters
    ----------
    dims : MlaDims
    softmax_scale : float
        ``(N + P) ** -0.5``, times the squared mscale of the model's yarn (S-5).
    rope : Rope
        What the model does to ``q_pe`` and ``k_pe`` (S-12).
    dtype : str
        As the config names it; "bfloat16" if it names none.
    max_position_embeddings : int or None
    """

    dims: MlaDims
    softmax_scale: float
    rope: Rope
    dtype: str
    max_position_embeddings: int | None


def attention_of(config: object) -> HfAttention:
    """Return what a model's config says of its attention.

    Parameters
    ----------
    config : PretrainedConfig, or dict
        With the fields of DeepSeek-V3's ``config.json``: as attributes, as releases 4 and 5 of
        transformers have them, or as keys. Of a model with more than text its ``text_config`` is
        read. Without a ``model_type`` it is taken for DeepSeek-V3's.

    Raises
    ------
    InvalidArgument
        A field is missing or wrong; the error names it.
    Unsupported
        Another attention than dense MLA, or a rotation that no :class:`Rope` describes.

    Notes
    -----
    As in transformers 5.24, yarn whose ``mscale`` or ``mscale_all_dim`` is 0 or missing has the
    magnitude of ``mscale`` 1 over that of 0. DeepSeek-V2's scale has its mscale, as in DeepSeek's
    own code and release 5.24; release 4.57.1 leaves it out. What a model does to its queries and
    latents between projection and rotation is not in here: the scale of Mistral Small 4's queries
    at far positions, and those of LongCat's low ranks.
    """
    if config is None or isinstance(config, (str, PathLike)):
        allowed = "a config of the transformers library, or config.json as a dict"
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
    """Return a field of a config, `default` if it has none of that name."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _integer(config: object, name: str) -> int:
    """Return a field that is an integer above 0."""
    value = _field(config, name)
    if value is None:
        raise InvalidArgument(f"config.{name}", "none", "an integer >= 1, which MLA has")
    check_between(1, _MOST, **{f"config.{name}": value})
    return int(value)


def _pairing(config: object) -> RopePairing:
    """Return what a model's rotation pairs, once its attention is known to be dense MLA."""
    kind = _field(config, "model_type")
    if _field(config, "kv_lora_rank") is None:
        raise Unsupported(f"config.kv_lora_rank is missing: model_type {kind!r} is no MLA")
    if not isinstance(kind, str | None):
        raise InvalidArgument("config.model_type", repr(kind), "a name of a model, or none")
    if kind is not None and kind not in _PAIRINGS:
        known = ", ".join(_PAIRINGS)
        raise Unsupported(f"config.model_type {kind!r}: known are those of dense MLA, {known}")
    for name, what in _OTHER_ATTENTION.items():
        if _field(config, name) is not None:
            raise Unsupported(f"config.{name} {_field(config, name)}: {what} is not served")
    of_all = _PAIRINGS[kind or "deepseek_v3"]
    if of_all is not None:
        return of_all
    interleaved = _field(config, "rope_interleave", default=True)
    if not isinstance(interleaved, bool):
        raise InvalidArgument("config.rope_interleave", repr(interleaved), "True or False")
    return RopePairing.INTERLEAVED if interleaved else RopePairing.NEOX


def _rotation(config: object, dims: MlaDims, pairing: RopePairing) -> tuple[Rope, float]:
    """Return a model's rotation, and the magnitude whose square multiplies the softmax scale."""
    place, given = _rope_parameters(config)
    theta = given.get("rope_theta")
    theta = _field(config, "rope_theta") if theta is None else theta
    if theta is None:
        raise InvalidArgument("config.rope_theta", "none", f"a number >= 1, there or in {place}")
    part, of_part = given.get("partial_rotary_factor"), place
    if part is None:  # transformers 5.24 moves it from here to the dict (`modeling_rope_utils.py`)
        part, of_part = _field(config, "partial_rotary_factor"), "config"
    whole = dims.qk_rope_head_dim / (dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    if part is not None and not (is_number(part) and part in {1, whole}):
        raise Unsupported(f"{of_part}.partial_rotary_factor {part}: all of qk_rope_head_dim rotate")
    name = "rope_type" if "rope_type" in given else "type"
    kind = given.get(name)
    if kind is None and "factor" in given:
        raise InvalidArgument(f"{place}.{name}", "none", "'yarn' or 'default', beside a factor")
    if not isinstance(kind, str | None):
        raise InvalidArgument(f"{place}.{name}", repr(kind), "'yarn' or 'default'")
    if kind in {None, "default"}:
        return legal_rope(Rope(pairing, theta)), 1.0
    if kind not in _YARN_TYPES:
        raise Unsupported(f"{place}.{name} {kind!r}: known are 'default', 'yarn', 'deepseek_yarn'")
    rope = legal_rope(Rope(pairing, theta, _yarn(config, given, place)))
    of_all_dims = _number(given, place, "mscale_all_dim") or 0.0
    return rope, yarn_mscale(given["factor"], of_all_dims)


def _rope_parameters(config: object) -> tuple[str, Mapping[str, Any]]:
    """Return the dict of rope parameters, and where it stands.

    Of two such dicts ``rope_scaling`` counts, as in ``RotaryEmbeddingConfigMixin`` of transformers
    5.24.
    """
    for name in ("rope_scaling", "rope_parameters"):
        given, place = _field(config, name), f"config.{name}"
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise InvalidArgument(place, repr(given), "a dict, or None")
        for kind, of_kind in given.items():
            if isinstance(of_kind, Mapping):
                raise Unsupported(f"{place}.{kind}: known is one rope for all layers")
        if given:
            return place, given
    return "config.rope_parameters", {}


def _yarn(config: object, given: Mapping[str, Any], place: str) -> Yarn:
    """Return the yarn of a dict of its parameters; their ranges are looked at later."""
    if given.get("truncate", True) is not True:
        raise Unsupported(f"{place}.truncate {given['truncate']}: yarn rounds its range of pairs")
    original = "original_max_position_embeddings"
    factor: Any = given.get("factor")
    trained: Any = _field(config, original)
    if trained is None:
        trained = given.get(original)
    for name, value in (("factor", factor), (original, trained)):
        if value is None:
            raise InvalidArgument(f"{place}.{name}", "none", "a number, which yarn needs")
    fast, slow = (_number(given, place, name) for name in ("beta_fast", "beta_slow"))
    return Yarn(factor, trained, fast or 32.0, slow or 1.0, *_magnitudes(given, place))


def _magnitudes(given: Mapping[str, Any], place: str) -> tuple[float, float]:
    """Return ``mscale`` and ``mscale_all_dim`` of the rotation itself."""
    names = ("attention_factor", "mscale", "mscale_all_dim")
    wanted, mscale, of_all_dims = (_number(given, place, name) for name in names)
    if wanted is not None:
        return _mscales_of(wanted, given["factor"], place)
    return (mscale, of_all_dims) if mscale and of_all_dims else (1.0, 0.0)


def _mscales_of(wanted: float, factor: Any, place: str) -> tuple[float, float]:
    """Return two mscales whose magnitudes have a given ratio."""
    if wanted == 1:
        return 1.0, 1.0
    if not is_number(factor) or factor <= 1 or wanted <= 0:
        given = f"{place}.attention_factor {wanted} with factor {factor!r}"
        raise Unsupported(f"{given}: only 1, or one > 0 with a factor > 1")
    distance = 0.1 * math.log(factor)
    over, under = (wanted - 1) / distance, (1 / wanted - 1) / distance
    return (over, 0.0) if wanted > 1 else (0.0, under)


def _number(given: Mapping[str, Any], place: str, name: str) -> float | None:
    """Return a parameter that may be missing."""
    value = given.get(name)
    if value is None:
        return None
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise InvalidArgument(f"{place}.{name}", repr(value), "a finite number, or none")
    return float(value)


def _dtype(config: object) -> str | None:
    """Return the name of a config's dtype, which release 4 calls ``torch_dtype``."""
    given = _field(config, "dtype")
    given = _field(config, "torch_dtype") if given is None else given
    return None if given is None else str(given).removeprefix("torch.")
