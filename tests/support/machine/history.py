"""One history of an engine in a generated world, as a hypothesis state machine.

After every rule the invariants hold, numbered as in :mod:`support.core.engine_machine`; every text is the model's; at the end everything
has ended and every block, row and transfer is free. A failing history is printed as a script: the world, and the calls. It is repeated by
``cd tests && python FILE``, with ``from support.machine.history import History, numbered`` before it in the file.
"""

from __future__ import annotations

import logging
import random
from concurrent.futures import Future
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.core.invariants import broken_invariants, broken_partitions
from support.machine.chaos import BREAKABLE, INJECTED, Chaos, ManualClock
from support.machine.oracle import Expected, wrong
from support.machine.world import BLOCK_SIZE, POLICIES, Store, World, numbered, worlds
from support.strategies.hostile_policies import HOSTILE
from trencadis.client.client_request import ClientRequest
from trencadis.client.engine_client import LocalEngineClient, StepOutputs
from trencadis.client.frontend import Frontend
from trencadis.engine.build import build_engine
from trencadis.errors import ContractError, RequestError, RequestRefusedError, TrencadisError, WrongRoleError
from trencadis.records import (
    Embedding,
    FinishReason,
    Request,
    RequestTerms,
    SamplingParams,
    StructuredOutput,
)
from trencadis.text import Tokenizer, load_tokenizer
from trencadis_testing.fakes import fake_embedding

__all__ = ["History", "Store", "World", "numbered"]

_MAX_STEPS = 4000
_STEP_S = 0.05
_TOKENIZER: list[Tokenizer] = []

_PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([8, 1, 3, 20, None]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "stop_token_ids": st.sampled_from([(), (), (1,), (0, 2)]),
        "logprobs": st.sampled_from([None, None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "max_draft_tokens": st.sampled_from([None, None, 0, 1]),
        "n": st.sampled_from([1, 1, 2, 3]),
        "temperature": st.sampled_from([1.0, 0.0, 0.7]),
        "seed": st.sampled_from([None, 5]),
        "include_stop_str_in_output": st.booleans(),
    }
)

_ARRIVAL = {
    "count": st.sampled_from([1, 3, 5]),
    "family": st.integers(0, 2),
    "length": st.integers(1, 30),
    "num_own": st.sampled_from([0, 0, 1, 5]),
    "params": _PARAMS,
    "stop": st.sampled_from([-1, -1, -1, 0, 2, 6]),
    "grammar": st.booleans(),
    "priority": st.sampled_from([0, 0, 1, -2]),
    "tenant": st.sampled_from(["", "a", "b", "c/d"]),
    "salt": st.sampled_from([None, None, "salt"]),
    "hands_over": st.booleans(),
    "streams": st.booleans(),
    "num_steps": st.sampled_from([0, 1, 2, 9]),
}


class _Client(LocalEngineClient):
    """Counts what the engine emits, and never sleeps."""

    num_added = num_emitted = 0

    def add(self, request: Request) -> int:
        slot = super().add(request)
        self.num_added += 1
        return slot

    def step(self, *, timeout_s: float | None = None) -> StepOutputs:
        outputs = super().step(timeout_s=timeout_s)
        assert len(set(outputs.slots)) == len(outputs.slots), "8: two entries for one sequence"
        ended = [one.request_id for one in outputs.finished]
        assert len(set(ended)) == len(ended), "32: an end is told twice"
        for one in outputs.finished:
            times = (one.arrival_s, one.first_scheduled_s, one.first_token_s, one.finish_s)
            known = [time for time in times if time is not None]
            assert known == sorted(known), f"33: {times}"
        self.num_emitted += len(outputs.token_ids)
        return outputs

    def rest(self, timeout_s: float | None = None) -> None:
        self.engine.work_ahead()


class History(RuleBasedStateMachine):
    """Rules are what clients, operators and bad luck do; each takes plain values alone, so that its call can be repeated."""

    is_built = False

    @initialize(world=worlds(), first=st.fixed_dictionaries(_ARRIVAL))
    def build(self, world: World, first: dict[str, Any]) -> None:
        """Build the engine of a world, and let some requests come: rules may be left out of a whole history."""
        note(f"# {world!r}")
        logging.getLogger("trencadis").setLevel(logging.CRITICAL)  # each fault is told with its traceback
        self.world, self.chaos, self.clock = world, Chaos(), ManualClock()
        if not _TOKENIZER:
            _TOKENIZER.append(load_tokenizer("demo"))
        config, registry = world.configure(self.chaos, self.clock)
        engine = build_engine(config, registry=registry, clock=self.clock)
        self.engine = self.chaos.engine = engine
        self.client = _Client(engine)
        self.frontend = Frontend(self.client, _TOKENIZER[0], clock=self.clock)
        rng = random.Random(3)
        self.families = [[rng.randrange(world.num_words) for _ in range(40)] for _ in range(3)]
        self.num_seen = 0
        self.policy = world.scheduling
        self.live: dict[str, tuple[ClientRequest, Expected, int]] = {}
        self.aborted: set[str] = set()
        self.vectors: dict[str, tuple[list[tuple[int, ...]], Future[list[Embedding]]]] = {}
        self.remote: dict[str, int] = {}
        self.is_built = self.is_sound = True
        self.arrive(**first)

    # --------------------------------------------------------------------------------------------------- rules

    @rule(**_ARRIVAL)
    def arrive(
        self,
        *,
        count: int,
        family: int,
        length: int,
        num_own: int,
        params: dict[str, Any],
        stop: int,
        grammar: bool,
        priority: int,
        tenant: str,
        salt: str | None,
        hands_over: bool,
        streams: bool,
        num_steps: int,
    ) -> None:
        """Some requests come, whose prompts begin as others did, and some steps run."""
        for number in range(count):
            prompt = self.families[(family + number // 2) % 3][: max(1, length - 3 * number)]
            prompt = prompt + [(self.num_seen * 7 + i) % self.world.num_words for i in range(num_own)]
            prompt = prompt[: self.world.max_model_len - 1]
            terms = RequestTerms(
                priority=priority,
                tenant=tenant,
                cache_salt=salt,
                ttft_target_s=0.5 if priority else float("inf"),
                transfer_params={"do_remote_decode": True} if hands_over else None,
            )
            self._arrive_one(prompt, self._params(prompt, params, stop, grammar=grammar), terms, streams=streams)
        self._run(num_steps)

    @rule(times=st.sampled_from([1, 2, 5, 12]), seconds=st.sampled_from([0.0, 0.0, 0.0, 0.6, 70.0]))
    def step(self, times: int, seconds: float) -> None:
        """Time may pass, and steps run."""
        self.clock.advance(seconds)
        self._run(times)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 100), num_steps=st.sampled_from([0, 1]))
    def abort(self, pick: int, num_steps: int) -> None:
        """A client goes away."""
        name = sorted(self.live)[pick % len(self.live)]
        client = self.live[name][0]
        self.aborted.add(name)
        self.frontend.abort(client)
        assert client.is_finished, "32: an abort is immediate"
        assert self.client.abort(client.requests[0].request_id) is None, "32: a second abort is a no-op"
        self._ended(client)
        self._run(num_steps)

    @rule(num_steps=st.integers(1, 4), goes_on=st.booleans())
    def pause(self, num_steps: int, goes_on: bool) -> None:
        """The engine pauses: what is in flight ends, and nothing new begins; it may go on later."""
        self.engine.is_paused = True
        self._run(num_steps)
        if num_steps > self.world.num_stages + 1:
            assert self.engine.inspect().steps_in_flight == (), "35: a step was planned in a pause"
        self.engine.is_paused = not goes_on

    @rule()
    def resume(self) -> None:
        """The engine goes on."""
        self.engine.is_paused = False

    @rule(times=st.sampled_from([1, 1, 2, 5]), num_steps=st.sampled_from([1, 3]))
    def steps_fail(self, times: int, num_steps: int) -> None:
        """The next steps fail, whoever takes part."""
        self.chaos.num_failing_steps = times
        self._run(num_steps)

    @precondition(lambda self: self.live and not self.chaos.poison)
    @rule(pick=st.integers(0, 100))
    def poison(self, pick: int) -> None:
        """From now on every step with one of the requests fails."""
        names = sorted(self.engine.inspect().sequences)
        if names:
            self.chaos.poison = names[pick % len(names)]

    @precondition(lambda self: self.world.swap_blocks)
    @rule(times=st.sampled_from([1, 2]))
    def copies_fail(self, times: int) -> None:
        """The next copies to or from host memory fail."""
        self.chaos.num_failing_copies = times

    @precondition(lambda self: self.world.store is None and self.world.num_stages == 1)
    @rule(num_steps=st.sampled_from([1, 4]))
    def ranks_are_lost(self, num_steps: int) -> None:
        """The ranks end with the next step, and start again with an empty cache."""
        self.chaos.num_losses = 1
        self._run(num_steps)

    @rule(
        noun=st.sampled_from(sorted(BREAKABLE)),
        how=st.sampled_from(["raise", "nonsense"]),
        num_steps=st.sampled_from([0, 1, 4]),
    )
    def component_breaks(self, noun: str, how: str, num_steps: int) -> None:
        """A component raises, or answers nonsense."""
        if noun == "scheduling" and self.policy == self.world.fallback:
            return  # which nothing takes the place of
        self.chaos.break_next(noun, how)
        self._run(num_steps)

    @rule(policy=st.sampled_from(POLICIES), shadow=st.sampled_from(["keep", None, *POLICIES, *HOSTILE]))
    def switch(self, policy: str, shadow: str | None) -> None:
        """An operator changes the policy, and perhaps its shadow, which may misbehave as it likes."""
        if policy == self.world.fallback:
            self.chaos.spare("scheduling")
        table = {"name": policy, **({} if shadow == "keep" else {"shadow": shadow})}
        try:
            answer = self.frontend.control("set_scheduling", table=table, source="a history", may_import=True)
        except TrencadisError:
            if "scheduling" not in self.chaos.broke:
                raise
            return  # it raised when it was told of the live requests
        assert answer["policy"] == policy
        self.policy = policy
        assert answer["plan_hash"] == self.client.plan_hash

    @rule(policy=st.sampled_from(HOSTILE))
    def switch_to_a_hostile_policy(self, policy: str) -> None:
        """An operator puts one in force that misbehaves: the fallback takes its place, at once or when it is asked."""
        self.chaos.spare("scheduling")
        self.policy = self.world.fallback
        try:
            self.frontend.control("set_scheduling", table={"name": policy}, source="a history", may_import=True)
        except ContractError:
            assert "DeafEars" in policy, "only one that is told of live requests may refuse them"
            assert self.engine.inspect().sequences

    @precondition(lambda self: self.world.store is not None)
    @rule(role=st.sampled_from(["both", "prefill", "decode"]))
    def change_role(self, role: str) -> None:
        """An operator changes the role."""
        assert self.frontend.control("set_role", role=role)["role"] == role

    @rule(question=st.sampled_from(["explain", "metrics", "totals", "scheduling", "flight_record", "load"]))
    def look(self, question: str) -> None:
        """An operator looks, which changes nothing."""
        before = self.engine.inspect()
        if question == "metrics":
            pages: list[str] = []
            self.client.request_metrics(pages.append)
            assert ("trencadis_" in pages[0]) >= ("prometheus" in self.world.observers)
        elif question == "load":
            load = self.engine.load()
            assert (load.num_running, load.num_waiting) == (self.engine.num_running, self.engine.num_waiting)
        elif question == "flight_record":
            if self.world.flight_steps:
                assert self.frontend.control(question)["paths"]
        elif question != "explain":
            assert self.frontend.control(question)
        elif before.sequences and self.world.engine.get("explain_steps"):
            assert self.frontend.control(question, request_id=next(iter(before.sequences)))["requests"]
        assert self.engine.inspect() == before, "a look changed the engine"

    @precondition(lambda self: self.chaos.preparations)
    @rule(pick=st.integers(0, 20), is_refused=st.booleans())
    def preparation_ends(self, pick: int, is_refused: bool) -> None:
        """A grammar is ready, or turns out to be none."""
        future = self.chaos.preparations.pop(pick % len(self.chaos.preparations))
        if not future.set_running_or_notify_cancel():
            return
        if is_refused:
            future.set_exception(RequestRefusedError(f"{INJECTED} refusal of a grammar"))
        else:
            future.set_result(None)

    @rule(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3), family=st.integers(0, 2))
    def embed(self, lengths: list[int], family: int) -> None:
        """Texts are to be embedded."""
        name = f"e{self.num_seen}"
        self.num_seen += 1
        texts = [tuple(self.families[family][:length]) for length in lengths]
        future: Future[list[Embedding]] = Future()
        self.vectors[name] = (texts, future)
        self.frontend.embed([list(text) for text in texts], request_id=name, future=future)

    @precondition(lambda self: self.world.store is not None and self.world.store.is_remote)
    @rule(count=st.sampled_from([1, 2]), length=st.integers(2, 20), hands_over=st.booleans())
    def remote_request(self, count: int, length: int, hands_over: bool) -> None:
        """Other engines want prompts computed."""
        for number in range(count):
            name = f"remote {len(self.remote)}"
            prompt = tuple(self.families[number][:length])
            self.remote[name] = self.world.text(prompt, 1)[0]
            params = {"do_remote_decode": True} if hands_over else None
            self.chaos.remote.append(
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    params=SamplingParams(max_tokens=1),
                    transfer_params=params,
                )
            )
        self.chaos.wake()

    @rule()
    def drain(self) -> None:
        """Everything that can end ends."""
        self.engine.is_paused = False
        for _ in range(30):
            if not self.frontend.has_work:
                return
            self._run(1)

    # -------------------------------------------------------------------------------------------------- checks

    @invariant()
    def everything_holds(self) -> None:
        """Check the engine's state, and every text so far."""
        if not self.is_built:
            return
        faults = (
            broken_invariants(self.engine) + broken_partitions(self.engine, self.world.num_ranks) + self.chaos.faults
        )
        assert not faults, faults
        names = {one.request_id for client, _, _ in self.live.values() for one in client.requests}
        known = set(self.engine.inspect().sequences)
        assert {name for name in known if not name.startswith("remote ")} <= names, "3: who has ended lives"
        for client, expected, _ in self.live.values():
            if client.streams:
                for one in client.output().outputs:
                    fault = wrong(one, expected, is_disturbed=True)
                    assert not fault, fault
        self._check_counts()
        self.is_sound = True

    def teardown(self) -> None:
        """Nothing more is disturbed: everything ends, and nothing is left."""
        if not self.is_built or not self.is_sound:
            return  # a check has failed already
        self.engine.is_paused = False
        self.chaos.heal()
        for _ in range(_MAX_STEPS):
            if not self.frontend.has_work:
                break
            self._run(1)
            faults = broken_invariants(self.engine) + self.chaos.faults
            assert not faults, faults
        assert not self.frontend.has_work, f"20: {sorted(self.live)} do not end"
        assert not self.live, f"1: {sorted(self.live)} are lost"
        now = self.engine.inspect()
        assert not now.sequences, f"1: {sorted(now.sequences)} are left in the engine"
        assert now.blocks.num_used == 0, "12: every block comes back"
        host = now.stages.get("swap")
        assert host is None or len(host.free) == host.num_blocks, "12: every host block comes back"
        assert now.num_free_rows == now.num_rows, "12: every row comes back"
        self._check_remote()
        self._check_vectors()
        self._check_counts()
        self.frontend.close()

    def _check_counts(self) -> None:
        totals = self.engine.totals
        if not self.remote:
            num_uncounted = self.client.num_emitted - totals.num_emitted_tokens
            brings = self.world.store is not None and self.world.store.brings_first_tokens  # counted with the next step
            assert num_uncounted == 0 or (brings and num_uncounted > 0), "tokens are counted as they are emitted"
            num_unseen = self.client.num_added - totals.num_finished - len(self.engine.inspect().sequences)
            assert num_unseen >= 0, "1: more have ended than came"
            assert num_unseen == 0 or self.frontend.has_work, "1: who came has ended, or lives"
        assert totals.num_accepted_tokens == sum(totals.num_accepted_by_position)
        assert totals.num_draft_tokens == sum(totals.num_drafted_by_position)
        assert totals.num_accepted_tokens <= totals.num_draft_tokens
        assert totals.num_prompt_tokens_cached <= totals.num_prompt_tokens_admitted
        assert totals.num_blocks_swapped_in <= totals.num_blocks_swapped_out
        if not self.world.cache.get("prefix_caching", True) and self.world.store is None:
            assert totals.num_prompt_tokens_cached == 0, "30: nothing is cached"

    def _check_remote(self) -> None:
        ends = [name for name, _ in self.chaos.remote_ends]
        assert sorted(ends) == sorted(self.remote), "a remote request ends once"
        firsts = dict(self.chaos.remote_tokens)
        assert len(firsts) == len(self.chaos.remote_tokens), "a first token is told once"
        for name, token in firsts.items():
            assert token == self.remote[name], "27: the first token of a remote request"

    def _check_vectors(self) -> None:
        for texts, future in self.vectors.values():
            assert future.done(), "1: a text was not embedded"
            vectors = [list(one.vector) for one in future.result()]
            for text, vector in zip(texts, vectors, strict=True):
                assert max(abs(a - b) for a, b in zip(vector, fake_embedding(text), strict=True)) < 1e-5, (
                    "27: the vector of a text"
                )

    # ----------------------------------------------------------------------------------------------- happening

    def _params(self, prompt: list[int], params: dict[str, Any], stop: int, *, grammar: bool) -> SamplingParams:
        strings: tuple[str, ...] = ()
        if stop >= 0:
            text = _TOKENIZER[0].decode(self.world.text(prompt, 12))
            piece = text[stop : stop + 2]
            strings = (piece, "never") if piece.isascii() and piece else ()
        structured = StructuredOutput(kind="regex", text="[a-z]+") if grammar and self.world.prepares else None
        given = dict(params)
        if given["max_tokens"] is not None:
            given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
        return SamplingParams(**given, stop=strings, structured=structured)

    def _arrive_one(self, prompt: list[int], params: SamplingParams, terms: RequestTerms, *, streams: bool) -> None:
        name = f"r{self.num_seen}"
        self.num_seen += 1
        expected = Expected.of(self.world, prompt, params, self.frontend.end_token_ids, _TOKENIZER[0])
        try:
            client = self.frontend.submit(prompt, params, request_id=name, terms=terms, streams=streams)
        except RequestError as error:
            self._check_refusal(error, params, terms)
            return
        self.live[name] = (client, expected, len(prompt))

    def _check_refusal(self, error: RequestError, params: SamplingParams, terms: RequestTerms) -> None:
        if isinstance(error, WrongRoleError):
            assert terms.transfer_params is None or params.n > 1, error  # the first alone hands over
            assert self.frontend.control("role")["role"] == "prefill", error
            return
        assert isinstance(error, RequestRefusedError), error
        assert self.world.has_tenants or self.world.prepares, f"18: a request that fits was refused: {error}"

    def _run(self, num_steps: int) -> None:
        """Take steps, and check who ended."""
        self.is_sound = False
        for _ in range(num_steps):
            changed = self.frontend.step()
            self.clock.advance(_STEP_S)
            if self.chaos.poison not in self.engine.inspect().sequences:
                self.chaos.poison = ""
            for client in dict.fromkeys(
                changed
            ):  # one of whose completions fails while another is refused is there twice
                if client.is_finished:
                    self._ended(client)
        self.is_sound = True

    def _ended(self, client: ClientRequest) -> None:
        _, expected, num_prompt_tokens = self.live.pop(client.request_id)
        output = client.output()
        assert 0 <= output.num_cached_tokens < num_prompt_tokens, "30: one token is left to compute"
        assert output.num_cached_tokens % BLOCK_SIZE == 0, "30: whole blocks are cached"
        is_whole = True
        is_refused = any(one.finish_reason is FinishReason.IGNORED for one in output.outputs)  # all end with one
        for one, completion in zip(output.outputs, client.completions, strict=True):
            is_failed = one.finish_reason in (FinishReason.ERROR, FinishReason.INVALID, FinishReason.IGNORED)
            if is_failed:
                self._check_error(completion.request_id, completion.error)
            is_aborted = one.finish_reason is FinishReason.ABORT
            may_abort = client.request_id in self.aborted or is_refused
            assert not is_aborted or may_abort, f"32: nobody aborted {completion.request_id}: {output}"
            is_whole &= not is_failed and not is_aborted
            fault = wrong(one, expected, is_disturbed=is_failed or is_aborted)
            assert not fault, fault
        if is_whole and output.prompt_logprobs is not None:
            found, wanted = {one.position for one in output.prompt_logprobs}, set(range(1, num_prompt_tokens))
            # A sequence that is preempted while its prompt is in flight keeps the token of that step, but not these.
            is_right = found <= wanted if self.engine.totals.num_preempted else found == wanted
            assert is_right, f"27: log-probabilities of the prompt at {found}, expected {wanted}"

    def _check_error(self, name: str, error: str) -> None:
        if self.world.refuses_misses and 'on_miss = "refuse"' in error:
            return
        is_known = name in self.chaos.blamed or "copies" in error or "refusal of a grammar" in error
        assert is_known, f"27: {name} was not at fault: {error}"
        assert INJECTED in error, error
