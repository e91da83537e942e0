"""Every error a user, a plugin author or an operator can meet.

    TrencadisError                   .hint: what to do · .exit_code · .http_status
    ├─ ConfigError                   a config value, file, flag or environment variable is wrong
    │  ├─ PlanLockError              another plan than the one of the lock file
    │  ├─ ConfigValueError           a value is of the wrong type or out of range
    │  ├─ ImportPathRefusedError     code to import, named by someone other than the operator
    │  └─ UnknownKeyError            a key that no table has, with a did-you-mean
    ├─ PluginError                   a plugin cannot be used
    │  ├─ PluginLoadError            it raised while it was imported, registered or constructed
    │  ├─ ComponentConflictError     two distributions offer one name
    │  ├─ UnknownComponentError      no plugin offers the name, with the choices
    │  ├─ CapabilityError            what a component requires, no chosen component provides
    │  └─ ContractError              a component broke its contract
    ├─ RequestError                  one request is at fault; no other request suffers
    │  ├─ InvalidRequestError        impossible parameters or token ids
    │  ├─ PromptTooLongError         the prompt does not fit the model or the KV cache
    │  └─ RequestRefusedError        admission control said no
    │     ├─ WrongRoleError          this engine computes prompts for others
    │     └─ ContinuationError       the engine that began it has ended, and another cannot go on
    ├─ BackendError                  the device side failed
    │  ├─ ModelLoadError             the model directory is incomplete or unsupported
    │  ├─ OutOfMemoryError           the device has no room for the weights or the KV cache
    │  ├─ StepFailedError            a step raised; names the component
    │  ├─ TransferError              KV blocks could not be moved; never reaches a client
    │  └─ EngineEndedError           the engine was closed, died or hung
    └─ InternalError                 a broken invariant: a bug in Trencadís

A message says what happened, the value, where it came from, and what to do. User errors print
without a traceback and exit with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BackendError",
    "CapabilityError",
    "CollectiveError",
    "ContinuationError",
    "ComponentConflictError",
    "ConfigError",
    "ConfigValueError",
    "ContractError",
    "EngineEndedError",
    "ImportPathRefusedError",
    "InternalError",
    "InvalidRequestError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PlanLockError",
    "PluginError",
    "PluginLoadError",
    "PromptTooLongError",
    "RequestError",
    "RanksLostError",
    "RequestRefusedError",
    "SamplingFailedError",
    "StepFailedError",
    "TransferError",
    "TrencadisError",
    "UnknownComponentError",
    "UnknownKeyError",
    "WrongRoleError",
    "closest",
    "did_you_mean",
    "must_be_one_of",
]


def closest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the choice that differs by two neighbouring letters in the other order, else the most similar one. Pure.

    Args:
        word: Word that was typed.
        choices: Words that it may stand for.
        cutoff: Least similarity, between 0 and 1, by :func:`difflib.get_close_matches`; if none has it, the result is empty.
    """
    listed = list(choices)
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)} - {word}
    close = [one for one in listed if one in swapped] or difflib.get_close_matches(word, listed, n=1, cutoff=cutoff)
    return close[0] if close else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the choice closest to ``word``, or an empty string. Pure."""
    meant = closest(word, choices)
    return f' Did you mean "{meant}"?' if meant else ""


def must_be_one_of(word: str, choices: Iterable[str]) -> str:
    """Return ``'must be one of: a, b.'``, after the choice closest to ``word`` if one is close. Pure."""
    listed = list(choices)
    rule = f"must be one of: {', '.join(listed)}."
    suggestion = did_you_mean(word, listed).strip()
    return f"{suggestion[:1].lower()}{suggestion[1:]} It {rule}" if suggestion else rule


class TrencadisError(Exception):
    """The root of every error that Trencadís raises on purpose.

    Args:
        message: Cause, with the value and where it came from.
        hint: Remedy; printed after the message.
    """

    exit_code = 2
    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}{'' if message.endswith(chr(10)) else ' '}{hint}".strip())
        self.hint = hint


class ConfigError(TrencadisError):
    """A configuration cannot be used.

    Cause: a file that is no TOML, a missing file, or tables that contradict each other.
    Fix: correct the named file or value; ``trencadis config --explain`` shows every value and its source.
    """


class ConfigValueError(ConfigError):
    """A config value has the wrong type or is out of range.

    Cause: for example ``max_num_seqs = 0`` or ``temperature = "hot"``.
    Fix: the message names the key, the value, its source and the allowed range.
    """


class ImportPathRefusedError(ConfigError):
    """An import path, ``package.module:Attribute``, that does not come from the operator.

    Cause: a request to the administration pages, a flight record or the record of a comparison names code to import.
    Fix: name a registered component; or write the import path into the configuration, or follow those of a file that you trust with ``--trust``.
    """


class PlanLockError(ConfigError):
    """The plugins, their files, their options or the model are not those of the lock file.

    Cause: ``--locked`` was given, and something has changed since ``trencadis lock`` wrote the file; the message names what.
    Fix: undo the change; or, if it is meant, write the lock anew. ``trencadis lock --check`` lists all differences.
    """


class UnknownKeyError(ConfigError):
    """A config key that no table has.

    Cause: a misspelt key, flag or environment variable.
    Fix: use the suggested name, or a name that ``trencadis config --explain`` prints.
    """


class PluginError(TrencadisError):
    """A plugin cannot be used; nothing was loaded in its place."""


class PluginLoadError(PluginError):
    """A plugin raised while it was imported, registered or constructed.

    Cause: a broken or incompatible package; the message names the package, its version and the cause.
    Fix: upgrade or uninstall it, or block it: ``[plugins] blocked = ["name"]``.
    """


class ComponentConflictError(PluginError):
    """Two distributions offer a component of one noun under one name.

    Fix: uninstall or block one of the two distributions named in the message.
    """


class UnknownComponentError(PluginError, ConfigError):
    """The config names a component that no loaded plugin offers.

    Fix: choose one of the names listed, install the package that has it, or give an import path
    ``name = "package.module:Class"``.
    """


class CapabilityError(PluginError, ConfigError):
    """A chosen component requires a capability that no chosen component provides.

    Cause: for example a tree speculator with a backend that has no tree attention.
    Fix: change one of the two components named in the message.
    """


class ContractError(PluginError):
    """A component returned something its contract forbids.

    Cause: a bug in that component, such as an order that is no permutation.
    Fix: run its conformance suite from ``trencadis_testing``; it shows the smallest failing case.
    """


class RequestError(TrencadisError):
    """One request cannot be served; other requests go on.

    Attributes:
        cost_s: Work it took to find that out, seconds; counts against the tenant.
    """

    http_status = 400
    cost_s = 0.0


class InvalidRequestError(RequestError):
    """A request's parameters or token ids are impossible.

    Cause: for example ``top_p = 1.5`` or a token id outside the vocabulary.
    Fix: the message names the parameter, its value and the allowed range.

    Args:
        message: Cause, with the value and where it came from.
        hint: Remedy; printed after the message.
        field: The parameter at fault as :class:`trencadis.records.SamplingParams` calls it, or empty; a server tells clients.
    """

    def __init__(self, message: str, *, hint: str = "", field: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class PromptTooLongError(RequestError):
    """A prompt leaves no room for one output token.

    Fix: shorten the prompt, or raise ``model.max_model_len`` where the model allows it.
    """


class RequestRefusedError(RequestError):
    """The scheduling policy's admission control refused the request.

    Fix: retry later, or raise the caps of the policy.

    Args:
        message: Who refused, and why.
        hint: Remedy; printed after the message.
        retry_after_s: When it may be served, seconds; a server tells clients.
    """

    http_status = 429

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class WrongRoleError(RequestRefusedError):
    """The role of this engine does not take the request.

    Cause: ``engine.role = "prefill"``, and a request that does not ask for a prefill for another engine.
    Fix: send it to another engine, or change the role.
    """

    http_status = 503


class ContinuationError(RequestRefusedError):
    """The replica that had begun the request has ended, and no other one can go on where it was.

    Cause: its sampling parameters depend on more than its tokens, as ``mirostat_mode`` and some logits processors do.
    Fix: send it again.
    """

    http_status = 503


class BackendError(TrencadisError):
    """The device side failed."""

    http_status = 503


class ModelLoadError(BackendError):
    """A model cannot be loaded, or would not be computed correctly.

    Cause: a directory without config or weights, an architecture transformers does not know, or one whose
    attention cannot be paged.
    Fix: the message names the file or the architecture.
    """


class OutOfMemoryError(BackendError):
    """The device has no room for the weights or for a usable KV cache.

    Fix: lower ``model.max_model_len`` or ``cache.num_blocks``, or raise ``cache.memory_fraction``.
    """


class StepFailedError(BackendError):
    """A step raised; the message names the component and the cause.

    Requests that cannot be computed alone either end with this error; the others go on.
    """


class CollectiveError(BackendError):
    """Ranks did not finish a sum, gather or message together: one ended, stopped, or called something else.

    Cause: a rank's process that was killed, ran out of memory or hangs; the message names the rank and the call.
    Fix: read what that rank logged last; raise the timeout of the collectives if it was only slow.
    """


class RanksLostError(StepFailedError):
    """A process of the model's ranks ended or stopped: the KV cache is gone, and with it every step in flight.

    Requests go on once the ranks were started again, with the tokens that they have.
    Cause: the kernel ran out of memory, a device failed, a machine is gone, or a request makes a rank crash.
    Fix: the message names the rank and how it ended; its own log says more.
    """


class SamplingFailedError(StepFailedError):
    """No tokens could be chosen for a step that every rank has computed: rows and caches are those that they would be with tokens.

    Stages of a pipeline go on meanwhile, and none of their ranks is lost.
    Cause: a sampler, a logits processor or an acceptance rule raised; the message says which.
    Fix: mend it, or choose another.
    """


class UnpreparedShapeError(StepFailedError):
    """A pass fits no prepared bucket, and ``[bucketing] on_miss = "refuse"``.

    Fix: prepare larger buckets, lower the engine's limits to what is prepared, or set ``bucketing.on_miss`` to
    ``fallback``.
    """


class TransferError(BackendError):
    """KV blocks could not be moved to or from a store or another engine; costs a cache miss and a counter.

    ``cause`` is one of the words of ``TransferCause``: evicted, deadline, unreachable, corrupt, incompatible, full, lost, raised,
    cancelled. Fix: by cause; ``trencadis_kv_transfer_failures_total`` counts them.
    """

    def __init__(self, message: str, *, cause: str = "raised", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class EngineEndedError(BackendError):
    """The engine was closed, its process died, or it hung and was killed; the message says which.

    Cause: out of memory (the kernel kills the process), a crash in a device library, or a step that never ends.
    Fix: see the log of the engine. A server starts another one, ``server.max_engine_restarts`` times within
    ``server.restart_window_s``; after that it ends with this exit code, so that whatever supervises it can act.
    """

    exit_code = 69


class InternalError(TrencadisError):
    """An invariant of the engine does not hold: a bug in Trencadís, not in the input.

    Fix: report it with the state that the message carries.
    """

    exit_code = 70
