"""Routes of other servers that this one lacks, each with an alternative, for the 404 answer.

A client that was written for another server learns from its first request what to change.
"""

from __future__ import annotations

import attrs

__all__ = ["OTHER_ROUTES", "OtherRoutes", "instead_of"]


@attrs.frozen
class OtherRoutes:
    """Routes of other servers that one sentence answers.

    Attributes:
        servers: Names of servers or APIs that have them; empty: a mistyped address.
        paths: Paths of routes; each stands for itself and for all paths below it.
        instead: Advice what to use here, as a sentence.
    """

    servers: str
    paths: tuple[str, ...]
    instead: str


_CHAT = "Send messages to POST /v1/chat/completions."
_COMPLETIONS = "Send the prompt to POST /v1/completions."
_EMBEDDINGS = "Send the texts to POST /v1/embeddings."
_MODEL = "GET /v1/models has the names of the model and its longest context."
_ONE_MODEL = "A server has one model, named at its start: trencadis serve --model.path NAME."
_HEALTH = "GET /health says whether the engine serves, GET /ready whether requests may come."
_LOAD = "GET /metrics has the load: trencadis_running_sequences, trencadis_waiting_sequences and others."
_TEXT_ONLY = "Prompts and answers are text."

OTHER_ROUTES: tuple[OtherRoutes, ...] = (
    # A base URL that lacks /v1, or has it twice.
    OtherRoutes("llama.cpp", ("/chat/completions",), _CHAT),
    OtherRoutes("llama.cpp", ("/completions",), _COMPLETIONS),
    OtherRoutes("llama.cpp", ("/embeddings", "/embedding"), _EMBEDDINGS),
    OtherRoutes("llama.cpp", ("/models",), _MODEL),
    OtherRoutes("", ("/v1/v1",), "The address has /v1 twice: a base URL ends with one, and paths follow it."),
    OtherRoutes(
        "OpenAI",
        ("/v1/responses", "/v1/conversations", "/v1/assistants", "/v1/threads"),
        f"{_CHAT} Conversations are not stored.",
    ),
    OtherRoutes("OpenAI", ("/v1/audio", "/v1/images", "/v1/videos"), _TEXT_ONLY),
    OtherRoutes("OpenAI", ("/v1/realtime",), "POST /v1/chat/completions with stream = true sends tokens as they come."),
    OtherRoutes("OpenAI", ("/v1/moderations",), "There is no moderation."),
    OtherRoutes(
        "OpenAI",
        ("/v1/batches", "/v1/files", "/v1/uploads", "/v1/vector_stores"),
        "No files are stored: trencadis run-batch answers a file of requests.",
    ),
    OtherRoutes("OpenAI", ("/v1/fine_tuning", "/v1/fine-tunes"), "Models are served, not trained."),
    OtherRoutes("OpenAI", ("/v1/engines", "/v1/edits"), _COMPLETIONS),
    OtherRoutes(
        "Anthropic", ("/v1/messages/count_tokens",), "Send messages to POST /tokenize: the answer has their count."
    ),
    OtherRoutes("Anthropic", ("/v1/messages", "/v1/complete"), _CHAT),
    OtherRoutes(
        "vLLM, SGLang and llama.cpp",
        ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"),
        "Scores are not computed: POST /v1/embeddings gives vectors to compare.",
    ),
    OtherRoutes(
        "vLLM and SGLang",
        ("/classify", "/pooling", "/v1/classify"),
        "Classes are not computed: POST /v1/embeddings gives vectors.",
    ),
    OtherRoutes("Amazon SageMaker", ("/invocations",), _CHAT),
    OtherRoutes("Amazon SageMaker", ("/ping",), _HEALTH),
    OtherRoutes("vLLM, SGLang and llama.cpp", ("/load", "/get_load", "/v1/loads", "/slots"), _LOAD),
    OtherRoutes(
        "vLLM, SGLang and llama.cpp",
        ("/server_info", "/get_server_info", "/tokenizer_info", "/props"),
        f"{_MODEL} The operator's port has the configuration: server.admin_port, GET /admin/plugins there.",
    ),
    OtherRoutes(
        "vLLM and SGLang",
        (
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/pause",
            "/resume",
            "/is_paused",
            "/pause_generation",
            "/continue_generation",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ),
        "The engine has no sleep: end the server with SIGTERM, and it drains first.",
    ),
    OtherRoutes(
        "vLLM and SGLang",
        ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/flush_cache"),
        "The prefix cache is not emptied on request: another cache_salt of a request starts from nothing.",
    ),
    OtherRoutes(
        "vLLM and SGLang",
        ("/start_profile", "/stop_profile"),
        "SIGUSR2 to the server writes a flight record of the last steps.",
    ),
    OtherRoutes(
        "vLLM, SGLang and llama.cpp",
        (
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/load_lora_adapter",
            "/unload_lora_adapter",
            "/lora-adapters",
        ),
        "Adapters are not served: merge one into the weights first.",
    ),
    OtherRoutes(
        "vLLM and SGLang",
        (
            "/collective_rpc",
            "/update_weights",
            "/update_weights_from_disk",
            "/update_weights_from_tensor",
            "/update_weights_from_distributed",
            "/init_weights_update_group",
            "/get_weights_by_name",
            "/scale_elastic_ep",
        ),
        "Weights and layout are those of the start.",
    ),
    OtherRoutes(
        "SGLang", ("/abort_request", "/abort_requests"), "A request ends when its client closes the connection."
    ),
    OtherRoutes(
        "SGLang",
        ("/open_session", "/close_session"),
        "There are no sessions: prompts that begin alike share the prefix cache.",
    ),
    OtherRoutes("SGLang", ("/encode",), _EMBEDDINGS),
    OtherRoutes("SGLang", ("/get_model_info", "/model_info"), _MODEL),
    OtherRoutes("SGLang", ("/health_generate",), _HEALTH),
    OtherRoutes("SGLang", ("/v1/tokenize",), "Send the text to POST /tokenize."),
    OtherRoutes("SGLang", ("/v1/detokenize",), "Send the token ids to POST /detokenize."),
    OtherRoutes(
        "SGLang", ("/parse_function_call", "/separate_reasoning"), "Tool calls and reasoning are part of the text."
    ),
    OtherRoutes(
        "SGLang, vLLM and TGI",
        ("/generate", "/generate_stream", "/inference/v1/generate", "/vertex"),
        f"{_COMPLETIONS} stream = true streams.",
    ),
    OtherRoutes("TGI", ("/info",), _MODEL),
    OtherRoutes("TGI", ("/chat_tokenize",), "Send messages to POST /tokenize."),
    OtherRoutes("TGI", ("/embed", "/embed_all"), _EMBEDDINGS),
    OtherRoutes("llama.cpp", ("/completion",), _COMPLETIONS),
    OtherRoutes("llama.cpp", ("/infill",), "Text is only continued, not filled in: POST /v1/completions."),
    OtherRoutes(
        "llama.cpp", ("/apply-template",), "Send messages to POST /tokenize: the answer has the tokens of the prompt."
    ),
    OtherRoutes("llama.cpp", ("/v1/health",), _HEALTH),
    OtherRoutes("Kubernetes", ("/healthz", "/livez", "/readyz", "/health/live", "/health/ready"), _HEALTH),
    OtherRoutes("KServe and Triton", ("/v2/health",), _HEALTH),
    OtherRoutes("KServe and Triton", ("/v2/models",), _COMPLETIONS),
    OtherRoutes("Ollama", ("/api/chat",), _CHAT),
    OtherRoutes("Ollama and KoboldCpp", ("/api/generate", "/api/v1/generate"), _COMPLETIONS),
    OtherRoutes("Ollama", ("/api/embed", "/api/embeddings"), _EMBEDDINGS),
    OtherRoutes("Ollama", ("/api/tags", "/api/show", "/api/ps"), _MODEL),
    OtherRoutes("Ollama", ("/api/version",), "GET /version has the version."),
    OtherRoutes(
        "Ollama", ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"), _ONE_MODEL
    ),
)
"""Longer paths come before those that they begin with."""


def instead_of(path: str) -> OtherRoutes | None:
    """Return the entry of a path that other servers have, or None. Pure.

    Args:
        path: A path that is not here.
    """
    path = path.rstrip("/")
    for one in OTHER_ROUTES:
        if any(path == known or path.startswith(f"{known}/") for known in one.paths):
            return one
    return None
