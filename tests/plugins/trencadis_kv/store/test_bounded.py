from __future__ import annotations

from trencadis_kv.store.bounded import BoundedDict, RecentHashes


def test_full_dictionary_forgets_what_was_set_longest_ago():
    numbers = BoundedDict(2)
    numbers["a"], numbers["b"], numbers["a"], numbers["c"] = 1, 2, 3, 4
    assert dict(numbers) == {"a": 3, "c": 4}


def test_remembered_hashes_are_known_until_they_are_discarded():
    recent = RecentHashes(8)
    recent.add([b"a", b"b"])
    assert recent.unknown([b"a", b"x", b"b"]) == [1]
    recent.discard([b"a", b"never there"])
    assert recent.unknown([b"a", b"b"]) == [0]


def test_only_so_many_hashes_are_remembered():
    recent = RecentHashes(2)
    recent.add([b"a", b"b", b"c"])
    assert recent.unknown([b"a", b"b", b"c"]) == [0]
