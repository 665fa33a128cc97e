"""Where a deviation was reported: short names of projects, and links."""

from __future__ import annotations

import re

PROJECTS = {
    "1Cat-vLLM": "1CatAI/1Cat-vLLM",
    "FastDeploy": "PaddlePaddle/FastDeploy",
    "FlashMLA": "deepseek-ai/FlashMLA",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "aiconfigurator": "ai-dynamo/aiconfigurator",
    "aiter": "ROCm/aiter",
    "atlas": "Avarok-Cybersecurity/atlas",
    "cutlass": "NVIDIA/cutlass",
    "flash-attention": "Dao-AILab/flash-attention",
    "flashinfer": "flashinfer-ai/flashinfer",
    "ik_llama.cpp": "ikawrakow/ik_llama.cpp",
    "imp": "kekzl/imp",
    "local-inference-lab/vllm": "local-inference-lab/vllm",
    "maxtext": "AI-Hypercomputer/maxtext",
    "mlxcel": "lablup/mlxcel",
    "mobius": "onnxruntime/mobius",
    "ollama": "ollama/ollama",
    "pegainfer": "pegainfer-project/pegainfer",
    "rtp-llm": "alibaba/rtp-llm",
    "sglang": "sgl-project/sglang",
    "tokenspeed": "lightseekorg/tokenspeed",
    "torchtitan": "pytorch/torchtitan",
    "tpu-inference": "vllm-project/tpu-inference",
    "transformers": "huggingface/transformers",
    "unified-cache-management": "ModelEngine-Group/unified-cache-management",
    "vllm": "vllm-project/vllm",
    "vllm-FlashMLA": "vllm-project/FlashMLA",
    "vllm-tt-plugin": "tenstorrent/vllm-tt-plugin",
    "xllm": "xLLM-AI/xllm",
}
"""GitHub repository of each project that a deviation cites."""

_NUMBER = re.compile(r"(?P<project>[\w./-]+)#(?P<number>[1-9]\d*)")
_PLACE = re.compile(r"(?P<project>[\w./-]+)@(?P<place>[\w-]+)")
_COMMIT = re.compile(r"[0-9a-f]{6,40}")


def link(citation: str) -> str:
    """Return where a citation leads.

    Parameters
    ----------
    citation : str
        ``project#number``, an issue or a pull request, which share their numbers;
        ``project@commit``; or ``project@word``, something found by that word in the project.

    Raises
    ------
    ValueError
        It has another form, or its project is none of :data:`PROJECTS`.
    """
    found = _NUMBER.fullmatch(citation) or _PLACE.fullmatch(citation)
    if found is None or found["project"] not in PROJECTS:
        raise ValueError(f"no citation of a known project: {citation!r}")
    repository = f"https://github.com/{PROJECTS[found['project']]}"
    if "#" in citation:
        return f"{repository}/issues/{found['number']}"
    if _COMMIT.fullmatch(found["place"]):
        return f"{repository}/commit/{found['place']}"
    return f"{repository}/search?q={found['place']}"
