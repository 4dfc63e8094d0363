"""Allocation of cache pages to requests, with sharing of common prefixes.

A page holds the keys and values of 64 positions, which depend only on the tokens up to its end. A full page therefore
has a key, a digest of its tokens and of the previous page's key: a request whose prompt has the same beginning shares
the page instead of computing it again. Every page is in one of three states:

| state | owners | has a key | allocated                   |
|-------|--------|-----------|-----------------------------|
| free  | 0      | no        | first                       |
| idle  | 0      | yes       | next, least recently used   |
| used  | 1 to n | perhaps   | never                       |
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import torch

from octavo.inference.native_decoder import PAGE
from octavo.nn.arguments import check_sizes

__all__ = ["BlockPool", "page_keys"]


def page_keys(tokens: Sequence[int], *, parent: bytes = b"") -> Iterator[bytes]:
    """Yield the key of each full page of ``tokens``, which identifies all tokens up to the page's end.

    Args:
        tokens: token ids, starting at the beginning of a page.
        parent: key of the previous page; empty for the first.

    Example:
        >>> one, two = page_keys(range(128))
        >>> [two] == list(page_keys(range(64, 128), parent=one)), len(list(page_keys(range(63))))
        (True, 0)
    """
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        numbers = torch.tensor(tokens[start : start + PAGE], dtype=torch.int64, device="cpu")
        parent = blake2b(parent + numbers.numpy().tobytes(), digest_size=32).digest()
        yield parent


class BlockPool:
    """Allocator of the pages of a cache, by number.

    Args:
        pages: number of pages.

    Raises:
        ConfigError: fewer than one page.

    Example:
        >>> pool = BlockPool(3)
        >>> first, second = pool.take(2)
        >>> pool.publish(first, b"the first 64 tokens")
        >>> pool.release([first, second])
        >>> pool.used, pool.idle, pool.find([b"the first 64 tokens"]) == [first]
        (0, 1, True)
    """

    def __init__(self, pages: int) -> None:
        check_sizes(pages=pages)
        self._owners = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def pages(self) -> int:
        """Number of all pages."""
        return len(self._owners)

    @property
    def available(self) -> int:
        """Number of pages without an owner."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Number of pages without an owner that have a key."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Number of pages with an owner."""
        return self.pages - self.available

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of these keys; their owners do not change."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def can_take(self, count: int, shared: Iterable[int]) -> bool:
        """Return True if ``count`` pages without an owner are left besides ``shared``."""
        return count <= self.available - sum(page in self._idle for page in shared)

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to pages from :meth:`find`."""
        for page in pages:
            self._idle.pop(page, None)
            self._owners[page] += 1

    def take(self, count: int) -> list[int]:
        """Allocate uninitialized pages to one owner; check :meth:`can_take` first."""
        assert count <= self.available, f"{count} pages are requested, and {self.available} have no owner"
        return [self._take_one() for _ in range(count)]

    def publish(self, page: int, key: bytes) -> None:
        """Assign a key to a full page, unless another page already has it."""
        assert self._owners[page] > 0, f"page {page} has no owner that could have filled it"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner of pages in text order; the last page will be reused first."""
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page {page} is released more often than it was taken"
            self._owners[page] -= 1
            if self._owners[page] == 0 and page in self._key_of:
                self._idle[page] = None
            elif self._owners[page] == 0:
                self._free.append(page)

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._owners[page] = 1
        return page
