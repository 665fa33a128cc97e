"""Serving engines: whether they find this package's plugin, and the option that selects it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata

from paged_mla.requirements import installed_version

_HOME = "paged_mla_optimized.engines"


@dataclass(frozen=True)
class Engine:
    """A serving engine that can run these kernels.

    Parameters
    ----------
    name : str
        The name as the engine spells it.
    package : str
        The import name of the package, which is also the name of the extra that installs it.
    group : str
        The group of entry points from which the engine loads plugins; "" if it loads none.
    choice : str
        The command or code that selects this package's attention, with {} for the backend's name.
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
        """Return the command or code that selects this package's attention.

        Returns
        -------
        str or None
            ``None`` if the engine loads plugins and torch is not installed.
        """
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
