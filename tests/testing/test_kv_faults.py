from __future__ import annotations

import threading

import pytest

from trencadis.errors import TransferError
from trencadis_testing.kv_faults import CALLS, DictStore, Fault, Faults, FaultyStore

KEYS = ["kv1/a/1", "kv1/a/2", "kv1/a/3"]
OBJECTS = [[memoryview(bytes([i] * 100)), memoryview(bytes([i] * 28))] for i in (1, 2, 3)]


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def store(faults: Faults) -> FaultyStore:
    store = FaultyStore(DictStore({}), faults)
    assert store.put(KEYS, OBJECTS) == 3
    return store


def read(store, keys=KEYS):
    """Return what was read, None for what is not there."""
    targets = [bytearray(200) for _ in keys]
    sizes = store.get(keys, [memoryview(target) for target in targets])
    return [None if size < 0 else bytes(target[:size]) for size, target in zip(sizes, targets, strict=True)]


def whole(*numbers):
    return [bytes([number] * 128) for number in numbers]


def test_dictionary_store_keeps_no_more_than_it_has_room_for_and_reads_no_more_than_the_target_holds():
    store = DictStore({}, max_objects=2)
    assert store.put(KEYS, OBJECTS) == 2
    assert store.put(KEYS[:1], OBJECTS[1:2]) == 1
    assert read(store)[:1] == whole(2)
    assert store.get(KEYS[:1], [memoryview(bytearray(127))]) == [-1]
    store.interrupt()
    store.close()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.GONE, [*whole(1), None, None]),
        (Fault.CUT, [one[:64] for one in whole(1, 2, 3)]),
        (Fault.EMPTY, [b"", b"", b""]),
        (Fault.SWAPPED, whole(2, 1, 1)),
        (Fault.FLIPPED, [one[:-1] + bytes([one[0] ^ 1]) for one in whole(1, 2, 3)]),
        (Fault.HEADER, [one[:20] + bytes([one[0] ^ 1]) + one[21:] for one in whole(1, 2, 3)]),
    ],
)
def test_objects_are_spoiled_as_asked_for_and_whole_again_afterwards(store, faults, fault, expected):
    faults.begin(fault, calls={"get"})
    assert read(store) == expected
    faults.end()
    assert read(store) == whole(1, 2, 3)
    assert faults.num_injected == 1


@pytest.mark.parametrize(("fault", "num_found"), [(Fault.CLAIMS, 3), (Fault.DENIES, 0)])
def test_lookups_lie(store, faults, fault, num_found):
    store.delete(KEYS[1:2])
    faults.begin(fault, calls={"contains"})
    assert store.contains(KEYS) == num_found


@pytest.mark.parametrize(
    ("fault", "said", "kept"),
    [(Fault.FULL, 0, []), (Fault.FORGETS, 3, []), (Fault.HALF, 1, [1]), (Fault.CUT, 3, [1, 2, 3])],
)
def test_puts_keep_less_than_they_should(faults, fault, said, kept):
    objects: dict[str, bytes] = {}
    store = FaultyStore(DictStore(objects), faults)
    faults.begin(fault, calls={"put"})
    assert store.put(KEYS, OBJECTS) == said
    assert [value[0] for value in objects.values()] == kept
    assert all(len(value) == (114 if fault is Fault.CUT else 128) for value in objects.values())


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize(("fault", "error"), [(Fault.REFUSES, TransferError), (Fault.RAISES, RuntimeError)])
def test_every_call_can_raise(store, faults, call, fault, error):
    faults.begin(fault, calls={call})
    arguments = {"get": (KEYS, []), "put": (KEYS, OBJECTS)}.get(call, (KEYS,))
    with pytest.raises(error, match=f"{call}, as it was told"):
        getattr(store, call)(*arguments)
    assert store.contains(KEYS) == 3 if call != "contains" else read(store) == whole(1, 2, 3)


def test_another_engines_key_is_never_swapped_in(faults):
    store = FaultyStore(DictStore({}), faults)
    store.put(["kv1/a/1", "kv1/b/1"], OBJECTS[:2])
    faults.begin(Fault.SWAPPED)
    assert read(store, ["kv1/a/1"]) == whole(1)


def stalled(store, faults):
    """Start a call that stalls; returns a function that waits for its end, and returns what it gave."""
    ended: list[object] = []

    def call():
        try:
            ended.append(store.contains(KEYS))
        except TransferError as error:
            ended.append(error.cause)

    faults.begin(Fault.STALLS)
    thread = threading.Thread(target=call)
    thread.start()

    def wait():
        thread.join(60)
        return ended

    while not store._is_busy:
        thread.join(0.001)
    return wait


def test_a_stalled_call_raises_when_it_is_interrupted_and_the_next_one_is_not_interrupted(store, faults):
    wait = stalled(store, faults)
    store.interrupt()
    assert wait() == ["deadline"]
    faults.end()
    assert store.contains(KEYS) == 3


def test_a_stalled_call_goes_on_when_the_fault_ends(store, faults):
    wait = stalled(store, faults)
    faults.end()
    assert wait() == [3]


def test_closing_wakes_a_stalled_call(store, faults):
    wait = stalled(store, faults)
    store.close()
    assert wait() == ["deadline"]
