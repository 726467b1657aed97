"""An explanation as an HTML page: one file, no scripts, no downloads; all text of model and prompt is escaped."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping, Sequence

from pypcd.explain.steps import Candidate, Step, strength_of

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #111; --paper: #fff; --line: #bbb; --soft: #f0f0f0;
  --l: #555; --over: #D55E00; --pcd: #0072B2; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --paper: #161616; --line: #555; --soft: #262626;
  --l: #aaa; --over: #E69F00; --pcd: #56B4E9; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.45 system-ui, sans-serif; max-width: 60em;
  margin: 1.5em auto; padding: 0 1em; }
code, pre, .token { font-family: ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6em; max-height: 16em;
  overflow: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; }
dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; table-layout: fixed; width: 100%; margin: .3em 0 1.6em; }
th:first-child { width: 2.2em; }
th:last-child { width: 7em; }
th, td { text-align: left; padding: .15em .5em; border-bottom: 1px solid var(--line); vertical-align: middle; }
td.token { overflow-wrap: anywhere; max-width: 14em; }
tr.chosen { background: var(--soft); font-weight: bold; }
.bar { display: inline-block; height: .7em; margin-right: .4em; }
.l { background: var(--l); }
.over { background: repeating-linear-gradient(90deg, var(--over) 0 3px, transparent 3px 5px); }
.pcd { background: var(--pcd); }
a { color: inherit; text-decoration: none; }
a.changed { text-decoration: underline 2px; }
h2 { font-size: 1em; margin: 0; }
"""

_LEGEND = (
    "L: the model's own probabilities. L*: those of the local-aware evaluation. PCD: after the contrast. "
    "&#9654; the token that was written"
)
_GOLD = "; &#9733; on the way to the right answer"
_CHANGED = "; underlined: plain decoding would have written another token"

_BAR = 7.0  # em, for a probability of 1


def page(facts: Mapping[str, str], prompt: str, steps: Sequence[Step], *, with_strength: bool = False) -> str:
    """The page as HTML.

    Args:
        facts: names and values shown at the top.
        prompt: the prompt's text.
        with_strength: whether each token says how strong its contrast was; those below min_context or min_entropy do anyhow.
    """
    shown = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    answer = " ".join(
        f'<a href="#t{step.index}" class="token{" changed" if step.is_changed else ""}">{_text(step.text)}</a>'
        for step in steps
    )
    sections = "".join(_step(step, with_strength) for step in steps)
    has_gold = any(c.is_gold for step in steps for c in step.candidates)
    legend = _LEGEND + _GOLD * has_gold + _CHANGED * any(step.is_changed for step in steps) + "."
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # no script runs and nothing is downloaded, whatever the prompt contains
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>pypcd explain</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>How this answer came to be</h1>\n<dl>{shown}</dl>\n<pre>{_text(prompt)}</pre>\n"
        f"<p>{answer}</p>\n<p>{legend}</p>\n{sections}</body>\n</html>\n"
    )


def _step(step: Step, with_strength: bool) -> str:
    plain = min(step.candidates, key=lambda c: c.rank_before)
    note = f"; plain decoding would write <code>{_text(plain.text)}</code>" if step.is_changed else ""
    note += f"; {strength_of(step)}" if with_strength or step.below else ""
    without = "&#8211;" if step.below else "not needed"
    rows = "".join(_candidate(c, without) for c in step.candidates)
    return (
        f'<section id="t{step.index}">\n<h2>Token {step.index + 1}: <code>{_text(step.text)}</code>{note}</h2>\n'
        "<table><thead><tr><th></th><th>token</th><th>L</th><th>L*</th><th>PCD</th><th>rank</th></tr></thead>\n"
        f"<tbody>{rows}</tbody></table>\n</section>\n"
    )


def _candidate(c: Candidate, without: str) -> str:
    """`without` stands where L* was not evaluated."""
    marks = "&#9654;" * c.is_chosen + "&#9733;" * c.is_gold
    kinds = " ".join(name for name, on in (("chosen", c.is_chosen), ("gold", c.is_gold)) if on)
    after = _bar("pcd", c.after) if c.rank_after is not None else "excluded"
    over = _bar("over", c.local) if c.local is not None else without
    rank = f"{c.rank_before} &#8594; {c.rank_after if c.rank_after is not None else '&#8211;'}"
    return (
        f'<tr class="{kinds}"><td>{marks}</td><td class="token">{_text(c.text)}</td><td>{_bar("l", c.before)}</td>'
        f"<td>{over}</td><td>{after}</td><td>{rank}</td></tr>\n"
    )


def _bar(kind: str, p: float) -> str:
    return f'<span class="bar {kind}" style="width:{_BAR * p:.2f}em"></span>{100 * p:.1f}%'


def _text(text: str) -> str:
    """Escaped, and without control codes and characters that change the direction of text."""
    kept = (c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else "\ufffd" for c in text)
    return html.escape("".join(kept))
