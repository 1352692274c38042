"""Colours and layout that all figures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Theme = Literal["light", "dark"]

# Okabe and Ito's set: told apart with every common form of colour blindness, and in grey by lightness
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#8C8C8C"
POOL_COLOURS = (BLUE, SKY, GREEN, YELLOW, PURPLE, ORANGE)
VERDICT_COLOURS: Mapping[str, str] = {
    "FITS": GREEN,
    "TIGHT": ORANGE,
    "RACE": PURPLE,
    "REFUSED": BLUE,
    "ASSERT": SKY,
    "OOM_RISK": RED,
    "UNKNOWN": GREY,
}


def faint(colour: str, opacity: float = 0.28) -> str:
    """A colour that lets what lies below it through."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def paper_colour(theme: Theme) -> str:
    """The background of this theme's template."""
    return "#FFFFFF" if theme == "light" else "#111111"


def line_colour(theme: Theme) -> str:
    """The colour of limits and marks on this background."""
    return "#1A1A1A" if theme == "light" else "#F2F2F2"


def layout(theme: Theme, **more: Any) -> dict[str, Any]:
    """A layout with the theme's template, legend above the plot and room for titles."""
    return {
        "template": "plotly_white" if theme == "light" else "plotly_dark",
        "margin": {"l": 70, "r": 30, "t": 80, "b": 60},
        "height": 420,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "hovermode": "closest",
        **more,
    }


def new_figure(theme: Theme, **more: Any) -> Figure:
    """An empty figure with the shared layout."""
    import plotly.graph_objects as go

    return go.Figure(layout=layout(theme, **more))
