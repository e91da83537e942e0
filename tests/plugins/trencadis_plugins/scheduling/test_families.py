from __future__ import annotations

import numpy as np

from trencadis_plugins.scheduling.families import Families


def families_of(families, *slots):
    return families.of(np.array(slots, np.int32)).tolist()


def test_equal_beginnings_salts_and_adapters_are_one_family(request_of):
    families = Families(3)
    prompts = {0: (1, 2, 3, 4), 1: (1, 2, 3, 9), 2: (1, 2, 4, 4), 3: (1, 2, 3)}
    for slot, prompt in prompts.items():
        families.add(slot, request_of(str(slot), prompt_token_ids=prompt))
    families.add(4, request_of("4", prompt_token_ids=prompts[0], cache_salt="other"))
    families.add(5, request_of("5", prompt_token_ids=prompts[0], adapter="french"))
    assert families_of(families, 0, 1, 2, 3, 4, 5) == [1, 1, 2, 0, 3, 4]


def test_numbers_are_never_used_again(request_of):
    families = Families(2)
    for slot in (0, 1):
        families.add(slot, request_of(str(slot), prompt_token_ids=(5, 6, 7)))
    families.remove(0)
    assert families_of(families, 0, 1) == [0, 1]
    families.remove(1)
    assert len(families) == 0
    families.add(0, request_of("0", prompt_token_ids=(5, 6, 7)))
    assert families_of(families, 0) == [2]


def test_removing_who_is_of_no_family_changes_nothing(request_of):
    families = Families(0)
    families.add(0, request_of("0"))
    families.remove(0)
    families.remove(77)
    assert len(families) == 0
