"""An explanation as one HTML page that needs no other file."""

from __future__ import annotations

import json
from pathlib import Path

from paged_mla_reference.debug.explanation import Explanation
from paged_mla_reference.debug.maps import Maps

TEMPLATE = Path(__file__).with_name("page.html")


def render(explanation: Explanation, maps: Maps) -> str:
    """Return the page."""
    data = {**explanation.as_dict(), "maps": maps.as_dict()}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace('"__EXPLANATION__"', text)
