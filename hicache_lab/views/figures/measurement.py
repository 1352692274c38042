"""Figures of a measured server: where prompts were found, how the pools filled, how long answers took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hicache_lab.serving.load import LoadResult, RequestRecord, ServerSample
from hicache_lab.views.figures.style import BLUE, GREY, ORANGE, PURPLE, SKY, Theme, line_colour, new_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def tiers_figure(result: LoadResult, theme: Theme = "light") -> Figure:
    """Each request's prompt tokens by where they were found, in the order in which the requests were sent."""
    figure = new_figure(
        theme,
        title={"text": "Where prompt tokens were found (measured)"},
        xaxis={"title": {"text": "request, in sending order"}},
        yaxis={"title": {"text": "prompt (tokens)"}},
        barmode="stack",
        bargap=0.1,
    )
    sent = sorted(result.succeeded, key=lambda record: record.index)
    parts = (
        ("device", BLUE, "", [record.cached_device or 0 for record in sent]),
        ("host", ORANGE, "/", [record.cached_host or 0 for record in sent]),
        ("storage", PURPLE, "x", [record.cached_storage or 0 for record in sent]),
        ("computed anew", GREY, ".", [_computed(record) for record in sent]),
    )
    for name, colour, pattern, tokens in parts:
        if any(tokens):
            figure.add_bar(
                x=[record.index for record in sent],
                y=tokens,
                name=name,
                marker={"color": colour, "pattern": {"shape": pattern}},
                customdata=[record.phase for record in sent],
                hovertemplate="%{y:,} tokens %{fullData.name}, phase %{customdata}<extra></extra>",
            )
    return figure


def _computed(record: RequestRecord) -> int:
    """Prompt tokens found nowhere; a tier that was not told counts with the untold total."""
    told = sum(part or 0 for part in (record.cached_device, record.cached_host, record.cached_storage))
    return max((record.prompt_tokens or 0) - max(told, record.cached_tokens or 0), 0)


def pools_figure(
    samples: Sequence[ServerSample], *, host_tokens: int | None, device_tokens: int | None, theme: Theme = "light"
) -> Figure:
    """Tokens in the device and host pool of one rank over time, with the size of each.

    Args:
        samples: the server's gauges; failed scrapes leave a gap.
        host_tokens: size of the host pool, drawn as a limit.
        device_tokens: size of the device pool, drawn as a limit.
        theme: light or dark.
    """
    figure = new_figure(
        theme,
        title={"text": "What the pools of one rank hold (measured)"},
        xaxis={"title": {"text": "time since the start of the load (s)"}},
        yaxis={"title": {"text": "tokens"}, "rangemode": "tozero"},
    )
    times = [sample.at_s for sample in samples]
    device = [
        None if sample.device_used_share is None or device_tokens is None else sample.device_used_share * device_tokens
        for sample in samples
    ]
    figure.add_scatter(x=times, y=[s.host_used_tokens for s in samples], name="on the host", line_color=ORANGE)
    figure.add_scatter(x=times, y=device, name="on the device, in use", line={"color": BLUE, "dash": "dot"})
    for name, size in (("host pool", host_tokens), ("device pool", device_tokens)):
        if size is not None:
            figure.add_hline(
                y=size,
                line={"color": line_colour(theme), "dash": "dash", "width": 1},
                annotation_text=f"{name}: {size:,} tokens",
                annotation_position="top left",
            )
    return figure


def moves_figure(samples: Sequence[ServerSample], theme: Theme = "light") -> Figure:
    """Tokens evicted from the device and loaded back from the host, counted from the start of the load."""
    figure = new_figure(
        theme,
        title={"text": "Evicted and loaded back (measured)"},
        xaxis={"title": {"text": "time since the start of the load (s)"}},
        yaxis={"title": {"text": "tokens since the start"}, "rangemode": "tozero"},
    )
    told = [sample for sample in samples if sample.missing is None]
    for name, field, colour, dash in (
        ("evicted from the device", "evicted_tokens", SKY, "solid"),
        ("loaded back from the host", "loaded_back_tokens", ORANGE, "dash"),
    ):
        values = [getattr(sample, field) or 0 for sample in told]
        first = values[0] if values else 0
        figure.add_scatter(
            x=[sample.at_s for sample in told],
            y=[value - first for value in values],
            name=name,
            line={"color": colour, "dash": dash, "shape": "hv"},
        )
    return figure


def latency_figure(result: LoadResult, theme: Theme = "light") -> Figure:
    """Share of requests whose first token came within a time, by where most of the prompt was found."""
    figure = new_figure(
        theme,
        title={"text": "Time to first token, by where the prompt was found (measured)"},
        xaxis={"title": {"text": "time to first token (ms)"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "share of requests (%)"}, "range": [0, 102]},
    )
    groups: dict[str, list[float]] = {"device": [], "host": [], "computed anew": []}
    for record in result.succeeded:
        if record.ttft_s is not None:
            groups[_mostly(record)].append(1000 * record.ttft_s)
    looks = {"device": (BLUE, "solid"), "host": (ORANGE, "dash"), "computed anew": (GREY, "dot")}
    for name, values in groups.items():
        if values:
            colour, dash = looks[name]
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            figure.add_scatter(
                x=sorted(values),
                y=shares,
                name=f"{name} ({len(values)})",
                mode="lines+markers",
                line={"color": colour, "dash": dash, "shape": "hv"},
            )
    return figure


def _mostly(record: RequestRecord) -> str:
    half = (record.prompt_tokens or 0) / 2
    if (record.cached_host or 0) > half:
        return "host"
    return "device" if (record.cached_device or record.cached_tokens or 0) > half else "computed anew"
