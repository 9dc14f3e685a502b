"""Corpora of one's own: JSONL, folders and shards; nothing outside them is read, nothing is fetched."""

import base64
import json
import os

import pytest

from ernie5.corpora.corpus import UNREADABLE, open_corpus
from ernie5.corpora.webdataset import write_shard
from ernie5.protocol.errors import InvalidInputError

PNG = b"\x89PNG\r\n\x1a\nnot really"


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def line(*segments, **more):
    return {"segments": list(segments), **more}


def text(value="words", role="target"):
    return {"modality": "text", "role": role, "text": value}


def test_jsonl_carries_text_files_and_base64(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(PNG)
    picture = {"modality": "image", "path": "pictures/cat.png"}
    sound = {"modality": "sound", "role": "target", "base64": base64.b64encode(b"RIFF").decode()}
    file = write_lines(
        tmp_path / "c.jsonl", line(picture, text("cat"), metadata={"task": "name"}), "", line(sound)
    )
    corpus = open_corpus(file)
    assert corpus.tasks == {"name": 1, "sample": 1}
    first, second = corpus
    assert (first.segments[0].data, first.segments[0].content_type) == (PNG, "image/png")
    assert (first.segments[0].role, first.segments[1].text) == ("context", "cat")
    assert second.segments[0].data == b"RIFF"
    assert second.metadata == {"task": "sample", "item": "line-3", "split": "train"}


def test_jsonl_splits_by_line_or_by_file_name(tmp_path):
    file = write_lines(tmp_path / "c.jsonl", line(text("a")), line(text("b"), split="test"))
    assert [sample.segments[0].text for sample in open_corpus(file)] == ["a"]
    assert [sample.segments[0].text for sample in open_corpus(file, "test")] == ["b"]
    held_out = write_lines(tmp_path / "c-test.jsonl", line(text("c")))
    assert (len(open_corpus(held_out)), len(open_corpus(held_out, "test"))) == (0, 1)


BAD_LINES = {
    "not json": ("{", "not JSON"),
    "not an object": ("[1]", "list 'segments'"),
    "no segments": (line(), "at least 1"),
    "unknown key": (line(text(), labels=1), "unknown key 'labels'"),
    "unknown segment key": (line({"modality": "text", "txt": "a"}), "unknown key 'txt'"),
    "two payloads": (line({"modality": "text", "text": "a", "path": "b"}), "exactly one"),
    "a URL": (line({"modality": "image", "path": "https://example.org/cat.png"}), "nothing is fetched"),
    "a way out": (line({"modality": "image", "path": "../secret.png"}), "leads out"),
    "an absolute path": (line({"modality": "image", "path": "/etc/hostname"}), "leads out"),
    "a link out": (line({"modality": "image", "path": "link.png"}), "leads out"),
    "no such file": (line({"modality": "image", "path": "none.png"}), "can't be read"),
    "a NUL": (line({"modality": "image", "path": "a\0b"}), "nothing is fetched"),
    "not base64": (line({"modality": "image", "base64": "***"}), "base64"),
    "an unknown role": (line({"modality": "text", "role": "judge", "text": "a"}), "role"),
    "deep nesting": ("[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_raises_when_read_and_names_file_and_line(tmp_path, case):
    bad, reason = BAD_LINES[case]
    (tmp_path / "inner").mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "inner" / "link.png").symlink_to(tmp_path / "secret.png")
    corpus = open_corpus(
        write_lines(tmp_path / "inner" / "c.jsonl", line(text("good")), bad, line(text("good")))
    )
    assert len(corpus) == 3
    assert corpus[0].segments[0].text == corpus[2].segments[0].text == "good"
    with pytest.raises(InvalidInputError, match=reason) as caught:
        corpus[1]
    assert "c.jsonl, line 2" in str(caught.value)


def test_a_bad_payload_is_handed_on(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"")
    surrogate = '{"segments": [{"modality": "text", "text": "\\ud800"}]}'
    picture = line({"modality": "image", "path": "broken.jpg"})
    corpus = open_corpus(write_lines(tmp_path / "c.jsonl", picture, surrogate))
    assert corpus[0].segments[0].data == b""
    with pytest.raises(ValueError, match="surrogate"):  # by whoever reads the payload, with this reason
        _ = corpus[1].segments[0].payload


def make_folder(root):
    for name, data in {
        "cat.png": PNG,
        "cat.txt": b"a cat\n",
        "dog.jpg": b"jpeg",
        "poem.txt": "诗".encode(),
        "say.wav": b"RIFF",
        "say.txt": b"hello",
        "bark.ogg": b"OggS",
        "code.py": b"pass",
        "test/owl.png": PNG,
        ".hidden.png": PNG,
        "notes.pdf": b"%PDF",
        "bad.txt": b"\xff\xfe",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_a_folder_of_media_is_a_corpus(tmp_path):
    corpus = open_corpus(make_folder(tmp_path / "media"))
    assert corpus.tasks == {"text": 3, "media": 2, "caption": 1, "draw": 1, "speech_hear": 1, "speech_say": 1}
    caption = corpus[corpus.indices("caption")[0]]
    assert [(s.modality, s.role) for s in caption.segments] == [
        ("image", "context"),
        ("text", "context"),
        ("text", "target"),
    ]
    assert caption.segments[2].text == "a cat"
    spoken = corpus[corpus.indices("speech_say")[0]]
    assert (spoken.segments[0].text, spoken.segments[1].modality) == ("Say: hello", "speech")
    assert {corpus[i].segments[0].modality for i in corpus.indices("media")} == {"image", "sound"}
    assert {s.segments[0].modality for s in corpus if s.metadata["task"] == "text"} == {"text", "code"}
    bad = next(s for s in corpus if s.metadata["item"] == "bad")
    assert bad.segments[0].data == b"\xff\xfe"
    assert [sample.metadata["item"] for sample in open_corpus(tmp_path / "media", "test")] == ["test/owl"]


def test_a_folder_does_not_follow_links_out(tmp_path):
    outside = tmp_path / "secret.txt"
    outside.write_text("secret")
    folder = make_folder(tmp_path / "media")
    (folder / "out.txt").symlink_to(outside)
    os.symlink(tmp_path, folder / "up")
    assert not any(
        "secret" in (segment.text or "") for sample in open_corpus(folder) for segment in sample.segments
    )


def test_foreign_shards_are_a_corpus(tmp_path):
    write_shard(tmp_path / "w-train-0.tar", [("a", {"jpg": b"j", "txt": b"cat"}), ("b", {"wav": b"w"})])
    write_shard(tmp_path / "w-val-0.tar.zst", [("c", {"jpg": b"j", "txt": b"dog"})])
    assert open_corpus(tmp_path).tasks == {"caption": 1, "draw": 1, "media": 1}
    assert open_corpus(tmp_path, "test")[0].segments[2].text == "dog"
    assert open_corpus(tmp_path / "w-train-0.tar")[0].segments[0].data == b"j"


def test_items_that_make_no_sense_raise_only_when_read(tmp_path):
    items = [
        ("good", {"txt": b"fine"}),
        ("nothing", {"xyz": b"?"}),
        ("badjson", {"txt": b"a", "json": b"{"}),
        ("list", {"txt": b"a", "json": b"[]"}),
        ("oddkind", {"txt": b"a", "json": b'{"kind": ["text"]}'}),
        ("oddnames", {"png": PNG, "json": b'{"kind": "named_picture", "names": [1]}'}),
        ("future", {"txt": b"a", "json": b'{"kind": "hologram"}'}),
        ("lacking", {"txt": b"a", "json": b'{"kind": "digit_image"}'}),
    ]
    write_shard(tmp_path / "s.tar", items)
    corpus = open_corpus(tmp_path)
    assert corpus.tasks == {"text": 1, UNREADABLE: 6, "digit_read": 1, "digit_draw": 1}
    assert corpus[0].segments[0].text == "fine"
    for index in range(1, len(corpus)):
        with pytest.raises(InvalidInputError, match=items[min(index, 7)][0]):
            corpus[index]


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ("{", r"manifest\.json, line 1"),
        ("[]", "'shards' must be a list"),
        ('{"shards": [{"file": 3, "split": "train"}]}', "'shards' must be a list"),
        ('{"shards": [{"file": "../x.tar", "split": "train"}]}', "leads out"),
        ('{"shards": [{"file": "none.tar", "split": "train"}]}', r"none\.tar can't be opened"),
    ],
)
def test_an_unreadable_manifest_is_told(tmp_path, manifest, reason):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(InvalidInputError, match=reason):
        open_corpus(tmp_path)


def test_names_and_urls_that_are_no_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("ERNIE_MULTI_DATA", str(tmp_path))
    with pytest.raises(InvalidInputError, match=r"'minni'; there are mini"):
        open_corpus("minni")
    with pytest.raises(InvalidInputError, match="nothing is fetched"):
        open_corpus("https://example.org/corpus.tar")
    with pytest.raises(InvalidInputError, match="split 'dev' is neither train nor test"):
        open_corpus("mini", "dev")
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(InvalidInputError, match="is no corpus"):
        open_corpus(tmp_path / "table.csv")


def test_built_corpora_are_found_in_the_data_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ERNIE_MULTI_DATA", str(tmp_path))
    folder = tmp_path / "corpora" / "mine"
    write_shard(folder / "s.tar", [("a", {"txt": b"hello"})])
    (folder / "manifest.json").write_text('{"shards": [{"file": "s.tar", "split": "train"}]}')
    assert open_corpus("mine")[0].segments[0].text == "hello"
    assert len(open_corpus("mine", "test")) == 0


def test_the_fingerprint_tells_contents_apart(tmp_path):
    file = write_lines(tmp_path / "c.jsonl", line(text("a")))
    before = open_corpus(file).fingerprint
    assert open_corpus(file).fingerprint == before
    assert open_corpus(file, repeats={"sample": 2}).fingerprint != before
    write_lines(file, line(text("b")))
    assert open_corpus(file).fingerprint != before
