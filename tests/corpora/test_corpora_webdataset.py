"""Shards: what is written is read back, at random, by this reader and by others; damage is told."""

import io
import random
import tarfile

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ernie5.corpora.webdataset import FRAME_TARGET, Shard, split_name, write_shard
from ernie5.protocol.errors import InvalidInputError

ITEMS = [
    ("a/first", {"txt": b"one", "json": b"{}"}),
    ("large", {"png": random.Random(0).randbytes(700_000)}),
    ("empty", {"txt": b""}),
    ("名字", {"ogg": b"\0" * 5000, "json": b'{"label": "x"}'}),
    ("last", {"txt": b"z" * (FRAME_TARGET + 1)}),
]


def contents(shard):
    return {
        item_id: {extension: shard.read(member) for extension, member in members.items()}
        for item_id, members in shard.items.items()
    }


@pytest.mark.parametrize("name", ["s.tar", "s.tar.zst"])
def test_written_items_are_read_back_in_order(tmp_path, name):
    summary = write_shard(tmp_path / name, ITEMS)
    shard = Shard(tmp_path / name)
    assert contents(shard) == dict(ITEMS)
    assert list(shard.items) == [item_id for item_id, _ in ITEMS]
    assert (summary.items, summary.size) == (5, (tmp_path / name).stat().st_size)


@pytest.mark.parametrize("name", ["s.tar", "s.tar.zst"])
def test_members_are_read_in_any_order(tmp_path, name):
    write_shard(tmp_path / name, ITEMS)
    shard = Shard(tmp_path / name)
    for item_id, files in reversed(ITEMS):
        for extension, data in files.items():
            assert shard.read(shard.items[item_id][extension]) == data


def test_a_rebuild_gives_the_same_bytes(tmp_path):
    first = write_shard(tmp_path / "a.tar.zst", ITEMS)
    second = write_shard(tmp_path / "b.tar.zst", iter(ITEMS))
    assert (tmp_path / "a.tar.zst").read_bytes() == (tmp_path / "b.tar.zst").read_bytes()
    assert first.sha256 == second.sha256
    assert first.content_sha256 == write_shard(tmp_path / "c.tar", ITEMS).content_sha256


def test_other_readers_understand_the_compressed_shard(tmp_path):
    write_shard(tmp_path / "s.tar.zst", ITEMS)
    with (tmp_path / "s.tar.zst").open("rb") as file:
        raw = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        found = {info.name: tar.extractfile(info).read() for info in tar}
    assert found == {
        f"{item}.{extension}": data for item, files in ITEMS for extension, data in files.items()
    }


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_shards_of_others_are_read(tmp_path, suffix):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("train")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("train/evil.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name, data in (
            ("train/" + "x" * 120 + ".txt", b"long"),
            ("train/b.cls", b"3"),
            (".hidden.txt", b"no"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path = tmp_path / f"foreign{suffix}"
    raw = buffer.getvalue()
    path.write_bytes(zstandard.compress(raw) if suffix.endswith("zst") else raw)
    assert contents(Shard(path)) == {"train/" + "x" * 120: {"txt": b"long"}, "train/b": {"cls": b"3"}}


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z0-9_/-]{1,12}", fullmatch=True), st.binary(max_size=1200)), max_size=12
    )
)
def test_any_items_round_trip(tmp_path_factory, pairs):
    unique = {name.strip("/") or "x": {"bin": data} for name, data in pairs}
    path = tmp_path_factory.mktemp("shards") / "s.tar.zst"
    write_shard(path, unique.items())
    assert contents(Shard(path)) == unique


def test_ids_that_readers_would_cut_or_merge_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds a dot"):
        write_shard(tmp_path / "s.tar", [("a.b", {"txt": b""})])
    with pytest.raises(ValueError, match="written twice"):
        write_shard(tmp_path / "s.tar", [("a", {"txt": b""}), ("a", {"txt": b""})])
    assert list(tmp_path.iterdir()) == []


def damaged(tmp_path, change, name="s.tar.zst"):
    path = tmp_path / name
    write_shard(path, ITEMS)
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize("kept", [1, 40, 2000, 700_000])
def test_truncated_compressed_shards_are_refused_with_their_name(tmp_path, kept):
    path = damaged(tmp_path, lambda raw: raw[:kept])
    with pytest.raises(InvalidInputError, match=r"s\.tar\.zst"):
        contents(Shard(path))


def test_a_truncated_tar_is_refused_with_its_name(tmp_path):
    path = damaged(tmp_path, lambda raw: raw[: len(raw) - 1024 - FRAME_TARGET // 2], "s.tar")
    with pytest.raises(InvalidInputError, match=r"s\.tar is not a readable tar"):
        Shard(path)


def test_a_flipped_byte_is_noticed(tmp_path):
    path = damaged(tmp_path, lambda raw: raw[:3000] + bytes([raw[3000] ^ 0xFF]) + raw[3001:])
    with pytest.raises(InvalidInputError, match="damaged"):
        contents(Shard(path))


def test_a_lying_seek_table_is_refused(tmp_path):
    path = damaged(tmp_path, lambda raw: raw[:-9] + (10**6).to_bytes(4, "little") + raw[-5:])
    with pytest.raises(InvalidInputError, match="seek table"):
        Shard(path)


def test_a_member_cut_short_is_told_when_it_is_read(tmp_path):
    write_shard(tmp_path / "s.tar", ITEMS)
    shard = Shard(tmp_path / "s.tar")
    with (tmp_path / "s.tar").open("r+b") as file:
        file.truncate(FRAME_TARGET)
    assert shard.read(shard.items["a/first"]["txt"]) == b"one"
    with pytest.raises(InvalidInputError, match="truncated"):
        shard.read(shard.items["last"]["txt"])


@pytest.mark.parametrize(
    ("name", "parts"), [("a/b.c.d", ("a/b", "c.d")), ("a.b/c.PNG", ("a.b/c", "png")), ("x", ("x", ""))]
)
def test_names_are_split_at_the_first_dot_of_the_file(name, parts):
    assert split_name(name) == parts
