"""`ernie-multi chat`: talk to a model in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ernie5.protocol.errors import ErnieMultiError
from ernie_multi.client import ErnieMulti

_HELP = """Type a question and press Enter. /image FILE and /audio FILE add a medium to the next question,
/drop forgets the media added so far, /out FOLDER chooses where generated media go, /quit or Ctrl-D ends."""


def run(model: Path | None = None, url: str | None = None, *, out: Path = Path("runs/chat")) -> None:
    """Read questions until the end of input; generated pictures and sounds are written to ``out``.

    Raises:
        InvalidInputError: there is no model.
    """
    console = Console()
    ernie = ErnieMulti(model=model, url=url)
    console.print(f"[dim]{_HELP}[/]")
    media: dict[str, str] = {}
    number = 0
    while True:
        try:
            line = console.input("[bold]you:[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command in ("/image", "/audio"):
            if Path(rest).is_file():
                media[command[1:]] = rest
            else:
                console.print(f"[red]there is no file {rest!r}[/]")
        elif command == "/drop":
            media.clear()
        elif command == "/out":
            out = Path(rest)
        elif command.startswith("/"):
            console.print(_HELP)
        elif line or media:
            number += 1
            try:
                _ask(ernie, {**media, **({"text": line} if line else {})}, out, number, console)
            except ErnieMultiError as error:
                console.print(f"[red]{error.message}[/]")
            media.clear()


def _ask(ernie: ErnieMulti, inputs: dict[str, str], out: Path, number: int, console: Console) -> None:
    answer = ernie.predict(inputs)
    console.print("[bold]model:[/]", answer.text or "[dim](no words)[/]", highlight=False)
    for data, name in ((answer.image, f"answer-{number}.png"), (answer.audio, f"answer-{number}.wav")):
        if data is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
            console.print(f"       {out / name}")
