"""``docs/http-api.md``: routes, headers and every field of a request, from the protocol of the server."""

from __future__ import annotations

from docs_pages.markdown import heading_note
from trencadis_server.protocol.fields_page import fields_page

__all__ = ["http_api_page"]

_HEAD = f"""# HTTP API

{heading_note("the request classes of trencadis_server.protocol")}

`GET /openapi.json` describes requests and responses as an OpenAPI document.

| route | answers |
|---|---|
| `POST /v1/chat/completions` | the next message of a conversation, whole or as a stream |
| `POST /v1/completions` | texts that continue prompts, whole or as a stream |
| `POST /v1/embeddings` | one vector for each text |
| `GET /v1/models`, `GET /v1/models/NAME` | the names that the server answers to, with `max_model_len` |
| `POST /tokenize`, `POST /detokenize` | token ids of a text or a conversation, and back |
| `GET /version` | the server's version |
| `GET /health`, `GET /ready` | 200, or 503 with the reason |
| `GET /` | version, models and routes: JSON with `Accept: application/json`, else text |
| `GET /docs` | the API in a browser, where requests can be tried; nothing is loaded from elsewhere |
| `GET /metrics` | [metrics](metrics.md) for Prometheus |

| header | meaning |
|---|---|
| `Authorization: Bearer KEY` | needed if `server.api_keys` is set, except for `/`, `/docs`, `/openapi.json`, `/health`, `/ready`, `/version` and `/metrics` |
| `x-request-id` | on every response; a client's own is taken over if it is plain text of reasonable length |
| `Retry-After`, `x-should-retry` | on 429 and 503: seconds to wait, and whether it is worth it |
"""


def http_api_page() -> str:
    """Return the page."""
    title, _, fields = fields_page().partition("\n")
    return f"{_HEAD}\n{title.replace('# ', '## ', 1)}\n" + fields.replace("\n## ", "\n### ")
