"""Values remembered within a limit of bytes; those used longest ago go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=Sized)


class ByteCache(Generic[_T]):
    """A cache that threads may share.

    Args:
        capacity: bytes of all values together. A value may grow while it lies here: sizes are taken anew
            whenever one comes in. The newest value always stays.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._values: OrderedDict[Hashable, _T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The value of ``key``, made if it is new; threads that make it at once all get the first one's."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            value = self._values.setdefault(key, made)
            self._values.move_to_end(key)
            total = sum(kept.nbytes for kept in self._values.values())
            while total > self.capacity and len(self._values) > 1:
                total -= self._values.popitem(last=False)[1].nbytes
        return value

    def __len__(self) -> int:
        return len(self._values)
