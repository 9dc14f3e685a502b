"""Draws docs/pictures/overview.svg: what `make demo` runs. Standard library only.

python docs/pictures/overview.py
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1000, 468
STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; }
  .strong { font-weight: 600; }
  .frame { fill: none; stroke: #d1d9e0; stroke-width: 1.5; stroke-dasharray: 5 4; }
  .box { fill: #ffffff; stroke: #818b98; stroke-width: 1.25; }
  .text { fill: #fff3d6; stroke: #b58407; }
  .audio { fill: #dff5e3; stroke: #2c8a43; }
  .vision { fill: #e0ecfd; stroke: #2f6fc4; }
  .redis { fill: #fbe3e0; stroke: #b3392b; }
  .model { fill: #ece6fb; stroke: #6f4fc0; }
  .gateway { fill: #e6eaef; stroke: #59636e; }
  .arrow { fill: none; stroke: #59636e; stroke-width: 1.5; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; } .frame { stroke: #3d444d; }
    .box { fill: #151b23; stroke: #656c76; }
    .text { fill: #3a2d0c; stroke: #c69026; } .audio { fill: #12301b; stroke: #46954a; }
    .vision { fill: #122a4a; stroke: #539bf5; } .redis { fill: #3d1714; stroke: #e5534b; }
    .model { fill: #271c47; stroke: #986ee2; } .gateway { fill: #262c36; stroke: #9198a1; }
    .arrow { stroke: #9198a1; } .head { fill: #9198a1; }
  }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str, *lines: str) -> str:
    """A rounded box with a strong title and small lines under it, centred."""
    first = y + height / 2 + 5 - 9 * len(lines)
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="9" class="box {kind}"/>']
    parts.append(text(x + width / 2, first, title, "strong"))
    for number, line in enumerate(lines, 1):
        parts.append(text(x + width / 2, first + 18 * number, line, "small"))
    return "".join(parts)


def arrow(*points: tuple[float, float]) -> str:
    """A polyline with rounded joints and a head at its end."""
    path = "M" + " L".join(f"{x},{y}" for x, y in points)
    return f'<path d="{path}" class="arrow" stroke-linejoin="round" marker-end="url(#head)"/>'


def drawing() -> str:
    rows = (84, 164, 244)
    parts = [
        text(28, 32, "make demo", "strong", "start"),
        text(124, 32, "all of this on one machine, each coloured box a process of its own", "small", "start"),
        text(694, 32, "checks the same parts, Redis and Ray included", "small", "start"),
        text(600, 32, "make test", "strong", "start"),
        '<rect x="16" y="48" width="968" height="404" rx="12" class="frame"/>',
    ]
    media = (
        ("text", "writing", "“A cat sat …”", "text tokenizer", "SentencePiece · CPU"),
        ("vision", "pictures", "digits, emoji", "vision tokenizer", "scales of bits · GPU if any"),
        ("audio", "speech", "spoken digits", "audio tokenizer", "12.5 frames/s · CPU"),
    )
    for y, (kind, medium, example, service, detail) in zip(rows, media):
        parts.append(box(36, y, 136, 56, "", medium, example))
        parts.append(arrow((172, y + 28), (222, y + 28)))
        parts.append(box(226, y, 184, 56, kind, service, detail))
        parts.append(arrow((410, y + 28), (458, y + 28)))
    parts += [
        box(
            462,
            84,
            128,
            216,
            "redis",
            "Redis",
            "work streams",
            "unified tokens",
            "token cache",
            "dead letters",
        ),
        arrow((590, 140), (648, 140)),
        box(
            652,
            100,
            308,
            80,
            "model",
            "trainer",
            "elastic mixture-of-experts transformer",
            "next group of tokens: text, scales, frames",
        ),
        arrow((806, 180), (806, 220)),
        text(816, 205, "checkpoint", "small", "start"),
        box(652, 224, 308, 60, "model", "inference", "continuous batches, KV cache"),
        arrow((652, 268), (594, 268)),
        arrow((590, 250), (648, 250)),
        box(36, 356, 136, 72, "", "you", "text, image, sound"),
        arrow((172, 384), (222, 384)),
        arrow((226, 402), (176, 402)),
        box(226, 356, 184, 72, "gateway", "gateway", "OpenAI's HTTP API", "streams text and media"),
        arrow((410, 384), (500, 384), (500, 304)),
        arrow((526, 300), (526, 402), (414, 402)),
        text(536, 372, "requests, replies", "small", "start"),
        box(
            652,
            356,
            308,
            72,
            "box",
            "report.html",
            "held-out questions and answers,",
            "loss, use of experts, figures",
        ),
        arrow((806, 284), (806, 352)),
    ]
    return "\n".join(parts)


def svg() -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Media pass through three tokenizer services and Redis to the trainer; the trained model '
        'answers through an inference worker and the gateway">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>\n'
        f"{drawing()}\n</svg>\n"
    )


if __name__ == "__main__":
    target = Path(__file__).with_suffix(".svg")
    target.write_text(svg(), "utf-8")
    print(target)
