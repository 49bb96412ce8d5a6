"""Parts of HTML files that need no network and run no code but their own, and tables and curves for notebooks."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]


def security_policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """A content security policy that admits only elements with exactly these texts, and no network requests."""
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hashes(styles)}; script-src {_hashes(scripts)}"
    )


def _hashes(texts: Iterable[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def encode_json(values: Any) -> str:
    """JSON for a script element: without `<`, which could end the element, `>`, `&` and characters beyond ASCII.

    Raises ValueError for NaN and infinities.
    """
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def html_table(rows: Mapping[str, str]) -> str:
    """A table with a row for each name and its value."""
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items())
    return f'<table style="text-align: left">{"".join(cells)}</table>'


WIDTH, HEIGHT, MARGIN = 560, 240, 52  # of a plot, in pixels; the margin has the numbers of the axes
FEW = 20  # points, which are marked
COLORS = ("#b0b0b0", "#1f77b4", "#d62728")


def svg_plot(lines: Mapping[str, Points], title: str, top: float | None = None) -> str:
    """Lines over a common x axis as an SVG image, with their names; "" without points. Text has the color around it.

    top: the largest y that is drawn; default: that of the points
    """
    shown = {name: [p for p in points if top is None or p[1] <= top] for name, points in lines.items()}
    xs, ys = ([point[axis] for points in shown.values() for point in points] for axis in (0, 1))
    if not xs:
        return ""
    (left, right), (low, high) = ((min(values), max(values)) for values in (xs, ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN / 2 - up * (HEIGHT - MARGIN)

    parts = []
    for index, (name, points) in enumerate(shown.items()):
        color, line = COLORS[index % len(COLORS)], MARGIN / 2 + 14 * (index + 1)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) < FEW:
            dots = (place(*point) for point in points)
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in dots]
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{line}" text-anchor="end" fill="{color}">{html.escape(name)}</text>'
        )
    for text, x, y, anchor in (
        (title, MARGIN, 14, "start"),
        (f"{high:.4g}", MARGIN - 6, MARGIN / 2 + 10, "end"),
        (f"{low:.4g}", MARGIN - 6, HEIGHT - MARGIN / 2, "end"),
        (f"{left:,.6g}", MARGIN, HEIGHT - 8, "middle"),
        (f"{right:,.6g}", WIDTH - MARGIN, HEIGHT - 8, "middle"),
    ):
        parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{html.escape(text)}</text>')
    frame = f'<rect x="{MARGIN}" y="{MARGIN / 2}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT - MARGIN}"'
    box = f'{frame} fill="none" stroke="currentColor" stroke-opacity="0.3"/>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = 'style="max-width: 100%; font: 12px sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{box}{"".join(parts)}</svg>'
