from __future__ import annotations

from trencadis_plugins.eviction.tracking import TrackingPolicy


class Diary(TrackingPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.candidates: list[int] = []

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        self.lines.append(f"enter {block} {key.decode()} {depth} {salt}")

    def reuse(self, block: int) -> None:
        self.lines.append(f"reuse {block}")

    def offer(self, block: int) -> None:
        self.candidates.append(block)

    def withdraw(self, block: int) -> None:
        if block in self.candidates:
            self.candidates.remove(block)

    def choose(self) -> int:
        return self.candidates.pop(0)

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        self.lines.append(f"{'evict' if evicted else 'lose'} {block} {key.decode()} of {self.capacity}")


def used(diary: Diary, block: int, key: str, depth: int = 0) -> list[str]:
    diary.lines.clear()
    diary.on_use([block], keys=[key.encode()], depths=[depth], salt="s", now_s=1.0)
    return diary.lines


def test_content_enters_once_and_is_then_used_again() -> None:
    diary = Diary()
    assert used(diary, 1, "a", 4) == ["enter 1 a 4 s"]
    assert used(diary, 1, "a") == ["reuse 1"]
    assert used(diary, 1, "b") == ["lose 1 a of 0", "enter 1 b 0 s"]


def test_block_never_used_enters_without_a_key_when_it_is_freed() -> None:
    diary = Diary()
    diary.on_free([3], depths=[2], now_s=0.0)
    assert diary.lines == ["enter 3  2 "]
    assert used(diary, 3, "a") == ["lose 3  of 0", "enter 3 a 0 s"]
    assert diary.candidates == []


def test_evicted_content_leaves_with_its_key_and_the_capacity_is_what_stays() -> None:
    diary = Diary()
    for block, key in ((1, "a"), (2, "b"), (3, "c")):
        used(diary, block, key)
    diary.on_free([1, 2], depths=[0, 0], now_s=0.0)
    diary.lines.clear()
    assert diary.victims(1) == [1]
    assert diary.lines == ["evict 1 a of 2"]
    assert used(diary, 1, "a") == ["enter 1 a 0 s"]


def test_forgotten_content_is_lost_and_an_unknown_one_left_alone() -> None:
    diary = Diary()
    used(diary, 1, "a")
    diary.on_free([1], depths=[0], now_s=0.0)
    diary.lines.clear()
    diary.forget([1, 9])
    assert (diary.lines, diary.candidates) == (["lose 1 a of 0"], [])
