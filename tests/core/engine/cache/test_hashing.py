from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.engine.cache import hashing
from trencadis.engine.cache.hashing import SEGMENT_BLOCKS, BlockHasher

TOKENS = np.arange(100, 112, dtype=np.int32)


def hashes(tokens=TOKENS, *, key: str = "", compatibility: str = "model", salt: str = "", num_blocks: int = 3):
    chain: list[bytes] = []
    BlockHasher(key=key, compatibility=compatibility, block_size=4).extend(
        chain, tokens, num_blocks=num_blocks, salt=salt
    )
    return chain


def test_chain_is_what_its_definition_says() -> None:
    key = hashlib.blake2b(b"secret", digest_size=32).digest()
    previous = hashlib.blake2b(b"model\0blue", key=key, person=b"kv1-root", digest_size=32).digest()
    expected = []
    for i in range(3):
        words = b"".join(int(token).to_bytes(4, "little") for token in TOKENS[4 * i : 4 * i + 4])
        previous = hashlib.blake2b(previous + words, digest_size=32).digest()
        expected.append(previous)
    assert hashes(key="secret", salt="blue") == expected


def test_everything_before_a_block_is_part_of_its_identity() -> None:
    changed = TOKENS.copy()
    changed[0] += 1
    assert not set(hashes(changed)) & set(hashes())


def test_salt_key_and_model_each_keep_chains_apart() -> None:
    chains = [hashes(), hashes(salt="a"), hashes(key="k"), hashes(compatibility="other")]
    assert len({h for chain in chains for h in chain}) == 12


def test_no_salt_makes_up_for_another_or_for_the_mark_of_a_shared_prefix() -> None:
    hasher = BlockHasher(key="", compatibility="model", block_size=4)
    roots = [hasher.root(salt) for salt in ("", "a", "\0a", "a\0")]
    assert len({*roots, hasher.shared_root()}) == 5


@settings(phases=[Phase.explicit, Phase.generate], max_examples=200)
@given(
    prefixes=st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=9), max_size=3),
    one=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    other=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    same_salt=st.booleans(),
)
def test_two_salts_share_exactly_the_blocks_that_a_listed_prefix_holds(
    prefixes: list[list[int]], one: list[int], other: list[int], cuts: list[int], same_salt: bool
) -> None:
    """Two bits of vocabulary, so that prompts often begin alike; the chain is made in parts, as an engine does."""
    size = 2
    hasher = BlockHasher(key="", compatibility="m", block_size=size, shared_prefixes=prefixes)
    chains: list[list[bytes]] = [[], []]
    for chain, tokens, salt in zip(chains, (one, other), ("a", "a" if same_salt else "b"), strict=True):
        for num_blocks in (*sorted(cuts), 6):
            hasher.extend(chain, np.array(tokens, np.int32), num_blocks=num_blocks, salt=salt)
    for i in range(6):
        start = one[: (i + 1) * size]
        alike = start == other[: (i + 1) * size]
        listed = any(prefix[: (i + 1) * size] == start for prefix in prefixes)
        assert (chains[0][i] == chains[1][i]) is (alike and (same_salt or listed))


def one_by_one(hasher: BlockHasher, tokens, *, salt: str) -> list[bytes]:
    """Return the chain by its definition, a block at a time, so that no segment is looked up."""
    chain: list[bytes] = []
    for num_blocks in range(1, len(tokens) // hasher.block_size + 1):
        hasher.extend(chain, tokens, num_blocks=num_blocks, salt=salt)
    return chain


@settings(max_examples=20, deadline=None)
@given(
    starts=st.lists(st.integers(0, 3 * SEGMENT_BLOCKS), min_size=1, max_size=4),
    changed=st.integers(0, 12 * SEGMENT_BLOCKS - 1),
    salts=st.lists(st.sampled_from(["", "a", "b"]), min_size=4, max_size=4),
    size=st.sampled_from([2, 4]),
)
def test_segments_that_are_remembered_give_the_chain_of_the_definition(starts, changed, salts, size) -> None:
    """Prompts that share beginnings, begun anywhere, under several salts, keys and block sizes."""
    tokens = np.arange(12 * SEGMENT_BLOCKS, dtype=np.int32) % 7  # equal runs of tokens at other depths
    other = tokens.copy()
    other[changed] += 1
    for start, salt in zip(starts, salts, strict=False):
        for key, prompt in (("", tokens), ("", other), ("k", tokens)):
            hasher = BlockHasher(key=key, compatibility="model", block_size=size)
            expected = one_by_one(hasher, prompt, salt=salt)
            chain: list[bytes] = []
            for num_blocks in (start, len(prompt) // size):
                hasher.extend(chain, prompt, num_blocks=num_blocks, salt=salt)
            assert chain == expected


def test_remembered_segments_are_bounded_and_the_oldest_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(hashing, "_segments", OrderedDict())
    monkeypatch.setattr(hashing, "MAX_SEGMENTS", 2)
    hasher = BlockHasher(key="", compatibility="model", block_size=1)

    def keys(salt: str) -> list[bytes]:
        hasher.extend([], np.zeros(SEGMENT_BLOCKS, np.int32), num_blocks=SEGMENT_BLOCKS, salt=salt)
        return list(hashing._segments)

    one, two, three, four = (hasher.root(salt) for salt in "1234")
    assert [keys("1"), keys("2")] == [[one], [one, two]]
    assert keys("1") == [two, one], "the one that was used last is the newest"
    assert [keys("3"), keys("4")] == [[one, three], [three, four]]
