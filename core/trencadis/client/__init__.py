"""Client library: turns prompts into engine requests and engine outputs into text.

    LLM, AsyncLLM ─▶ Frontend: tokenizer, OutputProcessor ─▶ EngineClient ─▶ engine on this thread, or where a placement runs it

``llm.LLM`` steps the engine itself; ``async_llm.AsyncLLM`` leaves that to a runner: an engine thread (``engine_thread``), or that of a
placement. Modules are imported directly: this package imports nothing.
"""
