"""The routing figures as one picture: expert use, overlap between kinds of position, entropy, load."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ernie5.backbone.evaluation.routing import RoutingTable


def routing_figure(table: RoutingTable, title: str = "") -> Figure:
    """Three rows of panels: use of each expert by kind; overlap at the first, middle and last layer that ran;
    entropy, experts a token and load by layer."""
    kinds = [number for number, tokens in enumerate(table.tokens) if tokens]
    figure = Figure(figsize=(12, 10), layout="constrained")
    if title:
        figure.suptitle(title)
    panels = np.ravel(np.asarray(figure.subfigures(3, 1, height_ratios=(1.0, 1.1, 0.9)), object))
    _use(panels[0], table, kinds)
    _overlaps(panels[1], table, kinds)
    _by_layer(panels[2], table, kinds)
    return figure


def routing_png(table: RoutingTable, title: str = "") -> bytes:
    """:func:`routing_figure` as PNG."""
    buffer = BytesIO()
    routing_figure(table, title).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _use(figure, table: RoutingTable, kinds: list[int]) -> None:  # type: ignore[no-untyped-def]
    axes = np.atleast_1d(figure.subplots(1, max(len(kinds), 1), sharey=True))
    share = table.share[:, list(table.layers)]
    top = max((float(share[kind].max()) for kind in kinds), default=1.0)
    shown = None
    for axis, kind in zip(axes, kinds):
        shown = axis.imshow(share[kind], aspect="auto", vmin=0, vmax=top, cmap="viridis")
        axis.set_title(f"{table.groups[kind]} ({table.tokens[kind]} tokens)", fontsize=10)
        axis.set_xlabel("expert")
        axis.set_yticks(range(len(table.layers)), [str(layer) for layer in table.layers])
    axes[0].set_ylabel("layer")
    if shown is not None:
        figure.colorbar(shown, ax=list(axes), shrink=0.9, label="share of choices")


def _overlaps(figure, table: RoutingTable, kinds: list[int]) -> None:  # type: ignore[no-untyped-def]
    axes = figure.subplots(1, 3)
    overlap = table.overlap()
    names = [table.groups[kind].replace(" ", "\n") for kind in kinds]
    chosen = (table.layers[0], table.layers[len(table.layers) // 2], table.layers[-1])
    shown = None
    for axis, layer, place in zip(axes, chosen, ("first", "middle", "last")):
        values = overlap[layer][np.ix_(kinds, kinds)]
        shown = axis.imshow(values, vmin=0, vmax=1, cmap="magma")
        for row, column in np.ndindex(*values.shape):
            value = values[row, column]
            axis.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="black" if value > 0.6 else "white",
            )
        axis.set_title(f"top quarter in common, {place} layer ({layer})", fontsize=10)
        axis.set_xticks(range(len(names)), names, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(names)), names, fontsize=8)
    if shown is not None:
        figure.colorbar(shown, ax=list(axes), shrink=0.9, label="intersection over union")


def _by_layer(figure, table: RoutingTable, kinds: list[int]) -> None:  # type: ignore[no-untyped-def]
    entropy, count, load = figure.subplots(1, 3)
    layers = list(table.layers)
    for axis, values, name in (
        (entropy, table.entropy(), "normalised entropy"),
        (count, table.experts_per_token(), "experts a token"),
    ):
        for kind in kinds:
            axis.plot(layers, values[kind, layers], marker="o", markersize=3, label=table.groups[kind])
        _label(axis, name, layers)
    entropy.set_ylim(top=1.02)
    count.set_ylim(bottom=0)
    entropy.legend(fontsize=8)
    load.bar(layers, table.busiest()[layers], color="#2563a8", label="busiest over mean load")
    load.bar(layers, table.dead()[layers], width=0.4, color="#d06a5f", label="dead experts")
    load.margins(y=0.3)
    load.legend(fontsize=8)
    _label(load, "load", layers)


def _label(axis: Axes, name: str, layers: list[int]) -> None:
    axis.set_title(name, fontsize=10)
    axis.set_xlabel("layer")
    axis.set_xticks(layers)
