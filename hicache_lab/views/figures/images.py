"""Figures as files: static images where kaleido finds a browser, HTML otherwise, and which of the two it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import HostError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_RENDER_SECONDS = 120
_WIDTH = 1000


@dataclass(frozen=True)
class WrittenFigures:
    """Files by the figure's name, relative to the folder, and what a reader should know about them (or "")."""

    files: Mapping[str, str]
    note: str

    @property
    def static(self) -> bool:
        """True for images, False for HTML."""
        return not self.note


def browser_path() -> str | None:
    """The browser that kaleido would draw with; None if there is none, or kaleido is not installed."""
    try:
        from choreographer.browsers.chromium import Chromium
    except ImportError:
        return None
    found: str | None = Chromium.find_browser(skip_local=False)
    return found


def write_figures(figures: Mapping[str, Figure], folder: Path, *, suffix: str = "svg") -> WrittenFigures:
    """Write each figure into ``folder``.

    Args:
        figures: name → figure; names become file names.
        folder: an existing folder.
        suffix: svg, png or pdf.

    Raises:
        HostError: the folder cannot be written.
    """
    why = "no browser was found; install chromium for static images"
    try:
        import kaleido
    except ImportError:
        return _as_html(figures, folder, 'kaleido is not installed; pip install "hicache-lab[export]"')
    browser = browser_path()
    if browser is None:
        return _as_html(figures, folder, why)
    files = {name: f"{name}.{suffix}" for name in figures}
    wanted: list[dict[str, Any]] = [
        {"fig": figure, "path": str(folder / files[name]), "opts": {"format": suffix, "width": _WIDTH}}
        for name, figure in figures.items()
    ]
    try:
        # without this kaleido would fetch MathJax from a public server
        options = {"mathjax": False, "timeout": _RENDER_SECONDS}
        failed = kaleido.write_fig_from_object_sync(wanted, kopts=options)
    except (RuntimeError, OSError, TimeoutError) as error:
        return _as_html(figures, folder, f"the browser could not draw them ({error})")
    if failed or not all((folder / file).is_file() for file in files.values()):
        return _as_html(figures, folder, f"the browser could not draw them ({failed or 'no file'})")
    return WrittenFigures(files, "")


def _as_html(figures: Mapping[str, Figure], folder: Path, why: str) -> WrittenFigures:
    files = {name: f"{name}.html" for name in figures}
    try:
        for name, figure in figures.items():
            # one plotly.min.js beside them instead of 4.5 MB in each
            figure.write_html(folder / files[name], include_plotlyjs="directory")
    except OSError as error:
        raise HostError(f"{folder}: figures cannot be written ({error.strerror})") from error
    return WrittenFigures(files, f"figures are HTML, not images: {why}")
