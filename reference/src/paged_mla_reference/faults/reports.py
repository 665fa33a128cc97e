"""Reports of faults: the short names of projects, and links to their reports."""

from __future__ import annotations

import re

PROJECTS = {
    "1Cat-vLLM": "1CatAI/1Cat-vLLM",
    "1bit-MONSTER": "1bit-MONSTER/1bit-MONSTER",
    "ATOM": "ROCm/ATOM",
    "EAGLE": "SafeAILab/EAGLE",
    "FastDeploy": "PaddlePaddle/FastDeploy",
    "FlagGems": "flagos-ai/FlagGems",
    "FlashMLA": "deepseek-ai/FlashMLA",
    "LMCache": "LMCache/LMCache",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "MoE-Infinity": "EfficientMoE/MoE-Infinity",
    "SharpMind": "Integral2u/SharpMind",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "TinyLLM": "Mikyx-1/TinyLLM",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "aiconfigurator": "ai-dynamo/aiconfigurator",
    "aiter": "ROCm/aiter",
    "atlas": "Avarok-Cybersecurity/atlas",
    "attention-gym": "meta-pytorch/attention-gym",
    "candle": "huggingface/candle",
    "cutlass": "NVIDIA/cutlass",
    "exllamav3": "turboderp-org/exllamav3",
    "flash-attention": "Dao-AILab/flash-attention",
    "flash-linear-attention": "fla-org/flash-linear-attention",
    "flashinfer": "flashinfer-ai/flashinfer",
    "hyprstream": "hyprstream/hyprstream",
    "ik_llama.cpp": "ikawrakow/ik_llama.cpp",
    "imp": "kekzl/imp",
    "kern": "pegainfer-project/kern",
    "ktransformers-sglang": "kvcache-ai/sglang",
    "llama.cpp": "ggml-org/llama.cpp",
    "llguidance": "guidance-ai/llguidance",
    "lmdeploy": "InternLM/lmdeploy",
    "local-inference-lab/b12x": "local-inference-lab/b12x",
    "local-inference-lab/vllm": "local-inference-lab/vllm",
    "lucebox": "Luce-Org/lucebox",
    "maxtext": "AI-Hypercomputer/maxtext",
    "mlx-lm": "ml-explore/mlx-lm",
    "mlxcel": "lablup/mlxcel",
    "mobius": "onnxruntime/mobius",
    "nanochat": "karpathy/nanochat",
    "ollama": "ollama/ollama",
    "omlx": "jundot/omlx",
    "onnxruntime-genai": "microsoft/onnxruntime-genai",
    "paddle-flash-attention": "PaddlePaddle/flash-attention",
    "pegainfer": "pegainfer-project/pegainfer",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pypto-lib": "hw-native-sys/pypto-lib",
    "pytorch": "pytorch/pytorch",
    "qwen38-27b-rtx3090": "syv-ai/qwen38-27b-rtx3090",
    "rMLX": "Pushkinist/rMLX",
    "rtp-llm": "alibaba/rtp-llm",
    "sglang": "sgl-project/sglang",
    "sglang-jax": "sgl-project/sglang-jax",
    "shainet": "NeuraLegion/shainet",
    "sparkinfer": "gittensor-ai-lab/sparkinfer",
    "tokenspeed": "lightseekorg/tokenspeed",
    "torchtitan": "pytorch/torchtitan",
    "tpu-inference": "vllm-project/tpu-inference",
    "transformers": "huggingface/transformers",
    "tt-metal": "tenstorrent/tt-metal",
    "unified-cache-management": "ModelEngine-Group/unified-cache-management",
    "vllm": "vllm-project/vllm",
    "vllm-FlashMLA": "vllm-project/FlashMLA",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "vllm-deepseek-v4-sm89": "yhfgyyf/vllm-deepseek-v4-sm89",
    "vllm-flash-attention": "vllm-project/flash-attention",
    "vllm-tt-plugin": "tenstorrent/vllm-tt-plugin",
    "xllm": "xLLM-AI/xllm",
}
"""The GitHub repository of each project that a fault cites, by its short name."""

_NUMBER = re.compile(r"(?P<project>[\w./-]+)#(?P<number>[1-9]\d*)")
_PLACE = re.compile(r"(?P<project>[\w./-]+)@(?P<place>[\w-]+)")
_COMMIT = re.compile(r"[0-9a-f]{6,40}")


def link(citation: str) -> str:
    """Return the URL of a citation.

    Parameters
    ----------
    citation : str
        ``project#number`` for an issue or a pull request, which share one numbering;
        ``project@commit``; or ``project@word``, a search for that word in the project.

    Raises
    ------
    ValueError
        The citation has another form, or its project is not in :data:`PROJECTS`.
    """
    found = _NUMBER.fullmatch(citation) or _PLACE.fullmatch(citation)
    if found is None or found["project"] not in PROJECTS:
        raise ValueError(
            f"citation {citation!r} does not name a project of PROJECTS; write project#number, "
            "project@commit or project@word"
        )
    repository = f"https://github.com/{PROJECTS[found['project']]}"
    if "#" in citation:
        return f"{repository}/issues/{found['number']}"
    if _COMMIT.fullmatch(found["place"]):
        return f"{repository}/commit/{found['place']}"
    return f"{repository}/search?q={found['place']}"
