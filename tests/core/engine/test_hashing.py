from __future__ import annotations

import hashlib

import numpy as np

from trencadis.engine.hashing import BlockHasher

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


def test_extending_in_parts_gives_the_same_chain() -> None:
    hasher = BlockHasher(key="", compatibility="model", block_size=4)
    chain: list[bytes] = []
    for num_blocks in (1, 1, 3):
        hasher.extend(chain, TOKENS, num_blocks=num_blocks, salt="")
    assert chain == hashes()


def test_everything_before_a_block_is_part_of_its_identity() -> None:
    changed = TOKENS.copy()
    changed[0] += 1
    assert not set(hashes(changed)) & set(hashes())


def test_salt_key_and_model_each_keep_chains_apart() -> None:
    chains = [hashes(), hashes(salt="a"), hashes(key="k"), hashes(compatibility="other")]
    assert len({h for chain in chains for h in chain}) == 12
