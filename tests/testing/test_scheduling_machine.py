"""The worlds of random histories meet every feature."""

from __future__ import annotations

from trencadis_testing.scheduling_machine import World


def test_a_few_histories_meet_every_feature_and_sixty_every_pair_of_them() -> None:
    def features(world: World) -> set[str]:
        found = {f"{name} {value}" for name, value in world.sizes.items()} | {world.layout}
        return found | ({"drafts"} if world.has_drafts else set()) | ({"transfers"} if world.transfers else set())

    worlds = [features(World.numbered(number)) for number in range(60)]
    wanted = ["preemption swap", "preemption recompute", "drafts", "transfers", "padded", "ragged"]
    wanted += ["async_scheduling True", "async_scheduling False", "prefix_caching True"]
    assert set(wanted) <= set().union(*worlds[:8])
    impossible = {"drafts", "transfers"}, {"ragged", "padded"}
    for one in wanted:
        for other in wanted:
            is_possible = {one, other} not in impossible and (one == other or one.split()[0] != other.split()[0])
            assert not is_possible or any({one, other} <= world for world in worlds), (one, other)
    assert World.numbered(7) == World.numbered(7)
