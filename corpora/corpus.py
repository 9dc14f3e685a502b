"""Corpora as sequences of samples: the one that ships, built ones by name, and files of one's own.

>>> corpus = open_corpus("mini", split="test", tasks={"digit_read"})
>>> corpus[0].metadata["task"]
'digit_read'
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

from ernie5.corpora.jsonl import JsonLines
from ernie5.corpora.sources import FolderSource, ShardSource, Source, is_shard, read_manifest
from ernie5.corpora.tasks import TASKS, build_sample, tasks_of
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.samples import Sample

SHIPPED = Path(__file__).parent / "data"
DATA_HOME_VARIABLE = "ERNIE_MULTI_DATA"
SPLITS = ("train", "test")
UNREADABLE = "unreadable"
"""Task name under which items are listed that no task can be made of; reading one raises."""


class Corpus(Sequence[Sample]):
    """Samples of one split, by number in constant time.

    An item that several tasks fit is a sample for each; ``repeats`` lists a task's samples more than once
    an epoch. Payloads are handed on unread: a damaged picture is the tokenizer service's to refuse. A
    record that can't be read at all raises `InvalidInputError` with its place when it is asked for.
    """

    def __init__(
        self,
        name: str,
        split: str,
        source: Source | JsonLines,
        tasks: Collection[str] | None = None,
        repeats: Mapping[str, int] | None = None,
    ) -> None:
        self.name, self.split, self._source = name, split, source
        repeats = dict(repeats or {})
        for task, count in repeats.items():
            if count < 0:
                raise ValueError(
                    f"repeats[{task!r}] is {count}; it counts samples an epoch, 0 leaves the task out"
                )
        self._tasks: list[str] = []
        self._items, self._task_numbers = array("L"), array("H")
        for number, names in enumerate(self._names()):
            for task in names:
                if tasks is not None and task not in tasks:
                    continue
                if task not in self._tasks:
                    self._tasks.append(task)
                for _ in range(repeats.get(task, 1)):
                    self._items.append(number)
                    self._task_numbers.append(self._tasks.index(task))
        chosen = "all" if tasks is None else ",".join(sorted(tasks))
        identity = f"{name}|{split}|{source.fingerprint()}|{chosen}|{sorted(repeats.items())}"
        self.fingerprint: str = hashlib.sha256(identity.encode()).hexdigest()

    def _names(self) -> Iterator[tuple[str, ...]]:
        if isinstance(self._source, JsonLines):
            for _, _, _, task in self._source.lines:
                yield (task,)
            return
        for kind, metadata in self._source.kinds():
            yield tuple(task for task in tasks_of(kind) if TASKS[task].fits_metadata(metadata)) or (
                UNREADABLE,
            )

    @property
    def tasks(self) -> dict[str, int]:
        """Task names to their number of samples, repeats counted, in the order of first appearance."""
        counts = Counter(self._task_numbers)
        return {task: counts[number] for number, task in enumerate(self._tasks)}

    def indices(self, task: str) -> list[int]:
        """Numbers of the samples of a task."""
        if task not in self._tasks:
            return []
        wanted = self._tasks.index(task)
        return [index for index, number in enumerate(self._task_numbers) if number == wanted]

    def task(self, index: int) -> str:
        """The task of a sample, without reading it."""
        return self._tasks[self._task_numbers[index]]

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Read a sample, or a list of them.

        Raises:
            IndexError: there is no such sample.
            InvalidInputError: the record can't be read; the message names its file and line or item.
        """
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = self._items[index]
        task = self._tasks[self._task_numbers[index]]
        if isinstance(self._source, JsonLines):
            return self._source.sample(number)
        item = self._source.item(number)
        if task == UNREADABLE:
            raise InvalidInputError(
                f"{self.name}: item {item.item_id!r} of kind {item.kind!r} fits no known task"
            )
        try:
            return build_sample(task, item, self.split)
        except KeyError as error:
            raise InvalidInputError(
                f"{self.name}: item {item.item_id!r} of kind {item.kind!r} lacks {error} for task {task}"
            ) from None

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, split={self.split!r}, samples={len(self)})"


def data_home() -> Path:
    """The folder of built corpora: ``ERNIE_MULTI_DATA``, else ``~/.cache/ernie-multi``."""
    given = os.environ.get(DATA_HOME_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ernie-multi"


def corpus_names() -> list[str]:
    """Names that :func:`open_corpus` finds: the shipped corpora and the built ones."""
    folders = [SHIPPED, data_home() / "corpora"]
    return sorted(
        {path.parent.name for folder in folders if folder.is_dir() for path in folder.glob("*/manifest.json")}
    )


def open_corpus(
    name_or_path: str | Path,
    split: str = "train",
    *,
    tasks: Collection[str] | None = None,
    repeats: Mapping[str, int] | None = None,
) -> Corpus:
    """Open a corpus for reading; nothing is fetched.

    Args:
        name_or_path: a shipped or built corpus by name; or a path: a JSONL file, a ``.tar`` or ``.tar.zst``
            shard, a folder of shards, or a plain folder of pictures, sounds and texts. A name wins over a
            folder of that name; write ``./mini`` for the folder.
        split: ``train`` or ``test``.
        tasks: keep only these tasks.
        repeats: samples an epoch for each item of a task, 1 where not named.

    Raises:
        InvalidInputError: no such corpus or file, an unknown split, or an unreadable manifest or shard.
    """
    if split not in SPLITS:
        raise InvalidInputError(f"split {split!r} is neither {' nor '.join(SPLITS)}", param="split")
    name = str(name_or_path)
    if "://" in name:
        raise InvalidInputError(f"{name!r} is a URL; corpora are files, nothing is fetched", param="data")
    if isinstance(name_or_path, str) and Path(name).name == name:
        for home in (SHIPPED, data_home() / "corpora"):
            if (home / name / "manifest.json").exists():
                return Corpus(name, split, ShardSource.from_folder(home / name, split), tasks, repeats)
    path = Path(name).expanduser()
    if not path.exists():
        known = ", ".join(corpus_names())
        raise InvalidInputError(
            f"no corpus or file {name!r}; there are {known}; `ernie-multi corpus build NAME` builds others",
            param="data",
        )
    return Corpus(path.name, split, _source(path, split), tasks, repeats)


def _source(path: Path, split: str) -> Source | JsonLines:
    if path.is_dir():
        if read_manifest(path) is not None or any(map(is_shard, path.rglob("*.tar*"))):
            return ShardSource.from_folder(path, split)
        return FolderSource(path, split)
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonLines(path, split)
    if is_shard(path):
        return ShardSource.from_file(path, split)
    raise InvalidInputError(
        f"{path} is no corpus: expected a folder, a .jsonl file, or a .tar or .tar.zst shard", param="data"
    )
