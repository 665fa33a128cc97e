"""The report as one self-contained page."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

from paged_mla_conformance.result import FAILING

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c2330; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { padding: .8rem 1rem; border-left: .4rem solid; background: #f4f6f8; }
.yes { border-color: #1a7f4b; } .no { border-color: #c02b2b; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #dde2e8;
         vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
.passed { color: #1a7f4b; } .failed, .unexpected-pass { color: #c02b2b; font-weight: 600; }
.skipped, .expected-failure { color: #8a6100; }
.bar { display: inline-block; width: 6rem; height: .7rem; background: #e6eaee; }
.bar i { display: block; height: 100%; background: #3a6ea5; }
input { font: inherit; padding: .3rem .5rem; width: 22rem; max-width: 100%; }
"""

_SCRIPT = """
const box = document.getElementById('filter');
box.addEventListener('input', () => {
  const words = box.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelectorAll('#tests tbody tr'))
    row.hidden = !words.every(w => row.textContent.toLowerCase().includes(w));
});
"""


def write(report: dict[str, Any], path: Path) -> None:
    """Render the JSON report to `path`."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace")


def render(report: dict[str, Any]) -> str:
    """Return the page."""
    backend = report["backend"]
    verdict_class = "no" if report["reasons_against"] else "yes"
    title = f"Paged MLA conformance: {backend['name']} {backend['version']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {verdict_class}">{escape(report["verdict"])}</p>',
        _against(report["reasons_against"]),
        _how_to_read(),
        _environment(report),
        _warnings(report["warnings"]),
        _groups(report["results"]),
        _failures(report["results"]),
        _skips(report["results"]),
        _tests(report["results"]),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(parts)}<script>{_SCRIPT}</script></body></html>\n"
    )


def _against(reasons: list[str]) -> str:
    if not reasons:
        return ""
    return "<ul>" + "".join(f"<li>{escape(r)}</li>" for r in reasons) + "</ul>"


def _how_to_read() -> str:
    return (
        "<p>Each test puts one situation to the backend and compares every number with an exact "
        "answer. <b>Error / budget</b> is the worst number found against the error a correct "
        "implementation may make there; below 100% is right, and budgets are derived for each "
        "token, not chosen. Rules (S-1 to S-22) are the specification's.</p>"
    )


def _environment(report: dict[str, Any]) -> str:
    backend = report["backend"]
    rows = {
        "backend": f"{backend['name']} {backend['version']} ({backend['factory']})",
        "mode": f"{backend['mode']} on {backend['device']}",
        "model dims, dtypes": f"{report['dims']}, {', '.join(report['dtypes'])}",
        "profile": report["profile"],
        "suite": f"{report['suite']['version']} at {report['commit']}",
        "date": f"{report['date']}, {report['seconds']:.0f} s",
        "time limit of a test": f"{report['time_limit']:g} s" if report["time_limit"] else "none",
        "tests": ", ".join(f"{n} {what}" for what, n in report["totals"].items() if n),
        **report["environment"],
    }
    body = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows.items())
    return f"<h2>What ran</h2><table>{body}</table>"


def _warnings(warnings: list[dict[str, Any]]) -> str:
    if not warnings:
        return ""
    rows = "".join(
        f"<tr><td class=n>{w['count']}</td><td>{escape(w['message'])}</td>"
        f"<td><code>{escape(w['first'])}</code></td></tr>"
        for w in warnings
    )
    head = "<thead><tr><th class=n>times<th>warning<th>first in</tr></thead>"
    return f"<h2>Warnings of the backend</h2><table>{head}{rows}</table>"


def _groups(results: list[dict[str, Any]]) -> str:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["group"]].append(result)
    rows = []
    for name, members in sorted(groups.items()):
        count = {o: sum(r["outcome"] == o for r in members) for o in ("passed", "skipped")}
        failed = sum(r["outcome"] in FAILING for r in members)
        worst = max((r.get("worst", 0.0) for r in members), default=0.0)
        seconds = sum(r["ms"] for r in members) / 1e3
        rows.append(
            f"<tr><td>{escape(name)}</td><td class=n>{count['passed']}</td>"
            f'<td class="n {"failed" if failed else ""}">{failed}</td>'
            f"<td class=n>{count['skipped']}</td><td class=n>{worst:.0%}</td>"
            f"<td class=n>{seconds:.1f}</td></tr>"
        )
    return (
        "<h2>Groups</h2><table><thead><tr><th>group<th class=n>passed<th class=n>failed"
        "<th class=n>skipped<th class=n>worst error / budget<th class=n>seconds</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _failures(results: list[dict[str, Any]]) -> str:
    failing = [r for r in results if r["outcome"] in FAILING]
    if not failing:
        return ""
    parts = [
        f"<h3><code>{escape(r['test'])}</code></h3><p>{escape(r['why'])} "
        f"({', '.join(r['rules'])}) {escape(r.get('note', ''))}</p>"
        f"<pre>{escape(r.get('message', ''))}</pre>"
        f"<p>Replay: <code>{escape(r['replay'])}</code></p>"
        for r in failing
    ]
    return "<h2>Failures</h2>" + "".join(parts)


def _skips(results: list[dict[str, Any]]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for result in results:
        if result["outcome"] in {"skipped", "expected-failure"}:
            counts[f"{result['outcome']}: {result.get('reason', '')}"] += 1
    if not counts:
        return ""
    rows = "".join(f"<tr><td class=n>{n}</td><td>{escape(r)}</td></tr>" for r, n in counts.items())
    return f"<h2>Not run, or expected to fail</h2><table>{rows}</table>"


def _tests(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        bar = ""
        if "worst" in result:
            width = f"{min(result['worst'], 1.0):.0%}"
            bar = f'<span class=bar><i style="width:{width}"></i></span> {result["worst"]:.0%}'
        note = f"<br>{escape(result['note'])}" if "note" in result else ""
        rows.append(
            f"<tr><td><code>{escape(result['test'])}</code>{note}</td>"
            f'<td class="{result["outcome"]}">{result["outcome"]}</td>'
            f"<td>{bar}</td><td class=n>{result['ms']:.0f}</td></tr>"
        )
    return (
        "<h2>Every test</h2><p><input id=filter placeholder='filter: words that must all appear'>"
        "</p><table id=tests><thead><tr><th>test<th>outcome<th>error / budget"
        f"<th class=n>ms</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
