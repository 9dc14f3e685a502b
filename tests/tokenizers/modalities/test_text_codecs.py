"""Codecs on the sequence layout: what they promise comes back, and what is no medium is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.tokenizers.modalities.boxes import BoxesCodec, Page
from ernie5.tokenizers.modalities.codec import escape, unescape
from ernie5.tokenizers.modalities.molecule import MoleculeCodec, smiles_problem
from ernie5.tokenizers.modalities.protein import ProteinCodec
from ernie5.tokenizers.modalities.strokes import Drawing, StrokesCodec
from ernie5.tokenizers.modalities.table import TSV, TableCodec
from ernie5.tokenizers.modalities.track import GEOJSON, GPX, Point, TrackCodec
from ernie5.tokenizers.text import TextTokenizer

BASE = TextTokenizer.load()
BOXES, MOLECULE, PROTEIN = BoxesCodec(), MoleculeCodec(), ProteinCodec()
STROKES, TABLE, TRACK = StrokesCodec(), TableCodec(), TrackCodec()
CODECS = (BOXES, MOLECULE, PROTEIN, STROKES, TABLE, TRACK)

words = st.text(st.characters(codec="utf-8"), max_size=8)


def through(codec: Any, value: Any) -> Any:
    """A value that went through tokens."""
    return codec.decode(codec.encode(value, BASE), BASE)


@given(words)
def test_escapes_come_back_and_leave_no_separator(text: str) -> None:
    assert unescape(escape(text)) == text
    assert not set(escape(text)) & set("\t\n\r")


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[words] * n), min_size=1, max_size=5)))
@example([("",)])
@example([("a\tb", 'x\n"y"'), ("\\t", "\r\n"), (",", "; ' ▁")])
def test_every_cell_of_a_table_comes_back(rows: list[tuple[str, ...]]) -> None:
    assert through(TABLE, tuple(rows)) == tuple(rows)
    for content_type in ("text/csv", TSV):
        assert TABLE.read(TABLE.write(tuple(rows), content_type), content_type) == tuple(rows)


sides = st.integers(1, 100_000)


@st.composite
def pages(draw: st.DrawFn) -> Page:
    width, height = draw(sides), draw(sides)
    boxes = []
    for label in draw(st.lists(words, max_size=5)):
        x = sorted(draw(st.tuples(*[st.floats(0, width)] * 2)))
        y = sorted(draw(st.tuples(*[st.floats(0, height)] * 2)))
        boxes.append((label, x[0], y[0], x[1], y[1]))
    return Page(width, height, tuple(boxes))


@given(pages())
def test_corners_of_boxes_stay_within_half_a_thousandth(page: Page) -> None:
    decoded = through(BOXES, page)
    assert BOXES.compare(page, decoded).passed
    assert through(BOXES, decoded) == decoded
    assert BOXES.read(BOXES.write(page, ""), "") == page


@st.composite
def drawings(draw: st.DrawFn) -> Drawing:
    width, height = draw(sides), draw(sides)
    point = st.tuples(st.floats(0, width), st.floats(0, height))
    strokes = draw(st.lists(st.lists(point, min_size=1, max_size=8).map(tuple), max_size=4))
    return Drawing(width, height, tuple(strokes))


@given(drawings())
def test_points_of_strokes_stay_within_half_a_thousandth(drawing: Drawing) -> None:
    decoded = through(STROKES, drawing)
    assert STROKES.compare(drawing, decoded).passed
    assert through(STROKES, decoded) == decoded
    assert STROKES.read(STROKES.write(drawing, ""), "") == drawing


points = st.builds(
    Point,
    st.floats(-90, 90),
    st.floats(-180, 180),
    st.none() | st.floats(-11_000, 90_000),
    st.none() | st.floats(-5e9, 5e9),
)
tracks = st.lists(st.lists(points, min_size=1, max_size=5).map(tuple), min_size=1, max_size=3).map(tuple)


@given(tracks)
@example(((Point(90.0, 180.0), Point(-90.0, -180.0, 0.0, 0.0)),))
@example(((Point(0.0, 179.999999, 8848.86), Point(0.0, -179.999999, None, 1.5)),))
def test_points_of_a_track_stay_within_a_metre(track: tuple[tuple[Point, ...], ...]) -> None:
    decoded = through(TRACK, track)
    assert TRACK.compare(track, decoded).passed
    again = TRACK.read(TRACK.write(decoded, GPX), GPX)
    flat = [[point for segment in value for point in segment] for value in (track, decoded, again)]
    for source, told, read in zip(*flat):
        for left, right in ((source, told), (told, read)):
            assert (left.elevation is None, left.time is None) == (
                right.elevation is None,
                right.time is None,
            )
            assert abs((left.elevation or 0) - (right.elevation or 0)) <= 0.05 + 1e-9
            assert abs((left.time or 0) - (right.time or 0)) <= 0.5
    assert TRACK.compare(decoded, TRACK.read(TRACK.write(decoded, GEOJSON), GEOJSON)).value < 1e-3


def test_errors_of_a_track_do_not_add_up() -> None:
    """Ten thousand steps of 0.3 grid units each: summing rounded steps would lose them all."""
    track = (tuple(Point(i * 0.3e-5, 10 + i * 0.3e-5) for i in range(10_000)),)
    assert TRACK.compare(track, through(TRACK, track)).passed


sequences = st.text("ACDEFGHIKLMNPQRSTVWY*-", min_size=1, max_size=200)
headers = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)


@given(st.lists(st.tuples(headers, sequences), min_size=1, max_size=3).map(tuple))
def test_proteins_come_back(records: tuple[tuple[str, str], ...]) -> None:
    assert through(PROTEIN, records) == records
    assert PROTEIN.read(PROTEIN.write(records, ""), "") == records


@pytest.mark.parametrize("separator", ["\v", "\f", "\x1c", "\x85", "\u2028"])
def test_a_protein_header_ends_at_its_line_end_only(separator: str) -> None:
    header = f"a{separator}ACDE"
    for line_end in ("\n", "\r\n", "\r"):
        data = line_end.join([f">{header}", "mk", "VL", ""]).encode()
        assert PROTEIN.read(data, "") == ((header, "MKVL"),)


# Among them aspirin, caffeine, glucose, cubane, penicillin G, alanine and copper(II) sulfate.
MOLECULES = [
    "C",
    "[2H]O[2H]",
    "CC(=O)Oc1ccccc1C(=O)O",
    "CN1C=NC2=C1C(=O)N(C(=O)N2C)C",
    "OC[C@H]1OC(O)[C@H](O)[C@@H](O)[C@@H]1O",
    "C12C3C4C1C5C2C3C45",
    "CC1([C@@H](N2[C@H](S1)[C@@H](C2=O)NC(=O)Cc3ccccc3)C(=O)O)C",
    "N[C@@H](C)C(=O)O",
    "[Cu+2].[O-]S(=O)(=O)[O-]",
    "F/C=C/F",
    "C%12CCCCC%12",
    "[nH]1cccc1",
    "[13CH4:1]",
    "C(.C)C",
    "[Co@OH25](N)(N)(N)(N)(N)N",
    "c1ccc2c(c1)[se]cc2",
    "*C$*",
]


@pytest.mark.parametrize("smiles", MOLECULES)
def test_molecules_come_back(smiles: str) -> None:
    assert through(MOLECULE, MOLECULE.read(f" {smiles}\r\n".encode(), "")) == smiles


@pytest.mark.parametrize(
    ("smiles", "why"),
    [
        ("", "empty"),
        ("C1CC", "ring 1 is opened"),
        ("C11", "own atom"),
        ("C(C", "not closed"),
        ("CC)", "closes no branch"),
        ("C()C", "closes no branch"),
        ("(C)C", "follows no atom"),
        ("C=", "ends in a bond"),
        ("C==C", "follows no atom"),
        ("=C", "follows no atom"),
        ("C.", "ends in a bond or dot"),
        ("C..C", "follows no atom"),
        ("1CC1", "follows no atom"),
        ("[Xx]", "no atom"),
        ("[C", "no atom"),
        ("Cat", "no atom"),
        ("C%1C", "no atom"),
        ("hello", "no atom"),
    ],
)
def test_what_is_no_smiles_is_told_with_the_place(smiles: str, why: str) -> None:
    assert why in (smiles_problem(smiles) or "")


@given(st.text("CNOcn12()=.[]@H+-%/\\#", max_size=20))
def test_any_string_is_judged(smiles: str) -> None:
    if smiles_problem(smiles) is None:
        assert through(MOLECULE, smiles) == smiles


def page(**changes: Any) -> bytes:
    return json.dumps({"width": 9, "height": 9, "boxes": [], **changes}).encode()


def drawing(**changes: Any) -> bytes:
    return json.dumps({"width": 9, "height": 9, "strokes": [], **changes}).encode()


def gpx(inner: str, head: str = "") -> bytes:
    return f'<?xml version="1.0"?>{head}<gpx><trk><trkseg>{inner}</trkseg></trk></gpx>'.encode()


BOMB = (
    '<!DOCTYPE z [<!ENTITY a "aaaaaaaaaa">'
    + "".join(
        f'<!ENTITY {b} "&{a};&{a};&{a};&{a};&{a};&{a};&{a};&{a};">' for a, b in zip("abcdefgh", "bcdefghi")
    )
    + "]>"
)
HOSTILE = [
    (TABLE, b"\xff\xfe", "text/csv", "UTF-8"),
    (TABLE, b"a,b\n1\n", "text/csv", "row 2 has 1 cells, the first one 2"),
    (TABLE, b'a,"b', "text/csv", "line"),
    (TABLE, b'"a"b,c\n', "text/csv", "line"),
    (TABLE, b"x" * 200_000, "text/csv", "line"),
    (TABLE, b"\n\n", "text/csv", "no rows"),
    (TABLE, b"", "text/csv", "empty"),
    (TABLE, b"a\n", "image/png", "comes as text/csv"),
    (BOXES, b"{", "", "not JSON"),
    (BOXES, b"[" * 100_000, "", "too deep"),
    (BOXES, b'{"width": ' + b"9" * 5000 + b"}", "", "JSON"),
    (BOXES, b"[]", "", "width"),
    (BOXES, page(width=0), "", "from 1 to"),
    (BOXES, page(width=True), "", "from 1 to"),
    (BOXES, page(height=1.5), "", "from 1 to"),
    (BOXES, page(more=1), "", "must be"),
    (BOXES, page(boxes=3), "", "list"),
    (BOXES, page(boxes=[{"label": "a", "box": [0, 0, 1]}]), "", "4 numbers"),
    (BOXES, page(boxes=[{"label": "a", "box": [0, 0, 1, math.nan]}]), "", "finite"),
    (BOXES, page(boxes=[{"label": "a", "box": [0, 0, 1, math.inf]}]), "", "finite"),
    (BOXES, page(boxes=[{"label": "a", "box": [2, 0, 1, 1]}]), "", "inside 9x9"),
    (BOXES, page(boxes=[{"label": "a", "box": [0, 0, 1, 10]}]), "", "inside 9x9"),
    (BOXES, page(boxes=[{"label": 1, "box": [0, 0, 1, 1]}]), "", "label"),
    (STROKES, drawing(strokes=[[[1], []]]), "", "1 x and 0 y"),
    (STROKES, drawing(strokes=[[[], []]]), "", "0 x and 0 y"),
    (STROKES, drawing(strokes=[[[1, math.nan], [1, 1]]]), "", "finite"),
    (STROKES, drawing(strokes=[[["1"], [1]]]), "", "finite"),
    (STROKES, drawing(strokes=[[[10], [1]]]), "", "leaves the sheet"),
    (STROKES, drawing(strokes={"a": 1}), "", "list"),
    (PROTEIN, b"ACD", "", "before the first"),
    (PROTEIN, b">x\nAC1", "", "amino acid letters"),
    (PROTEIN, ">x\nß".encode(), "", "amino acid letters"),
    (PROTEIN, ">x\nMı".encode(), "", "amino acid letters"),
    (PROTEIN, b">x\n>y\nA", "", "no sequence"),
    (PROTEIN, b" ", "", "no record"),
    (MOLECULE, b"CCO ethanol", "", "no spaces"),
    (MOLECULE, b"\xc3\x28", "", "UTF-8"),
    (TRACK, b"not xml", GPX, "well-formed"),
    (TRACK, gpx('<trkpt lat="1" lon="2"/>')[:-9], GPX, "well-formed"),
    (TRACK, gpx("&i;", BOMB), GPX, "document type"),
    (TRACK, gpx("", '<!DOCTYPE gpx SYSTEM "file:///etc/passwd">'), GPX, "document type"),
    (TRACK, gpx('<trkpt lat="91" lon="0"/>'), GPX, "not on the globe"),
    (TRACK, gpx('<trkpt lat="nan" lon="0"/>'), GPX, "finite"),
    (TRACK, gpx('<trkpt lon="0"/>'), GPX, "lat of a point"),
    (TRACK, gpx('<trkpt lat="1" lon="0"><ele>1e6</ele></trkpt>'), GPX, "elevation"),
    (TRACK, gpx('<trkpt lat="1" lon="0"><time>yesterday</time></trkpt>'), GPX, "time of a point"),
    (TRACK, gpx('<trkpt lat="1" lon="0"><time>2020-13-01T00:00:00Z</time></trkpt>'), GPX, "time of a point"),
    (TRACK, gpx(""), GPX, "no points"),
    (TRACK, gpx("<a>" * 100 + "</a>" * 100), GPX, "deeper"),
    (TRACK, b'<?xml version="1.0" encoding="klingon"?><gpx/>', GPX, "GPX"),
    (TRACK, b'{"type": "Point", "coordinates": [1, 2]}', GEOJSON, "LineString"),
    (TRACK, b'{"type": "LineString", "coordinates": [[1]]}', GEOJSON, "position"),
    (TRACK, b'{"type": "LineString", "coordinates": [[1, NaN]]}', GEOJSON, "finite"),
    (TRACK, b'{"type": "LineString", "coordinates": null}', GEOJSON, "lists"),
    (TRACK, b'{"type": "FeatureCollection", "features": []}', GEOJSON, "0 features"),
]


@pytest.mark.parametrize(("codec", "data", "content_type", "why"), HOSTILE)
def test_what_is_no_medium_is_refused_with_the_reason(
    codec: Any, data: bytes, content_type: str, why: str
) -> None:
    with pytest.raises(InvalidInputError, match=why):
        codec.read_checked(data, content_type or None)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(MediaTooLargeError, match="1000000"):
        TABLE.read_checked(b"a\n" * 600_000, None)
    with pytest.raises(MediaTooLargeError, match="20000"):
        TRACK.read_checked(gpx('<trkpt lat="1" lon="0"/>' * 20_001), GPX)
    with pytest.raises(MediaTooLargeError, match="4096"):
        BOXES.read_checked(page(boxes=[{"label": "", "box": [0, 0, 1, 1]}] * 4097), None)
    with pytest.raises(MediaTooLargeError, match="10000"):
        MOLECULE.read_checked(b"C" * 10_001, None)


def test_times_with_fractions_and_zones_are_read() -> None:
    track = TRACK.read(
        gpx(
            '<trkpt lat="1" lon="0"><time>1901-12-13T20:45:52.2073437Z</time></trkpt>'
            '<trkpt lat="1" lon="0"><time>1970-01-01T01:00:01+01:00</time></trkpt>'
        ),
        GPX,
    )
    assert [point.time for point in track[0]] == [pytest.approx(-2147483647.7926563), 1.0]


@given(st.sampled_from(CODECS), words | st.text("0123456789 -\n\t>ACGN\\", max_size=30))
def test_whatever_a_model_writes_is_a_value_or_an_error(codec: Any, text: str) -> None:
    try:
        value = codec.from_text(text)
    except InvalidInputError:
        return
    codec.read_checked(codec.write(value, codec.content_types[0]) or b" ", None) if text.strip() else None


def test_a_span_of_another_kind_is_refused() -> None:
    span = TABLE.encode((("a",),), BASE)
    with pytest.raises(ErnieMultiError, match="no track span"):
        TRACK.decode(span, BASE)
    with pytest.raises(InvalidMediaError, match="not SMILES"):
        MOLECULE.read(b"not", "")
