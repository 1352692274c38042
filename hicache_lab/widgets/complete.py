"""A FigureWidget that reaches the browser complete.

plotly opens a widget's channel first, empty, and sends its traces in a second message; on a busy machine the view can
be drawn between the two and stays empty. Here the channel opens when the traces are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def complete_figure_widget(figure: Figure) -> Any:
    """A ``plotly.graph_objects.FigureWidget`` of a complete figure.

    Args:
        figure: the figure with all its traces; traces added to a widget later stay invisible in the browser.
    """
    import plotly.graph_objects as go

    class CompleteFigureWidget(go.FigureWidget):  # type: ignore[misc]
        _is_complete = False

        def __init__(self, figure: Figure) -> None:
            super().__init__(figure)
            self._is_complete = True
            self.open()

        def open(self) -> None:
            # called by the base class in the middle of construction too
            if self._is_complete:
                super().open()

    return CompleteFigureWidget(figure)
