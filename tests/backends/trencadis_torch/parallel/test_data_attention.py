"""Ranks with sequences of their own: which tokens are where, modules, whole backends next to one of one rank, and mutants."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.backends import tiny_models
from support.backends.families import MIXTURES, save_family
from support.backends.mixtures import OwnBlocksDriver
from support.backends.passes import make_pass
from support.backends.torch_backends import PLAN as PLAN_OF_60
from support.backends.torch_backends import PROMPTS, load_torch, make_torch
from trencadis.errors import BackendError, CollectiveError, ModelLoadError
from trencadis.interfaces import BlockCopies
from trencadis.records import Bucket, ModelSource, Phase
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver, Work
from trencadis_torch.parallel import data_attention
from trencadis_torch.parallel.data_attention import OwnBlocks, OwnRows, Spread, SpreadExperts, SpreadHead, TokenGather
from trencadis_torch.parallel.experts import OwnExperts
from trencadis_torch.parallel.placement import ExpertSlots
from trencadis_torch.rows import Rows

PLAN = attrs.evolve(PLAN_OF_60, num_blocks=120)
LAYERS = 3


# --------------------------------------------------------------------------------------------------- tokens


def pass_of(rows, lengths, bucket=None):
    return make_pass(bucket, rows, [0] * len(rows), lengths)


@settings(max_examples=40)
@given(
    lengths=st.dictionaries(st.integers(0, 8), st.integers(1, 5), min_size=1), padded=st.booleans(), draw=st.randoms()
)
def test_every_rank_finds_each_token_where_its_own_rank_puts_it(lengths, padded, draw):
    rows = draw.sample(sorted(lengths), len(lengths))
    counts = [lengths[row] for row in rows]
    bucket = Bucket(3, 5, 1, Phase.PREFILL)
    spread = Spread.of(pass_of(rows, counts, bucket), num_ranks=3, num_rows=9, padded=padded)
    held = []  # row and place of each position of each rank, as a rank lays its own out
    for rank, part in enumerate(spread.parts):
        own = []
        for row, count in zip(part.rows.tolist(), part.query_lens.tolist(), strict=True):
            own += [(row, place) for place in range(count)]
            own += [None] * ((5 - count) if padded else 0)
        own += [None] * (spread.num_tokens[rank] - len(own))
        held.append(own)
        assert len(own) == spread.num_tokens[rank] >= 1
    for sequence, (row, count) in enumerate(zip(rows, counts, strict=True)):
        for place in range(count):
            rank, at = divmod(int(spread.firsts[sequence]) + place, spread.most)
            assert held[rank][at] == (row, place)
            assert rank == row // 3
    gathered = [one for own in held for one in [*own, *["padding"] * (spread.most - len(own))]]
    assert [gathered[at] for at in spread.real_rows()] == [one for own in held for one in own]
    is_token = [
        one is not None and one[0] in lengths and one[0] // 3 == rank for rank, own in enumerate(held) for one in own
    ]
    assert spread.counted().tolist() == [int(one) for one in is_token]
    tokens = np.array([int(first) + count - 1 for first, count in zip(spread.firsts, counts, strict=True)])
    places, order = spread.kept(tokens)
    handed = [held[rank][at] for rank, own in enumerate(places.tolist()) for at in own]
    assert [handed[at] for at in order] == [(row, count - 1) for row, count in zip(rows, counts, strict=True)]


def test_copies_are_of_a_ranks_own_blocks_by_its_own_numbers():
    own = OwnBlocks(rank=1, num_blocks=10, num_host_blocks=4)
    sources, targets = own.copies(np.array([3, 12, 19]), np.array([4, 13, 10]))
    assert (sources.tolist(), targets.tolist()) == ([2, 9], [3, 0])
    found = own.swaps(
        outs=BlockCopies(sources=np.array([12, 3]), targets=np.array([5, 0])),
        ins=BlockCopies(sources=np.array([7, 1]), targets=np.array([11, 9])),
    )
    assert (found["outs"].sources.tolist(), found["outs"].targets.tolist()) == ([2], [1])
    assert (found["ins"].sources.tolist(), found["ins"].targets.tolist()) == ([3], [1])


# --------------------------------------------------------------------------------------------------- modules


class Scales(nn.Module):
    """Experts that scale their input, each by another number, and add one."""

    def __init__(self, own):
        super().__init__()
        self.num_experts = len(own)
        self.scales = nn.Parameter(torch.tensor([float(expert + 1) for expert in own]), requires_grad=False)

    def forward(self, x, places, shares):
        return (x * self.scales[places] + 1) * shares


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_the_outputs_of_its_own_tokens(ranks, monkeypatch, dtype, device):
    if device:
        monkeypatch.setattr(OwnExperts, "_compute_own", OwnExperts._compute_all)
    slots = ExpertSlots(num_experts=6, ranks=((0, 3), (5, 1), (2, 4)))
    lengths = [2, 5, 1]
    spread = Spread.of(pass_of([0, 1], [2, 5]), num_ranks=3, num_rows=3, padded=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=generator).to(dtype)
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(8)])
    weights = torch.rand(8, 2, generator=generator).to(dtype)
    expected = ((x[:, None] * (experts[..., None] + 1) + 1) * weights[..., None]).float().sum(1)

    def run(groups):
        gather = TokenGather(groups.tensor)
        module = SpreadExperts(OwnExperts(Scales(slots.ranks[groups.rank]), slots, groups.tensor), gather)
        own = slice(sum(lengths[: groups.rank]), sum(lengths[: groups.rank + 1]))
        with gather.over(spread):
            found = module(x[own], experts[own], weights[own])
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.float(), expected[own], rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-2
        )
        torch.testing.assert_close(module(x, experts, weights).float(), expected, rtol=2e-2, atol=1e-2)
        return dict(groups.tensor.num_calls)

    calls = ranks(run, 3).all
    assert calls[0] == calls[1] == calls[2]
    assert calls[0]["all_gather"] == 1


# ------------------------------------------------------------------------------------------- whole backends


def loaded(ranked, path, size=2, layout="ragged", **options):
    backend = ranked(functools.partial(make_torch, layout, **options), size, expert=size, attention="data")
    backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    return backend


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Return a function that saves a tiny model of a family once."""
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda kind: save_family(kind, root))


