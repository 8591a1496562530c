"""Which block leaves a tier next: by hand, and against a model that looks at all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from jaxserve.moves import Label
from jaxserve.scheduling.tier_index import Eviction, TierIndex
from tests.scheduling.labels import key, keys, label

POLICIES: list[Eviction] = ["lru", "lfu", "cost"]


def evict(index: TierIndex) -> str | None:
    """The path of the block that leaves."""
    victim = index.victim()
    if victim is None:
        return None
    index.remove(victim)
    return victim.decode().rstrip(".")


def filled(
    eviction: Eviction,
    *paths: str,
    compute_s: Callable[[int], float] = lambda column: 1.0,
) -> TierIndex:
    index = TierIndex(eviction, compute_s)
    for path in paths:
        index.add(label(path))
    return index


def test_it_knows_what_is_here() -> None:
    index = filled("lru", "a", "ab")
    index.add(label("ac"), payload=7)
    index.add(label("xy"))  # whose parent is not here
    assert len(index) == index.evictable == 4
    assert key("ab") in index and key("x") not in index
    assert index.label(key("ab")) == label("ab")
    assert index.payload(key("ac")) == 7
    assert index.payload(key("ab")) is None and index.payload(key("x")) is None
    assert index.children(key("a")) == [key("ab"), key("ac")]
    assert index.children(key("x")) == [key("xy")]
    assert index.children(key("ab")) == []
    assert index.remove(key("ac")) == 7 and index.remove(key("ab")) is None
    assert index.children(key("a")) == [] and key("ac") not in index
    assert index.labels() == [label("a"), label("xy")]


def test_the_least_recently_used_leaves_and_children_before_parents() -> None:
    index = filled("lru", "a", "ab", "abc", "x", "xy")
    index.use(keys("a"))  # a parent is used with its children or alone
    assert index.labels() == [label(path) for path in ("ab", "abc", "x", "xy", "a")]
    assert [evict(index) for _ in range(6)] == ["abc", "ab", "xy", "x", "a", None]


def test_of_a_chain_used_at_once_the_deepest_is_the_oldest() -> None:
    index = filled("lru", "a", "ab", "abc", "ad")
    index.use(keys("abc"))
    assert index.labels() == [label(path) for path in ("ad", "abc", "ab", "a")]
    index.use([key("x"), key("ad")])  # what is not here does not count
    assert index.labels() == [label(path) for path in ("abc", "ab", "a", "ad")]


def test_the_least_often_used_leaves_and_of_equals_the_older() -> None:
    index = filled("lfu", "a", "b", "c", "d")
    for path in ("a", "a", "b", "d", "c"):
        index.use(keys(path))
    index.add(label("e"))
    # Uses: a 3, b 2, c 2, d 2, e 1; of the twos b was used first, then d.
    assert [evict(index) for _ in range(6)] == ["e", "b", "d", "c", "a", None]


def test_a_block_that_comes_again_starts_anew() -> None:
    index = filled("lfu", "a", "b")
    for _ in range(3):
        index.use(keys("a"))
    index.remove(key("a"))
    index.use(keys("b"))
    index.add(label("a"))
    assert evict(index) == "a"


def test_greedy_dual_by_hand() -> None:
    # Seconds to compute the block of a column: 1, 2, 3, ...
    index = filled("cost", "aaa", "bbbbbb", "c", compute_s=lambda column: column + 1.0)
    # Worth: aaa 3, bbbbbb 6, c 1.
    assert evict(index) == "c"  # what comes now is worth 1 more
    index.add(label("dd"))  # 1 + 2, as much as aaa, which is older
    assert evict(index) == "aaa"  # 3 from now on
    index.use([key("dd")])  # 3 + 2
    index.add(label("e"))  # 3 + 1
    assert evict(index) == "e"  # 4
    assert evict(index) == "dd"  # 5
    index.add(label("ff"))  # 5 + 2: it outlives what is dearer and has grown old
    assert evict(index) == "bbbbbb"  # 6
    index.add(label("g"))  # 6 + 1, as ff
    assert [evict(index) for _ in range(3)] == ["ff", "g", None]


def test_greedy_dual_takes_a_cheap_block_that_is_used_for_one_that_is_not() -> None:
    index = filled("cost", "aaaa", "b", compute_s=lambda column: column + 1.0)
    for path in ("c", "d", "e"):  # worth 1, 2 and 3 when they leave
        index.add(label(path))
        index.use(keys("b"))
        assert evict(index) == path
    index.use(keys("b"))  # it is worth 3 + 1, as aaaa, and younger
    assert [evict(index) for _ in range(3)] == ["aaaa", "b", None]


@pytest.mark.parametrize("eviction", POLICIES)
def test_pinned_blocks_stay_and_those_that_come_later_too(eviction: Eviction) -> None:
    index = filled(eviction, "a", "ab", "x")
    index.pin(keys("abc"))
    assert index.evictable == 1
    index.add(label("abc"))  # it was pinned before it came
    index.add(label("abd"))
    assert index.evictable == 2 and len(index) == 5
    index.pin(keys("ab"))
    index.unpin(keys("abc"))
    assert index.evictable == 3 and not index.holds_no_pins()
    assert {evict(index), evict(index), evict(index)} == {"abc", "abd", "x"}
    assert evict(index) is None and index.evictable == 0
    index.unpin(keys("ab"))
    assert index.holds_no_pins() and index.evictable == 2
    assert [evict(index), evict(index), evict(index)] == ["ab", "a", None]


def test_a_pinned_block_can_be_lost_and_is_pinned_when_it_is_back() -> None:
    index = filled("lru", "a")
    index.pin(keys("a"))
    index.remove(key("a"))
    assert len(index) == index.evictable == 0 and not index.holds_no_pins()
    index.add(label("a"))
    assert index.evictable == 0 and evict(index) is None
    index.unpin(keys("a"))
    assert evict(index) == "a"


# A model ------------------------------------------------------------------------------


class Model:
    """The same, by looking at every block each time.

    Attributes:
      when: number of the last use, and place in it: a parent's is the later.
    """

    def __init__(self, eviction: Eviction, compute_s: Callable[[int], float]):
        self.eviction = eviction
        self.compute_s = compute_s
        self.labels: dict[bytes, Label] = {}
        self.payloads: dict[bytes, int | None] = {}
        self.uses: Counter[bytes] = Counter()
        self.when: dict[bytes, tuple[int, int]] = {}
        self.aged: dict[bytes, float] = {}  # worth of the last victim at its last use
        self.pins: Counter[bytes] = Counter()
        self.last_worth = 0.0
        self.now = 0

    def add(self, new: Label, payload: int | None) -> None:
        self.labels[new.key], self.payloads[new.key] = new, payload
        self.uses[new.key] = 0
        self.use([new.key])

    def use(self, chain: list[bytes]) -> None:
        self.now += 1
        for depth, each in enumerate(chain):
            if each in self.labels:
                self.uses[each] += 1
                self.when[each] = self.now, -depth
                self.aged[each] = self.last_worth

    def remove(self, gone: bytes) -> int | None:
        del self.labels[gone], self.when[gone], self.uses[gone], self.aged[gone]
        return self.payloads.pop(gone)

    def children(self, parent: bytes) -> list[bytes]:
        return sorted(k for k, each in self.labels.items() if each.parent == parent)

    def worth(self, each: bytes) -> float:
        if self.eviction == "cost":
            return self.aged[each] + self.compute_s(self.labels[each].column)
        return {"lru": 0.0, "lfu": self.uses[each]}[self.eviction]

    def victim(self) -> bytes | None:
        may = [k for k in self.labels if not self.children(k) and not self.pins[k]]
        if not may:
            return None
        worth, _, victim = min((self.worth(k), self.when[k], k) for k in may)
        self.last_worth = max(self.last_worth, worth)
        return victim

    def could_leave(self) -> int:
        """Blocks that leave if one after another does."""
        left = dict(self.labels)
        while True:
            parents = {each.parent for each in left.values()}
            may = [k for k in left if k not in parents and not self.pins[k]]
            if not may:
                return len(self.labels) - len(left)
            for each in may:
                del left[each]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eviction", POLICIES)
def test_random_use_agrees_with_a_model(eviction: Eviction, seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(5)]
    index = TierIndex(eviction, costs.__getitem__)
    model = Model(eviction, costs.__getitem__)
    pinned: list[list[bytes]] = []
    evicted = lost = 0

    def path() -> str:
        return "".join(rng.choice("abc") for _ in range(rng.randint(1, 5)))

    for step in range(1500):
        action = rng.choices(
            ["add", "use", "pin", "unpin", "evict", "look", "lose"],
            [10, 6, 3, 3, 5 if len(model.labels) < 40 else 15, 2, 1],
        )[0]
        if action == "add":
            new, payload = label(path()), rng.choice([None, step])
            if new.key not in model.labels:
                index.add(new, payload)
                model.add(new, payload)
        elif action == "use":
            chain = keys(path())
            index.use(chain)
            model.use(chain)
        elif action == "pin" and len(pinned) < 6:
            pinned.append(keys(path()))
            index.pin(pinned[-1])
            model.pins.update(pinned[-1])
        elif action == "unpin" and pinned:
            chain = pinned.pop(rng.randrange(len(pinned)))
            index.unpin(chain)
            model.pins.subtract(chain)
        elif action == "evict":
            victim = index.victim()
            assert victim == model.victim()
            if victim is not None:
                assert not model.children(victim) and not model.pins[victim]
                assert index.remove(victim) == model.remove(victim)
                evicted += 1
        elif action == "look":  # a victim that is not taken may stay
            assert index.victim() == model.victim()
        elif action == "lose" and model.labels:  # pinned or not, a parent or not
            gone = rng.choice(sorted(model.labels))
            assert index.remove(gone) == model.remove(gone)
            lost += 1
        assert len(index) == len(model.labels)
        assert index.evictable == model.could_leave()
        assert index.holds_no_pins() == (not pinned)
        if step % 10 == 0:
            by_use = sorted(model.labels, key=model.when.__getitem__)
            assert index.labels() == [model.labels[k] for k in by_use]
            for each in keys(path()):
                assert (each in index) == (each in model.labels)
                assert index.payload(each) == model.payloads.get(each)
                assert index.children(each) == model.children(each)
    assert evicted > 150 and lost > 20
    for chain in pinned:
        index.unpin(chain)
        model.pins.subtract(chain)
    while model.labels:
        victim = index.victim()
        assert victim is not None and victim == model.victim()
        index.remove(victim)
        model.remove(victim)
    assert index.victim() is None and len(index) == index.evictable == 0


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("how", ["use", "pin", "pin one", "come and go", "child"])
def test_what_it_remembers_is_bounded_by_what_is_here(
    how: str, eviction: Eviction
) -> None:
    index = filled(eviction, "a", "b", "ab")
    most = 0
    for _ in range(2000):
        if how == "use":
            index.use(keys("ab"))
        elif how == "pin":
            index.pin(keys("ab"))
            index.unpin(keys("ab"))
        elif how == "pin one":
            index.pin(keys("b"))
            index.unpin(keys("b"))
        elif how == "come and go":
            index.remove(key("b"))
            index.add(label("b"))
        else:
            index.remove(key("ab"))
            index.add(label("ab"))
        most = max(most, len(index._heap))  # private: nothing else shows it
    assert most <= 100
    assert index.evictable == 3
