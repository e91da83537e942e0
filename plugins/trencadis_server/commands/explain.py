"""``trencadis explain``: why a running server scheduled a request or not in each of the last steps."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from trencadis.api import Config, Registry
from trencadis.console import print_table
from trencadis.errors import ConfigError, EngineEndedError, InvalidRequestError, TrencadisError
from trencadis_server.config import server_of

__all__ = ["add_arguments", "run"]

_TIMEOUT_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("request_id", help="id of the answer, such as chatcmpl-...; also of a request that has ended")
    parser.add_argument(
        "--url", help="address of the administration; by default port server.admin_port of this machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print the request's timeline; returns 0.

    Raises:
        ConfigError: The address of the administration is not known.
        EngineEndedError: No server answers there, or the engine does not serve.
        InvalidRequestError: The request is not known there.
    """
    answer = _ask(_address(args.url, config), args.request_id, key=server_of(config).admin_key)
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return 0
    print(f"record: steps {answer['oldest_step']} to {answer['newest_step']}")
    for request in answer["requests"]:
        _print_request(request)
    return 0


def _address(url: str | None, config: Config) -> str:
    if url:
        if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
            raise ConfigError(f"--url {url}: no address.", hint="It reads http://HOST:PORT.")
        return url.rstrip("/")
    server = server_of(config)
    if not server.admin_port:
        raise ConfigError(
            "[server] admin_port = 0: the server has no administration pages to ask.",
            hint="Set it for the server and here, or give --url.",
        )
    return f"http://127.0.0.1:{server.admin_port}"


def _ask(address: str, request_id: str, *, key: str) -> dict[str, Any]:
    url = f"{address}/admin/explain/{urllib.parse.quote(request_id, safe='/')}"
    # A proxy of the environment has no way to this machine's loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise _refused(error, address) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineEndedError(
            f"{address}: no server answers: {reason}.",
            hint="Start trencadis serve with the same server.admin_port, or give --url.",
        ) from error
    if "requests" not in answer:
        raise EngineEndedError(f"{address}: what answers there is no administration of Trencadís.")
    return answer


def _refused(error: urllib.error.HTTPError, address: str) -> TrencadisError:
    """Return the error for a response with an error status."""
    with error:
        try:
            found = json.load(error)["error"]
        except (ValueError, KeyError, TypeError):
            found = {}
    message = found.get("message") or f"it answered {error.code}"
    if found.get("code") == "unknown_request":
        return InvalidRequestError(message)
    if found.get("code") == "unknown_url":
        return ConfigError(f"{address}: there are no administration pages.", hint="They are on server.admin_port.")
    return EngineEndedError(f"{address}: {message}")


def _print_request(request: Mapping[str, Any]) -> None:
    end = f", {request['finish_reason']}" if request["finish_reason"] else ""
    sizes = f"{request['num_prompt_tokens']} prompt and {request['num_output_tokens']} output tokens"
    print(f"\n{request['request_id']}: {request['state']}{end}; {sizes}")
    if request["error"]:
        print(f"error: {request['error']}")
    if not request["is_complete"]:
        print("(its first steps are no longer in the record)")
    headings = (
        "steps",
        "seconds",
        "outcome",
        "why",
        "rank",
        "tokens",
        "budget",
        "blocks",
        "running",
        "bucket",
        "policy",
    )
    print_table(headings, [_row(span) for span in request["spans"]])


def _row(span: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _range((span["first_step"], span["last_step"])),
        _seconds(span["first_s"], span["last_s"]),
        span["outcome"],
        f"{span['reason']} {span['other']}".strip(),
        _range(span["rank"]),
        f"{span['tokens'][0]} to {span['tokens'][1]}" if span["tokens"] else "",
        f"{_range(span['budget_left'])} left" if span["budget_left"] else "",
        f"needs {_range(span['blocks_needed'])}, free {_range(span['blocks_free'])}"
        if span["blocks_needed"]
        else f"free {_range(span['blocks_free'])}",
        _range(span["num_running"]),
        "; ".join(span["buckets"]),
        span["policy"],
    )


def _range(ends: Any) -> str:
    if not ends:
        return ""
    least, greatest = ends
    return str(least) if least == greatest else f"{least}-{greatest}"


def _seconds(first_s: float, last_s: float) -> str:
    return f"{first_s:.3f}" if first_s == last_s else f"{first_s:.3f}-{last_s:.3f}"
