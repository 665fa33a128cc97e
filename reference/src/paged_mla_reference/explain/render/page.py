"""Render an explanation as one HTML page that needs no other file."""

from __future__ import annotations

from pathlib import Path

from paged_mla_reference.explain.explanation import Explanation
from paged_mla_reference.explain.render.maps import Maps
from paged_mla_shared.documents import in_script

TEMPLATE = Path(__file__).with_name("page.html")


def render(explanation: Explanation, maps: Maps) -> str:
    """Return the page as HTML."""
    data = {**explanation.as_dict(), "maps": maps.as_dict()}
    return TEMPLATE.read_text().replace('"__EXPLANATION__"', in_script(data))
