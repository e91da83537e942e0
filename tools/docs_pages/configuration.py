"""``docs/configuration.md`` and the pages below it: every setting of the schema and of the built-in components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import entry_points

from docs_pages.markdown import heading_note, table
from trencadis.config import Settings
from trencadis.config.reference import SPELLINGS, alias_table, describe, tables_reference
from trencadis.other_engines import ENGINES, sections
from trencadis.registry import Registry

__all__ = ["CONFIGURATION_PAGES", "built_in_settings"]

_NOTE = heading_note("the config classes")

_ANSWERED = """A command that is given a flag of vLLM, SGLang or llama.cpp answers with the one that means the same here, from these tables.
Those of vLLM are in [Coming from vLLM](../do/from-vllm.md)."""

_FIRST: Mapping[str, str] = {
    "model.path": "always, except for a first try",
    "model.max_model_len": "when the model's own length is more than your requests need: shorter means fewer buckets and less memory",
    "backend.name": "for Intel Gaudi; CPU and CUDA are found",
    "engine.max_num_seqs": "more for throughput, fewer for an even pace",
    "engine.max_num_batched_tokens": "more to compute prompts in fewer steps, fewer so that running requests wait less for a prompt",
    "cache.memory_fraction": "more if requests are preempted and nothing else needs the memory",
    "cache.prefix_caching": "off only to measure without it",
    "scheduling.name": "when first come, first served is not the right order",
    "bucketing.name": "with a padded or unified layout, if padding or warm-up is too much",
    "speculation.name": "with few requests at once and text that can be guessed",
    "kv_connector.name": "to keep KV after a restart, share it, or split prefill and decode",
    "server.host": "to listen on other interfaces than loopback",
    "server.port": "if 8000 is taken",
    "server.api_keys": "as soon as other people can reach the port",
    "server.max_requests": "fewer to answer 429 sooner when the load is too high",
}
"""The settings that matter most, and when to change each."""

_HEAD = f"""# Configuration

{_NOTE}

{SPELLINGS}
## The fifteen that matter

The defaults serve a model well on one machine. Look at these first, and at the others when a measurement says so.
"""


@cache
def built_in_settings() -> Settings:
    """Return the settings of the schema and of this distribution's components; those of other packages are left out."""
    points = [point for point in entry_points(group="trencadis") if point.dist and point.dist.name == "trencadis"]
    return Registry.discover(strict=True, entry_points=points).settings


def _nouns() -> tuple[str, ...]:
    return built_in_settings().nouns


def _general_tables() -> list[str]:
    return [name for name in built_in_settings().tables() if "." not in name and name not in _nouns()]


def _front_page() -> str:
    """Return the page with the spellings, the most important settings and the list of the other pages."""
    settings = built_in_settings()
    rows = []
    for path, when in _FIRST.items():
        setting = settings.get(path)
        assert setting is not None, f"{path} is no setting any more"
        noun = path.removesuffix(".name")
        meaning = f"Component of the noun `{noun}`." if noun in _nouns() else setting.help
        rows.append((f"[`{path}`]({_page_of(path)})", describe(setting), meaning, when))
    listed = [
        (f"[`{noun}`](configuration/{noun}.md)", ", ".join(f"`{name}`" for name in _components(noun)))
        for noun in _nouns()
    ]
    general = ", ".join(f"`[{name}]`" for name in _general_tables())
    return "\n".join(
        [
            _HEAD,
            table(("setting", "type", "meaning", "change it"), rows),
            "## All of them\n",
            "A page for each noun, with the tables of its components:\n",
            table(("noun", "components"), listed),
            f"[Engine and server](configuration/general.md) has the tables that belong to no noun: {general}.",
            "[Names of other software](configuration/other-names.md) has flags of SGLang and llama.cpp, and the environment variables of the vLLM plugin for Gaudi.\n",
            "```{toctree}\n:hidden:\n",
            "\n".join(["configuration/general", *(f"configuration/{noun}" for noun in _nouns())]),
            "configuration/other-names\n```\n",
        ]
    )


def _page_of(path: str) -> str:
    noun = path.partition(".")[0]
    return f"configuration/{noun if noun in _nouns() else 'general'}.md"


def _components(noun: str) -> list[str]:
    return [
        name.partition(".")[2]
        for name in built_in_settings().tables()
        if name.startswith(f"{noun}.") and name.count(".") == 1
    ]


def _noun_page(noun: str) -> str:
    contract = f"What it decides, and how to write one: [{noun}](../plugins/{noun}.md)."
    spellings = (
        "How a key is written in a file, in the environment and as a flag: [Configuration](../configuration.md)."
    )
    sections = tables_reference(built_in_settings(), nouns={noun})
    return f"# Configuration of {noun}\n\n{_NOTE}\n\n{contract}\n{spellings}\n\n{sections}"


def _general_page() -> str:
    sections = tables_reference(built_in_settings(), nouns=_general_tables())
    return f"# Configuration of engine and server\n\n{_NOTE}\n\n{sections}"


def _other_names_page() -> str:
    from docs_pages.other_engines import flags_of, other_commands

    parts = ["# Names of other software", f"{_NOTE}\n\n{_ANSWERED}"]
    for engine in ("sglang", "llama"):
        parts.append(f"## Flags of {ENGINES[engine]}")
        for section in sections():
            parts.append(f"{section.title}:")
            parts.append(flags_of(engine, section.title, folder="configuration").rstrip("\n"))
    parts += ["## Commands", other_commands().rstrip("\n")]
    parts += ["## Environment variables of the vLLM plugin for Gaudi", alias_table(built_in_settings())]
    return "\n\n".join(parts)


CONFIGURATION_PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": _front_page,
    "configuration/general.md": _general_page,
    **{f"configuration/{noun}.md": partial(_noun_page, noun) for noun in _nouns()},
    "configuration/other-names.md": _other_names_page,
}
"""Path under ``docs/`` of each page, and what makes it."""
