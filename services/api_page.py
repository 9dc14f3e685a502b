"""A page that describes a service's API, whole in itself: FastAPI's own loads scripts from the internet."""

from __future__ import annotations

import html
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:14px/1.4 ui-monospace,monospace;background:#8881;border-radius:4px;padding:.1em .3em}"
    "section{border-top:1px solid #8884;padding:.5rem 0}:root{color-scheme:light dark}"
)


def add_page(app: FastAPI) -> None:
    """Serve ``/docs`` from the application's OpenAPI description (made with ``docs_url=None``)."""

    async def docs(request: Request) -> HTMLResponse:
        prefix = request.scope.get("root_path", "")
        return HTMLResponse(api_page(app.openapi(), str(request.base_url).rstrip("/"), prefix))

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def api_page(description: dict[str, Any], base_url: str, prefix: str) -> str:
    """The HTML of an OpenAPI description."""
    title = html.escape(description["info"]["title"])
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p>{html.escape(description['info'].get('description', ''))}</p>",
        f"<p>Base address <code>{html.escape(base_url)}</code>; machine-readable: "
        f"<a href='{html.escape(prefix)}/openapi.json'>openapi.json</a></p>",
    ]
    for path, operations in description["paths"].items():
        parts += [_operation(path, method, operation) for method, operation in operations.items()]
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    lines = [
        f"<section><h2><code>{method.upper()} {html.escape(path)}</code></h2>",
        f"<p>{html.escape(operation.get('summary', ''))}</p>",
    ]
    parameters = operation.get("parameters", ())
    if parameters:
        rows = "".join(
            f"<li><code>{html.escape(item['name'])}</code> ({item['in']}) "
            f"{html.escape(item.get('description', ''))}</li>"
            for item in parameters
        )
        lines.append(f"<p>Parameters</p><ul>{rows}</ul>")
    bodies = operation.get("requestBody", {}).get("content", {})
    if bodies:
        lines.append(f"<p>Takes {_types(bodies)}</p>")
    answers = operation.get("responses", {}).get("200", {}).get("content", {})
    if answers:
        lines.append(f"<p>Answers {_types(answers)}</p>")
    return "".join([*lines, "</section>"])


def _types(content: dict[str, Any]) -> str:
    return ", ".join(f"<code>{html.escape(name)}</code>" for name in content)