@pytest.mark.representatives(1)
@pytest.mark.parametrize("kind", MIXTURES)
def test_greedy_texts_of_a_family_are_those_of_one_process(family, ranked, kind):
    alone = load_torch(family(kind), plan=PLAN, check_model=False)
    texts = BackendDriver(alone, PLAN).generate(PROMPTS, 8)
    for layout in ("ragged", "padded"):
        backend = loaded(ranked, family(kind), layout=layout, check_model=False)
        assert OwnBlocksDriver(backend, PLAN, seed=7).generate(PROMPTS, 8, chunk=7) == texts


def test_a_rank_without_tokens_makes_the_same_calls_and_two_exchanges_a_layer(family, ranked):
    backend = loaded(ranked, family("mixtral"))
    driver = OwnBlocksDriver(backend, PLAN)
    driver.start(0, PROMPTS[0])
    calls = []
    for _ in range(3):
        for groups in backend.ranks.groups:
            groups.tensor.num_calls.clear()
        driver.step([Work(0)])
        calls.append([dict(groups.tensor.num_calls) for groups in backend.ranks.groups])
    for own, idle in calls:
        assert own == idle
        assert (own["all_gather"], own["all_reduce"], own["broadcast"]) == (LAYERS + 2, LAYERS, 1)
    assert driver.output(0) == tiny_models.greedy_reference(family("mixtral"), PROMPTS[0], 3)


def test_each_rank_has_the_keys_of_its_own_sequences_in_as_many_blocks_as_its_part(family, ranked):
    backend = loaded(ranked, family("mixtral"))
    driver = OwnBlocksDriver(backend, PLAN)
    driver.start(0, PROMPTS[0])
    driver.step([Work(0)])
    first, second = (rank.kv_cache() for rank in backend.ranks.all)
    assert first.num_blocks == second.num_blocks == PLAN.num_blocks // 2
    assert first.layout.last_head == second.layout.last_head == 2, "of all KV heads"
    assert first.layout.sums == "+dpep2"
    assert any(bool(keys[:-1].any()) for keys in first.keys)
    assert not any(bool(keys[:-1].any()) for keys in second.keys), "all but the padding block"


