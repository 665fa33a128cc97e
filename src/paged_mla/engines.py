"""Serving engines on this machine: their versions, this package's plugin, and the option for it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata

from paged_mla.requirements import installed_version

_HOME = "paged_mla_optimized.engines"


@dataclass(frozen=True)
class Engine:
    """One engine that can run these kernels.

    Parameters
    ----------
    name : str
        As it spells itself.
    package : str
        What is installed, and the extra that brings it.
    group : str
        Of the entry points that it loads plugins from; "" if it loads none.
    choice : str
        What selects this package's attention; {} stands for its name there.
    """

    name: str
    package: str
    group: str
    choice: str

    @property
    def is_registered(self) -> bool:
        """Whether the engine finds this package among its plugins."""
        return bool(metadata.entry_points(group=self.group, name="paged_mla"))

    def selected_by(self) -> str | None:
        """Return what selects this package's attention; ``None`` without torch."""
        if not self.group:
            return self.choice
        if installed_version("torch") is None:
            return None
        registration = importlib.import_module(f"{_HOME}.{self.package}.registration")
        release = installed_version(self.package)
        if self.package == "vllm" and release is not None:
            return self.choice.format(registration.name_of_release(release))
        return self.choice.format(registration.NAME)


ENGINES = (
    Engine("vLLM", "vllm", "vllm.general_plugins", "vllm serve MODEL --attention-backend {}"),
    Engine(
        "SGLang",
        "sglang",
        "sglang.srt.plugins",
        "python -m sglang.launch_server --model-path MODEL --attention-backend {} --page-size 64",
    ),
    Engine(
        "transformers",
        "transformers",
        "",
        "import paged_mla_optimized.engines.transformers, then "
        'model.set_attn_implementation("paged_mla")',
    ),
)
