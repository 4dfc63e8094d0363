"""Whatever is taken, shared, filled and given back, every page has one state, and nobody loses one."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from octavo.errors import ConfigError
from octavo.inference.block_pool import BlockPool, page_keys

PAGES = 7
ACTS = st.lists(st.tuples(st.sampled_from(["start", "end"]), st.integers(0, 5), st.integers(1, 4)), max_size=60)


class Model:
    """Pages as sets: what a pool must be, slowly."""

    def __init__(self):
        self.held, self.content, self.idle = [], {}, []

    def used(self):
        return {page for pages in self.held for page in pages}


@settings(max_examples=300, deadline=None)
@given(ACTS)
def test_page_states_are_consistent_for_random_operations(acts):
    pool, model = BlockPool(PAGES), Model()
    for act, which, count in acts:
        if act == "start":
            start(pool, model, text=which, count=count)
        elif model.held:
            end(pool, model, model.held.pop(which % len(model.held)))
        used = model.used()
        assert (pool.used, pool.idle, pool.available) == (len(used), len(model.idle), PAGES - len(used))
        assert len(used) + len(model.idle) <= PAGES
    for pages in model.held:
        pool.release(pages)
    assert pool.used == 0
    assert sorted(pool.take(PAGES)) == list(range(PAGES))
    assert pool.idle == 0


def start(pool, model, *, text, count):
    """A request for ``count`` pages whose text begins as all of the same number do; it fills all of them."""
    keys = [bytes([text, i]) for i in range(count)]
    wanted = []
    for key in keys:
        if key not in model.content:
            break
        wanted.append(model.content[key])
    shared = pool.find(keys)
    assert shared == wanted
    fresh = count - len(shared)
    room = PAGES - len(model.used() | set(shared))
    assert pool.can_take(fresh, shared) == (fresh <= room)
    if fresh > room:
        return
    pool.share(shared)
    model.idle = [page for page in model.idle if page not in shared]
    taken = pool.take(fresh)
    assert not set(taken) & (model.used() | set(shared))
    evicted = [page for page in model.idle if page in taken]
    assert evicted == model.idle[: len(evicted)], "the one given back longest ago goes first"
    model.idle = model.idle[len(evicted) :]
    model.content = {key: page for key, page in model.content.items() if page not in evicted}
    pages = shared + taken
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
        model.content.setdefault(key, page)
    model.held.append(pages)


def end(pool, model, pages):
    pool.release(pages)
    owners = Counter(page for others in model.held for page in others)
    known = set(model.content.values())
    model.idle += [page for page in reversed(pages) if not owners[page] and page in known]


def test_page_key_depends_on_all_previous_tokens():
    tokens = list(range(200))
    keys = list(page_keys(tokens))
    assert len(keys) == 3
    assert list(page_keys(tokens[:128])) == keys[:2]
    other = list(page_keys([1, *tokens[1:]]))
    assert not set(keys) & set(other)
    assert list(page_keys(tokens[64:], parent=keys[0])) == keys[1:]
    assert list(page_keys(tokens[64:])) != keys[1:]


def test_duplicate_page_is_found_once():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"text")
    pool.publish(second, b"text")
    assert pool.find([b"text"]) == [first]
    pool.release([first])
    pool.release([second])
    assert (pool.idle, pool.available) == (1, 2)


def test_pool_without_pages_raises():
    with pytest.raises(ConfigError, match="pages must be a whole number of at least 1"):
        BlockPool(0)