def test_texts_that_every_rank_embeds_have_the_vectors_of_one_process(family, ranked):
    texts = [np.array(tokens, np.int32) for tokens in PROMPTS.values()]
    alone = load_torch(family("mixtral"), plan=None)
    found = loaded(ranked, family("mixtral")).embed(texts)
    np.testing.assert_allclose(found, alone.embed(texts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_tokens_of_all_ranks_are_counted_once_and_padding_is_not(family, ranked, layout):
    backend = loaded(ranked, family("mixtral"), layout=layout)
    driver = OwnBlocksDriver(backend, PLAN)
    for row in (0, 1):  # the second rank has none
        driver.start(row, PROMPTS[row])
        driver.step([Work(row)])
    driver.start(3, PROMPTS[3])
    driver.step([Work(0), Work(1), Work(3)])
    text = backend.ranks.all[0].metrics()
    counts = [
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("trencadis_torch_expert_tokens_total")
    ]
    assert sum(counts) == (19 + 5 + 2 + 33) * 2 * LAYERS
    assert backend.ranks.all[1].metrics() == ""


def test_a_share_is_whole_but_for_experts_and_output_projection(family, ranked):
    one = load_torch(family("mixtral"), plan=None)
    whole = dict(one._model.named_parameters())
    for rank in loaded(ranked, family("mixtral"), pack="off").ranks.all:
        for name, parameter in rank._model.named_parameters():
            plain = name.replace(".own.local", "").replace("lm_head.local.local", "lm_head")
            expected = (
                whole[plain].numel() // (2 if "experts" in plain or "lm_head" in plain else 1) if plain in whole else 0
            )
            assert parameter.numel() == expected or plain not in whole, name


def test_branching_drafts_of_two_ranks_are_verified_and_moved_each_on_its_own(family, ranked):
    """Of two branches the second is right, so keys and values move; the other rank's do not, and go on from where they are."""
    texts = {row: tiny_models.greedy_reference(family("mixtral"), PROMPTS[row], 8) for row in (0, 3)}
    driver = OwnBlocksDriver(loaded(ranked, family("mixtral")), PLAN)
    for row in texts:
        driver.start(row, PROMPTS[row])
    driver.step([Work(row) for row in texts])
    for number in (1, 4):
        works = []
        for row, text in texts.items():
            right, after = text[number], text[number + 1]
            wrong = (right + 1) % tiny_models.VOCAB_SIZE
            works.append(Work(row, drafts=(wrong, right, after), parents=(-1, -1, 1)))
        driver.step(works if number == 1 else works[:1])
        assert driver.output(0) == texts[0][: number + 3]
    while len(driver.output(3)) < 8:
        driver.step([Work(0), Work(3)] if len(driver.output(0)) < 8 else [Work(3)])
    assert driver.output(3) == texts[3]
    assert driver.output(0) == texts[0]


# ------------------------------------------------------------------------------------------------- mutants


def leaves_out(kind, method, is_broken):
    """Return a method that, of a rank for which something holds, makes no exchange."""
    right = getattr(kind, method)

    def broken(self, *args, **options):
        return args[0] if is_broken(self) else right(self, *args, **options)

    return broken


def is_idle(module):
    gather = module._gather
    return gather.is_on and not len(gather._spread.sequences[gather.group.rank])


MUTANTS = {
    "block tables by the offset of the first rank": (
        OwnRows,
        "write_tables",
        lambda right: (
            lambda self, writes: Rows.write_tables(
                self, attrs.evolve(writes, block_ids=np.minimum(writes.block_ids, self._own.num_blocks - 1))
            )
        ),
    ),
    "tokens go back to the wrong rank": (
        TokenGather,
        "own_rows",
        lambda right: lambda self, rows, num_tokens: right(self, rows.roll(len(rows) // 2, 0), num_tokens),
    ),
    "rows of the output projection in another order": (
        Spread,
        "kept",
        lambda right: lambda self, tokens: (right(self, tokens)[0], right(self, tokens)[1][::-1].copy()),
    ),
    "what is gathered is not told from padding": (
        Spread,
        "real_rows",
        lambda right: lambda self: np.arange(sum(self.num_tokens)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_write_another_text(family, ranked, monkeypatch, name):
    kind, method, mutate = MUTANTS[name]
    texts = {row: tiny_models.greedy_reference(family("mixtral"), tokens, 8) for row, tokens in PROMPTS.items()}
    backend = loaded(ranked, family("mixtral"))
    assert OwnBlocksDriver(backend, PLAN).generate(PROMPTS, 8, chunk=7) == texts
    monkeypatch.setattr(kind, method, mutate(getattr(kind, method)))
    try:
        found = OwnBlocksDriver(backend, PLAN).generate(PROMPTS, 8, chunk=7)
    except (IndexError, RuntimeError):
        return  # a place outside of what there is
    assert found != texts


@pytest.mark.parametrize("kind", [SpreadExperts, SpreadHead])
def test_a_rank_without_tokens_that_leaves_out_an_exchange_is_reported_and_nobody_waits(
    family, ranked, monkeypatch, kind
):
    monkeypatch.setattr("support.backends.rank_threads.TIMEOUT_S", 10.0)
    driver = OwnBlocksDriver(loaded(ranked, family("mixtral")), PLAN)
    driver.start(0, PROMPTS[0])
    monkeypatch.setattr(kind, "forward", leaves_out(kind, "forward", is_idle))
    with pytest.raises(CollectiveError, match=r"ranks call different things|another rank ended"):
        driver.step([Work(0)])


# ------------------------------------------------------------------------------------------------ refusals


def test_a_model_without_experts_is_refused(family, ranked):
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no experts"):
        loaded(ranked, family("llama"))


def test_shares_of_every_expert_are_refused(ranked):
    with pytest.raises(BackendError, match=r'attention = "data" with expert = 1'):
        ranked(make_torch, 2, attention="data")


def test_a_model_that_computes_all_logits_is_refused(family, ranked, monkeypatch):
    monkeypatch.setattr(data_attention, "selects_positions", lambda _: False)
    with pytest.raises(ModelLoadError, match="does not say of which tokens it computes logits"):
        loaded(ranked, family("mixtral"))
