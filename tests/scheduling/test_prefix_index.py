"""Names of cached blocks: keys that cannot collide, pins, and the order of eviction."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxserve.moves import Label
from jaxserve.scheduling.prefix_index import PrefixIndex, extend_keys, root_key


def keys_of(
    tokens: list[int], size: int, salt: str | None = None, version: int = 0
) -> list[bytes]:
    """Chained keys of the full blocks of the tokens."""
    keys: list[bytes] = []
    extend_keys(keys, root_key(salt, version), tokens, size)
    return keys


def _evict(index: PrefixIndex) -> int:
    handle = index.oldest
    index.evict(handle)
    return handle


# Keys ---------------------------------------------------------------------------------

SALTS = [
    None,
    "None",
    "0",
    "a",
    "aa",
    "b",
    "ab",
    "weights",
    "salt",
    "\x00",
    "\x00\x00",
    "\x01\x00\x00\x00\x00\x00\x00\x00a",  # looks like a framed "a"
    "1\x04\x00\x00\x00\x00\x00\x00\x00salt",  # a version, then a frame
    "a\x04\x00\x00\x00\x00\x00\x00\x00salt\x01\x00\x00\x00\x00\x00\x00\x00b",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}",
]


def test_a_key_names_one_salt_one_version_and_one_prefix() -> None:
    """No two (salt, weights, tokens) share a key, however they are split."""
    owner: dict[bytes, tuple] = {}
    sequences = [
        list(tokens)
        for length in (2, 4)
        for tokens in itertools.product([0, 1, 256, 2**31 - 1], repeat=length)
    ]
    for salt, version in itertools.product(SALTS, (0, 1, 10, 11)):
        for tokens in sequences:
            for i, key in enumerate(keys_of(tokens, 2, salt, version)):
                mine = (salt, version, tuple(tokens[: 2 * (i + 1)]))
                assert owner.setdefault(key, mine) == mine
    # 16 blocks of two tokens and 256 pairs of them, for each salt and version.
    assert len(owner) == len(SALTS) * 4 * (16 + 256)


def test_only_full_blocks_have_keys_and_they_extend_in_place() -> None:
    tokens = list(range(11))
    whole = keys_of(tokens, 4)
    assert len(whole) == 2 and keys_of(tokens[:3], 4) == []
    grown: list[bytes] = []
    for end in range(12):
        extend_keys(grown, root_key(None, 0), tokens[:end], 4)
        assert grown == whole[: end // 4]
    # A block's key depends on every token before it.
    for at in range(8):
        other = list(tokens)
        other[at] += 1
        changed = keys_of(other, 4)
        assert changed[: at // 4] == whole[: at // 4]
        assert not set(changed[at // 4 :]) & set(whole)


# Pins and eviction --------------------------------------------------------------------


def publish(index: PrefixIndex, key: bytes, *, fresh: bool) -> int | None:
    """A handle for a key, of which no more than that counts here."""
    return index.publish(Label(key, b"parent"), fresh=fresh)


def chain(index: PrefixIndex, keys: list[bytes]) -> list[int]:
    """Pin what is there of a chain and publish the rest."""
    handles = index.match(keys)
    index.pin(handles)
    for key in keys[len(handles) :]:
        handle = publish(index, key, fresh=False)
        assert handle is not None
        handles.append(handle)
    return handles


def test_the_least_recently_used_chain_goes_first_deepest_block_first() -> None:
    index = PrefixIndex(16)
    a, b = keys_of([1] * 6, 2), keys_of([2] * 4, 2)
    handles_a, handles_b = chain(index, a), chain(index, b)
    index.unpin(handles_a)
    index.unpin(handles_b)
    assert index.match(a) == handles_a and index.evictable == 5
    # Used again: a's first block alone becomes the most recent.
    index.pin(handles_a[:1])
    index.unpin(handles_a[:1])
    order = [_evict(index) for _ in range(5)]
    assert order == [
        handles_a[2],
        handles_a[1],
        handles_b[1],
        handles_b[0],
        handles_a[0],
    ]
    assert index.live == index.evictable == 0 and index.match(a) == []


def test_a_pinned_chain_stays_and_a_match_ends_at_the_first_gap() -> None:
    index = PrefixIndex(16)
    keys = keys_of(list(range(8)), 2)
    handles = chain(index, keys)
    index.pin(handles[:2])  # another holds the first two
    index.unpin(handles)
    assert index.evictable == 2
    assert [_evict(index), _evict(index)] == [handles[3], handles[2]]
    assert index.match(keys) == handles[:2] and index.evictable == 0
    assert index.pins(handles[0]) == 1
    index.unpin(handles[:2])
    assert index.evictable == 2


def test_what_a_plan_publishes_is_found_from_the_next_plan_on() -> None:
    index = PrefixIndex(4)
    first, second = keys_of([1, 2, 3, 4], 2)
    index.begin_plan()
    sealed = publish(index, first, fresh=False)
    fresh = publish(index, second, fresh=True)
    assert index.match([first, second]) == [sealed]
    assert index.find(second) == fresh
    index.begin_plan()
    assert index.match([first, second]) == [sealed, fresh]


def test_a_handle_retired_in_a_plan_is_not_reused_in_it() -> None:
    index = PrefixIndex(2)
    keys = keys_of(list(range(8)), 2)
    handles = chain(index, keys[:2])
    assert publish(index, keys[2], fresh=False) is None  # every handle is in use
    index.unpin(handles)
    gone = _evict(index)
    assert publish(index, keys[2], fresh=False) is None
    index.begin_plan()
    assert publish(index, keys[2], fresh=False) == gone


def test_reset_forgets_names_and_keeps_pins() -> None:
    index = PrefixIndex(16)
    idle, held = keys_of([1] * 4, 2), keys_of([2] * 4, 2)
    idle_handles, held_handles = chain(index, idle), chain(index, held)
    index.unpin(idle_handles)
    assert not index.has_forgotten
    index.reset()
    assert index.match(idle) == index.match(held) == []
    assert index.live == 4 and index.evictable == 2 and index.has_forgotten
    # Names can be given anew beside blocks that are still held, and go last.
    again = chain(index, held)
    assert not set(again) & set(held_handles)
    index.unpin(again)
    index.unpin(held_handles)
    evicted = []
    while index.has_forgotten:
        evicted.append(_evict(index))
    assert sorted(evicted) == sorted(idle_handles + held_handles)
    assert index.match(held) == again and index.live == index.evictable == 2
    index.reset()
    assert index.evictable == 2 and index.has_forgotten


def published(index: PrefixIndex, keys: list[bytes]) -> list[int]:
    """A chain in use, each block's label with its true parent."""
    handles = []
    for column, (key, parent) in enumerate(
        zip(keys, [root_key(None, 0), *keys], strict=False)
    ):
        handle = index.publish(Label(key, parent, column), fresh=False)
        assert handle is not None and index.label(handle) == Label(key, parent, column)
        handles.append(handle)
    return handles


