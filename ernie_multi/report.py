"""The demo's report: one HTML page with everything in it, pictures and sounds included."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ernie_multi.demo_tasks import Example

_TITLES = {
    "digit_read": "Reading handwritten digits",
    "speech_hear": "Transcribing spoken digits of voices not heard in training",
    "emoji_name_en": "Naming emoji in English, in a drawing style not seen for them",
    "emoji_name_zh": "Naming emoji in Chinese",
    "digit_draw": "Drawing digits from words",
    "speech_say": "Speaking digits from words",
    "predict": "Text, picture and sound in one question",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d232b; margin: 2rem auto; max-width: 62rem }
h1 { margin-bottom: .2rem } h2 { margin-top: 2.2rem; border-bottom: 1px solid #d8dee6 }
table { border-collapse: collapse }
td, th { padding: .3rem .8rem; text-align: left; border-bottom: 1px solid #e6eaf0 }
.cards { display: flex; flex-wrap: wrap; gap: .7rem }
.card { border: 1px solid #d8dee6; border-radius: 8px; padding: .6rem; min-width: 6.5rem; max-width: 17rem }
.card img { image-rendering: pixelated; width: 96px; background: #fff } .card audio { width: 14rem }
.good { border-color: #58a55c } .bad { border-color: #d06a5f }
.said { font-weight: 600 } small { color: #5a6573 }
figure { margin: 1rem 0 } figure img { max-width: 100% }
"""


def write_report(
    path: Path,
    *,
    metrics: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Any],
    examples: Sequence[Example],
    expert_use: Mapping[str, np.ndarray],
    facts: Mapping[str, str],
) -> None:
    """Write the page.

    Args:
        metrics: the trainer's reports, one a step.
        figures: held-out figures, as in ``figures.json``.
        examples: questions and answers.
        expert_use: kind of position to the share of tokens each expert got, float ``[layers, experts]``.
        facts: rows of the table at the top.
    """
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>ernie-multi demo</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>ernie-multi demo</h1>")
    parts.append("<p>One model, trained from scratch in this run, asked on input it has not seen.</p>")
    parts.append(_table(("", ""), facts.items()))
    parts.append("<h2>Held-out figures</h2>" + _figures_table(figures))
    parts.append("<h2>Training</h2>" + _image(loss_curve(metrics), "loss by modality"))
    for task, title in _TITLES.items():
        chosen = [example for example in examples if example.task == task]
        if chosen:
            cards = "".join(_card(example) for example in chosen)
            parts.append(f"<h2>{html.escape(title)}</h2><div class=cards>{cards}</div>")
    parts.append("<h2>Which experts work on what</h2>" + _image(expert_heat_map(expert_use), "expert use"))
    parts.append("<p>Each row is a layer, each column an expert; the shade is its share of the choices.</p>")
    parts.append(f"<h2>figures.json</h2><pre>{html.escape(json.dumps(figures, indent=1))}</pre></html>")
    path.write_text("\n".join(parts), encoding="utf-8")


def loss_curve(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """Loss of each modality over steps, as PNG."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (name, unit) in zip(
        axes, (("text", "nats a token"), ("vision", "nats a bit"), ("audio", "nats a code"))
    ):
        points = [(row["step"], row["losses"][name]) for row in metrics if name in row["losses"]]
        if points:
            steps, losses = np.array(points).T
            axis.plot(steps, losses, color="#b8c4d4", linewidth=0.8)
            window = max(1, len(losses) // 40)
            smooth = np.convolve(losses, np.ones(window) / window, "valid")
            axis.plot(steps[window - 1 :], smooth, color="#2563a8")
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.set_ylabel(unit)
    return _png(figure)


def expert_heat_map(use: Mapping[str, np.ndarray]) -> bytes:
    """Share of each expert by layer, one panel for each kind of position, as PNG."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, max(len(use), 1)))
    top = max((float(share.max()) for share in use.values()), default=1.0)
    for axis, (name, share) in zip(axes, use.items()):
        shown = axis.imshow(share, aspect="auto", vmin=0, vmax=top, cmap="viridis")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("expert")
        axis.set_ylabel("layer")
    if use:
        figure.colorbar(shown, ax=list(axes), shrink=0.8)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _image(data: bytes, alt: str) -> str:
    encoded = base64.b64encode(data).decode()
    return f"<figure><img alt='{html.escape(alt)}' src='data:image/png;base64,{encoded}'></figure>"


def _table(head: tuple[str, ...], rows: Any) -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head) if any(head) else ""
    return f"<table>{'<tr>' + titles + '</tr>' if titles else ''}{cells}</table>"


def _figures_table(figures: Mapping[str, Any]) -> str:
    rows = []
    for name in [key.removesuffix("_n") for key in figures if key.endswith("_n")]:
        judge = figures.get(f"{name}_judge")
        judged = "" if judge is None else f"{judge:.1%}"
        rows.append(
            (name, f"{figures[name]:.1%}", figures[f"{name}_n"], judged, figures.get(f"{name}_source", ""))
        )
    return _table(("figure", "correct", "questions", "judge on decoded real items", "what was asked"), rows)


def _card(example: Example) -> str:
    state = "" if example.correct is None else (" good" if example.correct else " bad")
    inputs = "".join(_medium(kind, data) for kind, data in example.inputs.items())
    outputs = "".join(_medium(kind, data) for kind, data in example.outputs.items())
    said = f"<div class=said>{html.escape(example.text)}</div>" if example.text else ""
    expected = f"<small>expected: {html.escape(example.expected)}</small>" if example.expected else ""
    question = f"<small>{html.escape(example.question)}</small><br>"
    return f"<div class='card{state}'>{question}{inputs}{said}{outputs}{expected}</div>"


def _medium(kind: str, data: bytes) -> str:
    if not data:
        return "<em>nothing</em>"
    encoded = base64.b64encode(data).decode()
    if kind == "image":
        sub = "jpeg" if data.startswith(b"\xff\xd8") else "webp" if data[8:12] == b"WEBP" else "png"
        return f"<img alt='' src='data:image/{sub};base64,{encoded}'>"
    sub = "ogg" if data.startswith(b"OggS") else "wav"
    return f"<br><audio controls src='data:audio/{sub};base64,{encoded}'></audio>"
