"""Builds a server from a configuration: limits, sockets, supervisor, application, administration pages."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import attrs

from trencadis import AsyncLLM
from trencadis.api import Config, Registry, ResolvedConfig, check_model, resolve_plan
from trencadis.clock import SystemClock
from trencadis.errors import ConfigError
from trencadis_server.app import make_app
from trencadis_server.config import server_of
from trencadis_server.context import ServerContext
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.lifecycle.lifecycle import Service
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.middleware.auth import ApiKeys
from trencadis_server.middleware.drain_guard import DrainGuard
from trencadis_server.middleware.limits import AdmissionControl
from trencadis_server.routes.admin import make_admin_app

__all__ = [
    "OpenServer",
    "collect_rarely",
    "config_to_serve",
    "listen",
    "make_context",
    "model_names_of",
    "open_server",
    "url_of",
]

logger = logging.getLogger("trencadis.server")

_ADMIN_HOST = "127.0.0.1"
_BACKLOG = 2048
_YOUNG_OBJECTS = 10_000
"""Allocations between two collections of the youngest generation; a collection takes a millisecond at most."""


def open_server(config: Config, registry: Registry, *, resolved: ResolvedConfig) -> OpenServer:
    """Return a server with listening sockets; nothing is loaded yet.

    Args:
        config: Loaded configuration; the server's additions are made here.
        registry: Registry of the plugins.
        resolved: The same configuration with its sources, for the administration pages.

    Raises:
        ConfigError: The port is in use, a key is invalid, or a component does not exist.
    """
    if server_of(config).observer:
        # Selected first: it is added to [observer] names, which an error would name otherwise.
        registry.select("observer", server_of(config).observer, key="names", source="server.observer", may_import=True)
    return OpenServer(config_to_serve(config), registry, resolved=resolved)


class OpenServer:
    """A server's listening sockets and configuration, before the engine is loaded. A context manager that closes the sockets.

    Args:
        config: Configuration as the server runs it.
        registry: Registry of the plugins.
        resolved: Configuration with its sources.

    Attributes:
        url: URL that it listens on.
        admin_url: URL of the administration pages; empty: there are none.
    """

    def __init__(self, config: Config, registry: Registry, *, resolved: ResolvedConfig) -> None:
        self._config = config
        self._registry = registry
        self._resolved = resolved
        # A component or a model that does not exist is known before anything is opened.
        self._plan = resolve_plan(config, registry)
        check_model(config, resolved.sources, asks_hub=False)
        server = server_of(config)
        self._sockets = [listen(server.host, server.port)]
        if server.admin_port:
            try:
                self._sockets.append(
                    listen(
                        _ADMIN_HOST,
                        server.admin_port,
                        setting="server.admin_port",
                        meaning_of_zero="no administration pages",
                    )
                )
            except BaseException:
                self.close()
                raise
        self._shows_example = config.log.format == "text"  # a log for programs has no command to try
        self.url, self.admin_url = [*map(url_of, self._sockets), ""][:2]
        if server.is_open_to_all:
            logger.warning(
                '[server] host = "%s" without api_keys: every machine that reaches this one can use the server. Set server.api_keys, '
                "or listen on 127.0.0.1 behind a proxy that checks who asks.",
                server.host,
            )

    def greeting(self) -> list[str]:
        """Return the lines to print at the start."""
        names = ", ".join(model_names_of(self._config))
        lines = [f"Listening at {self.url}/v1 for {names}; loading."]
        if self.admin_url:
            lines.append(f"Administration: {self.admin_url}/admin/plugins")
        if self.admin_url and server_of(self._config).lacks_admin_key:
            lines[-1] += " (refuses every request: set server.admin_key, as server.api_keys do not open it)"
        return lines

    def example(self, llm: AsyncLLM) -> list[str]:
        """Return lines with a command to try, none longer than 80 columns, that works as typed. Pure.

        Args:
            llm: Engine, which says what its model supports.
        """
        url = self.url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        if not llm.model.generates:
            route, body = "embeddings", '{"input": "Once upon a time"}'
        else:
            route, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 32}'
        key = """-H "Authorization: Bearer $API_KEY" """ if server_of(self._config).api_keys else ""
        return [
            f"API: {url}/docs" + (". Try, with one of server.api_keys:" if key else ". Try:"),
            f"  curl {url}/v1/{route} \\",
            f'    {key}-H "Content-Type: application/json" \\',
            f"    -d '{body}'",
        ]

    def service(self, announce: Callable[[str], None] = lambda _: None) -> Service:
        """Return the service on these sockets; call once, in the event loop.

        Args:
            announce: Called with a line when an engine is ready.
        """
        config = self._config
        gate, metrics = DrainGuard(), HttpMetrics()
        metrics.watch_loop(asyncio.get_running_loop())
        supervisor = Supervisor(
            functools.partial(AsyncLLM.from_config, config, self._registry),
            max_restarts=server_of(config).max_engine_restarts,
            window_s=server_of(config).restart_window_s,
            on_restart=metrics.note_restart,
            on_open=functools.partial(self._opened, announce),
        )
        context = make_context(config, supervisor)
        app = make_app(context, gate=gate, http_metrics=metrics)
        # Made while the engine is loading: at the first request it would block the event loop for a fifth of a second.
        asyncio.get_running_loop().run_in_executor(None, app.openapi)
        admin = None
        if self.admin_url:
            pages = make_admin_app(
                context, supervisor=supervisor, registry=self._registry, plan=self._plan, resolved=self._resolved
            )
            admin = (pages, self._sockets[1])
        return Service(app, self._sockets[0], supervisor=supervisor, gate=gate, config=server_of(config), admin=admin)

    def _opened(self, announce: Callable[[str], None], llm: AsyncLLM) -> None:
        """Announce that an engine serves, the first time with a command to try."""
        collect_rarely()
        model = llm.model
        announce(f"Ready: {model.architecture}, {model.dtype}, {llm.max_model_len} tokens, plan {llm.plan_hash}.")
        for line in self.example(llm) if self._shows_example else ():
            announce(line)
        self._shows_example = False

    def close(self) -> None:
        """Stop listening; may be called twice."""
        for listener in self._sockets:
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def collect_rarely() -> None:
    """Exclude loaded objects from garbage collection, and collect young ones less often; call it when an engine serves.

    A full collection would visit a hundred thousand objects for nothing, and the event loop would wait for it. A
    request makes some hundred objects that live as long as the request: with Python's default threshold every other
    request would start a collection.
    """
    if not gc.get_freeze_count():
        gc.freeze()
        young, *older = gc.get_threshold()
        gc.set_threshold(young and max(young, _YOUNG_OBJECTS), *older)  # 0: collections are switched off


def make_context(config: Config, supervisor: Supervisor) -> ServerContext:
    """Return the context of a server's endpoints.

    Args:
        config: Configuration as the server runs it.
        supervisor: Owner of the engine.

    Raises:
        ConfigValueError: ``server.api_keys`` has an invalid entry.
    """
    clock = SystemClock()
    has_others = len(ApiKeys(server_of(config).api_keys).callers) > 1
    admission = AdmissionControl(
        max_requests=server_of(config).max_requests,
        max_waiting_tokens=server_of(config).max_waiting_tokens,
        caller_share=server_of(config).key_share if has_others else 1.0,
        clock=clock,
    )
    return ServerContext(
        supervisor,
        config=server_of(config),
        model_names=model_names_of(config),
        admission=admission,
        clock=clock,
        created=int(time.time()),
        has_tenants=has_others,
    )


def config_to_serve(config: Config, *, placement: str = "process") -> Config:
    """Return the configuration with the server's additions. Pure.

    Args:
        config: Loaded configuration.
        placement: Placement that replaces ``[engine] placement = "auto"``.
    """
    engine, observer = config.engine, config.observer
    if engine.placement == "auto":
        engine = attrs.evolve(engine, placement=placement)
    added = server_of(config).observer
    if added and added not in observer.names:
        observer = attrs.evolve(observer, names=(*observer.names, added))
    name = model_names_of(config)[0]
    components = {key: _named(options, name) for key, options in observer.components.items()}
    return attrs.evolve(config, engine=engine, observer=attrs.evolve(observer, components=components))


def model_names_of(config: Config) -> tuple[str, ...]:
    """Return the served model names: ``server.model_name``, split at commas, else ``model.path``. Pure."""
    names = tuple(dict.fromkeys(name for part in server_of(config).model_name.split(",") if (name := part.strip())))
    return names or (config.model.path,)


def _named(options: Any, name: str) -> Any:
    """Return an observer's options with the model's name filled in, if they have an empty one. Pure."""
    if attrs.has(type(options)) and getattr(options, "model_name", None) == "":
        return attrs.evolve(options, model_name=name)
    return options


def listen(
    host: str, port: int, *, setting: str = "server.port", meaning_of_zero: str = "any free one"
) -> socket.socket:
    """Return a listening socket.

    Args:
        host: Host name or address.
        port: Port; 0: any free one.
        setting: Name of the setting of the port, for messages.
        meaning_of_zero: Meaning of 0 in that setting, for messages.

    Raises:
        ConfigError: The address does not exist, or the port is in use or forbidden.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f'[server] host = "{host}": no such address: {error.strerror or error}.', hint="Write 127.0.0.1 or 0.0.0.0."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f'[server] host = "{host}": this machine does not have that address.',
                hint="Correct server.host: 127.0.0.1, 0.0.0.0, or an address of this machine.",
            ) from error
        raise ConfigError(
            f"{setting} = {port}: {_reason(error, host)}", hint=f"Choose another {setting}; 0: {meaning_of_zero}."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket. Pure."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reason(error: OSError, host: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"the port is in use on {host}."
        case errno.EACCES:
            return "this user may not listen on it."
        case _:
            return f"cannot listen on it: {os.strerror(error.errno or 0)}."
