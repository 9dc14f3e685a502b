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
        capacity: bytes of all values together. A value that grows while it lies here must say so by
            :meth:`measure`. The newest value always stays.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._values: OrderedDict[Hashable, _T] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
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
            self._measure(key)
        return value

    def measure(self, key: Hashable) -> None:
        """Take the size of ``key``'s value anew, if it is still here."""
        with self._lock:
            if key in self._values:
                self._measure(key)

    def _measure(self, key: Hashable) -> None:
        size = self._values[key].nbytes
        self.nbytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        while self.nbytes > self.capacity and len(self._values) > 1:
            oldest, _ = self._values.popitem(last=False)
            self.nbytes -= self._sizes.pop(oldest)

    def __len__(self) -> int:
        return len(self._values)
