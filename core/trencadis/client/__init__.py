"""Client library: turns prompts into engine requests and engine outputs into text.

    LLM, AsyncLLM ─▶ Frontend: tokenizer, OutputProcessor ─▶ EngineClient ─▶ engine on this thread, or in a process of its own

``llm.LLM`` steps the engine itself; ``async_llm.AsyncLLM`` leaves that to an engine thread (``engine_thread``) or, with an engine in
another process (``process``), to the event loop. Modules are imported directly: this package imports nothing.
"""