def test_labels_are_listed_by_use_and_those_in_use_last() -> None:
    index = PrefixIndex(16)
    a, b, used = (keys_of([token] * 6, 2) for token in (1, 2, 3))
    handles_a, _, handles_b = (published(index, keys) for keys in (a, used, b))
    index.unpin(handles_b)
    index.unpin(handles_a)
    listed = [label.key for _, label in index.labels()]
    assert listed[:6] == [*b[::-1], *a[::-1]] and sorted(listed[6:]) == sorted(used)
    assert all(index.label(handle) == label for handle, label in index.labels())
    index.reset()
    assert index.labels() == [] and index.label(handles_a[0]) is None


def test_of_labels_the_last_ones_are_whole_chains() -> None:
    """So many as a disk holds are written: no block without those before it."""
    index = PrefixIndex(16)
    idle, used = (keys_of([token] * 6, 2) for token in (1, 2))
    index.unpin(published(index, idle))
    published(index, used)
    labels = [label for _, label in index.labels()]
    for start in range(len(labels)):
        kept = {label.key for label in labels[start:]} | {root_key(None, 0)}
        assert all(label.parent in kept for label in labels[start:])


@pytest.mark.parametrize("seed", range(6))
def test_random_use_agrees_with_a_model(seed: int) -> None:
    """Users pin chains; the model keeps when each handle was last let go."""
    rng = random.Random(seed)
    index = PrefixIndex(40)
    pins: dict[int, int] = {}
    name: dict[int, bytes | None] = {}
    idle_since: dict[int, tuple[int, int]] = {}
    parent = {}  # of the named ones
    users: list[list[int]] = []
    fresh: set[int] = set()
    retired: set[int] = set()
    evictions = 0
    for now in range(1500):
        index.begin_plan()
        fresh.clear()
        retired.clear()
        for _ in range(rng.randint(1, 3)):
            action = rng.choice(["use", "leave", "evict", "use", "leave", "reset"])
            if action == "use":
                tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 4))]
                keys = keys_of(tokens, 2)
                live = {k: h for h, k in name.items() if k is not None}
                expected = []
                for key in keys:
                    if key not in live or live[key] in fresh:
                        break
                    expected.append(live[key])
                handles = index.match(keys)
                assert handles == expected
                index.pin(handles)
                for handle in handles:
                    pins[handle] += 1
                    idle_since.pop(handle, None)
                for i, key in enumerate(keys[len(handles) :], len(handles)):
                    handle = live.get(key)
                    assert index.find(key) == handle
                    if handle is not None:  # it has a name already: share that
                        index.pin([handle])
                        pins[handle] += 1
                        idle_since.pop(handle, None)
                    else:
                        handle = publish(index, key, fresh=bool(fresh or now % 2))
                        if handle is None:
                            break
                        assert handle not in name and handle not in retired
                        pins[handle], name[handle] = 1, key
                        if fresh or now % 2:
                            fresh.add(handle)
                        if i:
                            parent[handle] = handles[-1]
                    handles.append(handle)
                users.append(handles)
            elif action == "leave" and users:
                handles = users.pop(rng.randrange(len(users)))
                index.unpin(handles)
                for depth, handle in enumerate(handles):
                    pins[handle] -= 1
                    if not pins[handle]:
                        # Forgotten ones before all; else by time, the deepest first.
                        idle_since[handle] = (now, -depth)
            elif action == "evict" and idle_since:
                handle = _evict(index)
                forgotten = {h for h in idle_since if name[h] is None}
                if forgotten:
                    assert handle in forgotten
                else:
                    oldest = min(since for since, _ in idle_since.values())
                    assert idle_since[handle][0] == oldest
                    children = {h for h, p in parent.items() if p == handle}
                    assert not children & name.keys(), "a parent went before its child"
                evictions += 1
                del idle_since[handle], pins[handle], name[handle]
                parent = {h: p for h, p in parent.items() if h != handle != p}
                retired.add(handle)
            elif action == "reset" and rng.random() < 0.1:
                index.reset()
                name = dict.fromkeys(name)
                parent.clear()
            assert index.live == len(name)
            assert index.evictable == len(idle_since)
            assert index.has_forgotten == any(name[h] is None for h in idle_since)
    assert evictions > 100
