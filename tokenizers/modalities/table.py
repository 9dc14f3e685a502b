"""Table rows: CSV or TSV; every cell comes back exactly.

Canonical text: a line a row, tabs between cells, with ``\\t``, ``\\n``, ``\\r`` and ``\\\\`` for those
characters inside a cell. Which cells were quoted in the file is not kept.
"""

from __future__ import annotations

import csv
import io

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.protocol.modalities import MODALITIES
from ernie5.tokenizers.modalities.codec import SAMPLES, Figure, SampleFile, TextCodec, escape, unescape, utf8

Rows = tuple[tuple[str, ...], ...]

TSV = "text/tab-separated-values"


class TableCodec(TextCodec[Rows]):
    """Rows of equally many cells, each any Unicode string."""

    modality = MODALITIES["table"]
    content_types = ("text/csv", TSV)
    promise = "every cell exact"
    sample = SampleFile(
        SAMPLES / "table.csv",
        "text/csv",
        "20 airports of the United States, from OurAirports by way of PyPI vega_datasets 0.9.0",
        "public domain",
    )

    def read(self, data: bytes, content_type: str) -> Rows:
        text = io.StringIO(utf8(data, "a table"), newline="")
        reader = csv.reader(text, delimiter=_delimiter(content_type), strict=True)
        rows: list[tuple[str, ...]] = []
        try:
            for cells in reader:
                if not cells:
                    continue
                if rows and len(cells) != len(rows[0]):
                    raise InvalidMediaError(
                        f"row {len(rows) + 1} has {len(cells)} cells, the first one {len(rows[0])}; "
                        "fill up short rows",
                        param="data",
                    )
                rows.append(tuple(cells))
        except csv.Error as error:
            raise InvalidMediaError(
                f"table can't be read: line {reader.line_num}: {error}", param="data"
            ) from None
        if not rows:
            raise InvalidMediaError("the table has no rows", param="data")
        return tuple(rows)

    def write(self, value: Rows, content_type: str) -> bytes:
        text = io.StringIO(newline="")
        # Line ends as in RFC 4180; with bare line feeds the writer would leave a carriage return unquoted.
        csv.writer(text, delimiter=_delimiter(content_type), lineterminator="\r\n").writerows(value)
        return text.getvalue().encode()

    def to_text(self, value: Rows) -> str:
        return "\n".join("\t".join(map(escape, row)) for row in value)

    def from_text(self, text: str) -> Rows:
        rows = tuple(tuple(map(unescape, line.split("\t"))) for line in text.split("\n"))
        for number, row in enumerate(rows, 1):
            if len(row) != len(rows[0]):
                raise InvalidInputError(
                    f"row {number} of the tokens has {len(row)} cells, the first one {len(rows[0])}",
                    param="codes",
                )
        return rows

    def compare(self, original: Rows, decoded: Rows) -> Figure:
        if [len(row) for row in original] != [len(row) for row in decoded]:
            return Figure("cells that differ", float("inf"), "", 0)
        cells = zip((cell for row in original for cell in row), (cell for row in decoded for cell in row))
        return Figure("cells that differ", sum(left != right for left, right in cells), "", 0)


def _delimiter(content_type: str) -> str:
    return "\t" if content_type == TSV else ","
