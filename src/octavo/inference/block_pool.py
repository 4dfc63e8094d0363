"""Which pages of the cache belong to whom: taken for a request, shared where texts begin alike, given back.

A page holds the keys and values of 64 positions. What it holds depends only on the tokens up to its end, so a full page
is known by a digest of its tokens and of the page before: a request whose prompt begins in the same way takes the page
instead of reading the tokens again. A page is

| state | owners | known by its tokens | taken from |
|-------|--------|---------------------|------------|
| free  | none   | no                  | first      |
| idle  | none   | yes                 | then, those first that were given back longest ago |
| used  | 1 to n | perhaps             | never      |

and every page is in exactly one of the three.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import torch

from octavo.inference.native_decoder import PAGE
from octavo.nn.arguments import check_sizes

__all__ = ["BlockPool", "page_keys"]


def page_keys(tokens: Sequence[int], *, parent: bytes = b"") -> Iterator[bytes]:
    """A key for each full page of ``tokens``, in order; it stands for all tokens up to the page's end.

    Args:
        tokens: ids, whose first is the first of a page.
        parent: the key of the page before; nothing for the first.

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
    """The pages of a cache, by number.

    Args:
        pages: how many there are.

    Raises:
        ConfigError: no page.

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
        self._idle: OrderedDict[int, None] = OrderedDict()  # given back longest ago first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def pages(self) -> int:
        """All of them."""
        return len(self._owners)

    @property
    def available(self) -> int:
        """Pages without an owner."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages without an owner that are known by their tokens."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages with an owner."""
        return self.pages - self.available

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages known by the first of these keys, as far as they are known without a gap; nobody owns them yet."""
        found = []
        for key in keys:
            if key not in self._page_of:
                break
            found.append(self._page_of[key])
        return found

    def can_take(self, count: int, shared: Iterable[int]) -> bool:
        """Whether there are ``count`` pages besides ``shared``."""
        return count <= self.available - sum(page in self._idle for page in shared)

    def share(self, pages: Iterable[int]) -> None:
        """One owner more for pages that :meth:`find` named."""
        for page in pages:
            self._idle.pop(page, None)
            self._owners[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages for one owner, with anything in them; :meth:`can_take` says whether there are enough."""
        assert count <= self.available, f"{count} pages are asked for, and {self.available} have no owner"
        return [self._take_one() for _ in range(count)]

    def publish(self, page: int, key: bytes) -> None:
        """From now on a full page can be found; where another with the same tokens can, it stays that one."""
        assert self._owners[page] > 0, f"page {page} has no owner, so nobody can have filled it"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """One owner less; pages in the order of their text, the last of which is forgotten first."""
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page {page} is given back more often than it was taken"
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
