"""Control requests: read and change the state of an engine while it serves. The part of ``AsyncLLM`` that does not generate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any

from trencadis.client.dispatcher import ControlRequest
from trencadis.client.runner import Runner
from trencadis.errors import BackendError
from trencadis.switching import change_table

__all__ = ["EngineControl", "no_answer"]


class EngineControl:
    """Sends control requests to an engine, which answers between two steps.

    Args:
        runner: Serves the engine.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    async def totals(self) -> dict[str, Any]:
        """Return what the engine has counted since it was opened, such as ``num_steps`` and ``num_emitted_tokens``.

        Raises:
            TrencadisError: See :meth:`scheduling`, or the model does not generate.
        """
        return await self._control("totals")

    async def role(self) -> dict[str, Any]:
        """Return the engine's role, as ``role``, and the number of live requests, as ``num_live``.

        Raises:
            TrencadisError: See :meth:`scheduling`.
        """
        return await self._control("role")

    async def set_role(self, role: str) -> dict[str, Any]:
        """Take another role between two steps. Live requests run to their end; the new role applies to new requests.

        Args:
            role: ``prefill``, ``decode`` or ``both``.

        Returns:
            What :meth:`role` returns, and ``previous``, the role before.

        Raises:
            InvalidRequestError: No such role, or nothing that hands KV over; nothing has changed.
            TrencadisError: See :meth:`scheduling`.
        """
        return await self._control("set_role", role=role)

    async def set_scheduling(
        self,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        shadow: str | EllipsisType | None = ...,
    ) -> dict[str, Any]:
        """Put another scheduling policy in force, or another shadow beside it, between two steps; no request is lost.

        The new policy is given every live request. Its fallback stays the configured one, and an engine that is opened again has
        the configured policy.

        Args:
            name: The policy; None: the present one.
            options: Keys of its table that differ from the configuration; None: none, or the present ones if ``name`` is None, too.
            shadow: A policy to ask beside it; None: none; left out: the present one stays.

        Returns:
            What :meth:`scheduling` returns, and ``previous``: ``policy``, ``component`` and ``plan_hash`` as they were.

        Raises:
            ConfigError: No such policy, or an option that its table does not have; in the words of a wrong config file.
            PluginError: It cannot be built. In both cases nothing has changed.
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer in time.
        """
        return await self.change_scheduling(change_table(name, options, shadow), may_import=True)

    async def change_scheduling(
        self, table: Mapping[str, Any], *, source: str = "set_scheduling", may_import: bool = False
    ) -> dict[str, Any]:
        """Change scheduling as :meth:`set_scheduling` does, by a table of its arguments.

        Args:
            table: ``name``, ``options`` and ``shadow``, each optional.
            source: Source of the change, for messages.
            may_import: Import paths in the table are followed: never for a table that came from a client.

        Raises:
            TrencadisError: See :meth:`set_scheduling`.
        """
        return await self._control("set_scheduling", table=dict(table), source=source, may_import=may_import)

    async def scheduling(self) -> dict[str, Any]:
        """Return which policy schedules.

        Returns:
            ``policy``, ``component`` (its fallback, once it failed), ``options``, ``configured``, ``fallback``, ``quarantined``,
            ``shadow`` and ``plan_hash``.

        Raises:
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer in time.
        """
        return await self._control("scheduling")

    async def switched_off(self) -> dict[str, Any]:
        """Return which components are not called at the moment, as they were too slow or kept failing.

        Returns:
            ``components``: of each ``component``, ``cause`` and ``for_s``, seconds until it is tried again; None: it is not.

        Raises:
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer within half a second.
        """
        return await self._control("switched_off", timeout_s=0.5)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Return why a request was or was not scheduled in each of the last ``engine.explain_steps`` steps.

        Args:
            request_id: Id that was given to :meth:`generate`; the request may have ended.

        Returns:
            ``oldest_step`` and ``newest_step`` of the record, and ``requests``: the fields of
            :class:`trencadis.records.Explanation` for each of its completions.

        Raises:
            InvalidRequestError: It was never seen, or the record does not reach back to it.
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer in time.
        """
        return await self._control("explain", request_id=request_id)

    async def flight_record(self) -> dict[str, Any]:
        """Write what the engine did in its last steps to a file, for ``trencadis replay``.

        Returns:
            ``paths``: the file of each replica, on the engine's machine.

        Raises:
            InvalidRequestError: Nothing is recorded: ``flight_recorder.num_steps`` is 0.
            EngineEndedError: The engine was closed, died or hung.
            BackendError: The file could not be written, or the engine did not answer in time.
        """
        return await self._control("flight_record", timeout_s=60.0)

    async def reject_transfer(self, transfer_params: Mapping[str, Any]) -> None:
        """Tell the KV connector that a request is not served here, so that the engine that holds its KV can free it.

        Args:
            transfer_params: Those of the request.

        Raises:
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer in time.
        """
        await self._control("reject_transfer", transfer_params=dict(transfer_params))

    async def replicas(self) -> dict[str, Any]:
        """Return the state of each replica, with ``parallel.data`` above 1.

        Returns:
            ``router``, and ``replicas``: of each ``replica``, its index; ``state``: ``ready``, ``draining``, ``stalled`` or ``down``;
            ``num_live``, ``num_placed``, ``num_moved``, ``num_rebalanced``, ``num_restarts``, ``num_waiting``, ``num_running``, ``kv_usage`` and
            ``reason``, why it ended last.

        Raises:
            InvalidRequestError: There is one engine only.
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer in time.
        """
        return await self._control("replicas")

    async def restart_replica(self, replica: int) -> dict[str, Any]:
        """Start a replica again when its requests have ended; until then others take the new ones.

        Args:
            replica: Index of the replica.

        Returns:
            What :meth:`replicas` returns, at once.

        Raises:
            InvalidRequestError: There is no such replica, it is down, or no other one serves.
            TrencadisError: See :meth:`replicas`.
        """
        return await self._control("restart_replica", replica=replica)

    async def route(
        self, prompt_token_ids: Sequence[int], *, tenant: str = "", cache_salt: str | None = None
    ) -> dict[str, Any]:
        """Return which replica would take a prompt now; nothing changes.

        Args:
            prompt_token_ids: At least one.
            tenant: Who asks.
            cache_salt: The tenant if None.

        Returns:
            ``replica``, ``num_blocks`` of the prompt, and of each replica ``hit_blocks``, ``num_live`` and ``is_healthy``.

        Raises:
            TrencadisError: See :meth:`replicas`.
        """
        return await self._control(
            "route", prompt_token_ids=list(prompt_token_ids), tenant=tenant, cache_salt=cache_salt
        )

    async def _control(self, name: str, *, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
        command = ControlRequest(name=name, arguments=arguments)
        self._runner.send(command)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(command.future), timeout_s)
        except TimeoutError:
            raise no_answer(timeout_s) from None


def no_answer(timeout_s: float) -> BackendError:
    """Return the error for an engine that does not answer. Pure."""
    return BackendError(
        f"the engine did not answer within {timeout_s:g} s.", hint="It may be in a long step; ask again."
    )
