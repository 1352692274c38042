"""An executed notebook as one HTML file that opens offline: one copy of plotly.js, nothing fetched.

nbconvert's own page loads require.js, MathJax, mermaid and the widget manager from public servers; this
template leaves them out. Controls need a kernel, so a line says where they work; a static figure stands
before each of them.
"""

from __future__ import annotations

import copy
from typing import Any

_PLOTLY = "application/vnd.plotly.v1+json"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NO_KERNEL = "<p><em>Interactive controls: open this notebook in JupyterLab and run it.</em></p>"
_TEMPLATE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{{ resources.plotly_script }}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""


def notebook_html(notebook: Any, title: str) -> str:
    """Render an executed notebook.

    Args:
        notebook: an nbformat notebook node; it is not changed.
        title: the page's title, escaped by the template.

    Returns:
        The whole page; with at least one plotly figure it holds plotly.js (about 4.5 MB) once.
    """
    from nbconvert import HTMLExporter

    page = copy.deepcopy(notebook)
    page.metadata.pop("widgets", None)
    page.metadata["title"] = title
    figures = 0
    for cell in page.cells:
        for output in cell.get("outputs", []):
            figures += _render_output(output)
    # a named template inside a DictLoader would lose nbconvert's own folders; a raw template keeps them
    exporter = HTMLExporter(raw_template=_TEMPLATE)  # type: ignore[no-untyped-call]
    script = ""
    if figures:
        from plotly.offline import get_plotlyjs

        script = f'<script type="text/javascript">{get_plotlyjs()}</script>'
    body, _ = exporter.from_notebook_node(page, resources={"plotly_script": script})
    return str(body)


def _render_output(output: Any) -> int:
    """Put HTML in place of what needs a front end; returns the number of plotly figures found (0 or 1)."""
    data = output.get("data", {})
    if _PLOTLY in data:
        from plotly.io import to_html

        figure = data[_PLOTLY]
        output["data"] = {
            "text/html": to_html(
                {"data": figure.get("data", []), "layout": figure.get("layout", {})},
                config=figure.get("config"),
                include_plotlyjs=False,
                full_html=False,
                validate=False,
            )
        }
        return 1
    if _WIDGET in data:
        output["data"] = {"text/html": _NO_KERNEL}
    return 0
