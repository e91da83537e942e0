"""Table of all checks, in the order of the run."""

from __future__ import annotations

from trencadis_gaudi.checks.records import Check

__all__ = ["GROUPS", "MODES", "START", "TABLE", "checks_of"]

MODES = ("lazy", "compile", "eager")
GROUPS = ("software", *MODES, "cards")
"""Groups of checks, each in its own process, since the mode of the Gaudi software is fixed when torch is imported."""

START = Check(
    name="process",
    run="",
    groups=GROUPS,
    does="start a Python process, run the checks in it and let it end",
    expects="it reaches its first check, and ends with exit code 0",
    means="The software crashes outside of any check, or hangs: see the end of its output, and dmesg.",
)
"""Check of the process itself."""

_LAZY, _COMPILE = ("lazy",), ("compile",)
_GRAPHS = ("lazy", "compile")

TABLE = (
    # ------------------------------------------------------------------------------------------------- software
    Check(
        name="release",
        run="software.release",
        groups=("software",),
        does="read the version of habana-torch-plugin",
        expects="a release from 1.19 to 1.24",
        means="The backend was not written for this release: install another, or set backend.gaudi.any_version = true and see what else fails.",
    ),
    Check(
        name="autoload",
        run="software.autoload",
        groups=("software",),
        does="import torch, with PT_HPU_LAZY_MODE unset, and look for habana_frameworks.torch",
        expects="import torch imports it",
        means="import torch does not load the Gaudi software: see TORCH_DEVICE_BACKEND_AUTOLOAD. The backend imports it itself, so it "
        "starts; docs/gaudi.md is wrong about this release.",
        is_vital=False,
    ),
    Check(
        name="default mode",
        run="software.default_mode",
        groups=("software",),
        does="ask is_lazy() with PT_HPU_LAZY_MODE unset",
        expects="lazy mode in releases up to 1.19, torch.compile in later ones",
        means='mode = "auto" chooses another mode than this release would: set backend.gaudi.mode, and report the release.',
        is_vital=False,
    ),
    # --------------------------------------------------------------------------------------------------- device
    Check(
        name="device",
        run="device.opens",
        groups=MODES,
        does="set the environment of the mode, import the Gaudi software and open a device",
        expects="a device, in the mode that was asked for",
        means="Nothing runs in this mode: see hl-smi, and that driver, firmware and software are of one release.",
    ),
    Check(
        name="names",
        run="device.names",
        groups=MODES,
        does="look up every name of the Gaudi software that the backend uses",
        expects="all are there",
        means="This release has moved or dropped them: the parts of the backend that use them cannot run; report the names.",
    ),
    Check(
        name="memory",
        run="device.memory",
        groups=MODES,
        does="compare mem_get_info() with memory_stats(), and allocate 64 MiB",
        expects="(Limit - InUse, Limit); InUse grows by 64 to 128 MiB",
        means="The KV cache and the budget of graphs are sized from these numbers: set cache.num_blocks by hand until this is right.",
    ),
    # -------------------------------------------------------------------------------------------------- numbers
    Check(
        name="64-bit integers",
        run="numbers.integers",
        groups=MODES,
        does="multiply 2**20 + 1 by 2**20 + 3 on the device",
        expects="the low 32 bits in lazy mode, the product elsewhere",
        means="Integers are not as wide as expected. Wider ones do no harm; narrower ones make slots of a KV cache beyond 2**31 wrong: "
        "use another mode.",
    ),
    Check(
        name="float64",
        run="numbers.doubles",
        groups=MODES,
        does="compute (1 + 2**-40) - 1 in float64 on the device",
        expects="0 in lazy mode, as float32; 0 or 2**-40 elsewhere",
        means="float64 has another width than expected. The backend computes in float32 at most on the device: no harm is known.",
        is_vital=False,
    ),
    Check(
        name="bfloat16",
        run="numbers.bfloat16",
        groups=MODES,
        does="multiply matrices of 128 x 256 x 128 in bfloat16 and compare with float32 on the CPU",
        expects="a relative error of the whole (Frobenius) of at most 1%",
        means="Matrix products are wrong, or less exact than bfloat16 allows: no text of this device can be trusted.",
    ),
    Check(
        name="random numbers",
        run="numbers.draws",
        groups=MODES,
        does="make waiting times on the host, send them as float32, and draw 512 tokens out of 1,000 with them here and on the CPU",
        expects="the same bits, and at least 99% of the CPU's tokens",
        means="Seeded requests have other tokens than on a CPU: copies to the device, softmax or argmin are not as expected.",
    ),
    # -------------------------------------------------------------------------------------------------- metrics
    Check(
        name="compilations counted",
        run="metrics.compilations",
        groups=MODES,
        does="run a computation of a new shape twice within the metric graph_compilation",
        expects="1 in lazy mode, 1 or more elsewhere; then 0",
        means="trencadis_gaudi_recompilations_total and every statement about compilations below mean nothing.",
    ),
    Check(
        name="fallbacks counted",
        run="metrics.fallbacks",
        groups=MODES,
        does="sort 64 numbers stably, which the release 1.19 does on the host, within the metric cpu_fallback",
        expects="1 or more",
        means="Either this release has a kernel for it, or the metric counts nothing, and the checks of fallbacks below mean nothing.",
        is_vital=False,
    ),
    Check(
        name="operations",
        run="operations.every",
        groups=MODES,
        does="run every operation of a forward and of the sampler once, within the metric cpu_fallback, and compare with the CPU",
        expects="0 fallbacks, results within 0.001 of the CPU's",
        means="The operations named run on the host, or wrongly: a captured graph with one of them fails, any other step is slow.",
    ),
    Check(
        name="copies to the host",
        run="device.host_copies",
        groups=MODES,
        does="start a copy of 4 Mi numbers without waiting, record an event, wait for it",
        expects="the numbers",
        means="Results of steps are read too early: tokens are garbage. Report the release; no setting avoids it.",
    ),
    # --------------------------------------------------------------------------------------------------- graphs
    Check(
        name="mark_step",
        run="graphs.marks",
        groups=_LAZY,
        does="run two operations before one mark_step, then two with a mark_step between",
        expects="1 program, then 2; right results",
        means="Steps are cut into other programs than the warm-up compiles: expect compilations while requests wait.",
    ),
    Check(
        name="PT_COMPILE_ONLY_MODE",
        run="graphs.compile_only",
        groups=_GRAPHS,
        does="compile within bridge_config.env_setting, then run",
        expects="1 or more programs, then none and right results",
        means="The warm-up prepares nothing: set backend.gaudi.compile_only = false.",
    ),
    Check(
        name="HPU graph",
        run="graphs.replay",
        groups=_LAZY,
        does="capture a module with wrap_in_hpu_graph and replay it with other inputs",
        expects="the results of those inputs, and nothing compiled on replay",
        means='Replayed graphs are wrong: set backend.gaudi.mode = "compile".',
    ),
    Check(
        name="memory of graphs",
        run="graphs.costs",
        groups=_LAZY,
        does="capture graphs of 256 to 2048 tokens, and estimate each from those before",
        expects="the last estimate within a factor of 2 of its memory",
        means='Estimates of graphs are off: with capture = "budgeted" raise graph_reserve, and keep memory_utilization at 0.9.',
        is_vital=False,
    ),
    Check(
        name="torch.compile",
        run="graphs.layers",
        groups=_COMPILE,
        does='compile four alike layers, each with its own weights and cache, with backend "hpu_backend", and run them twice',
        expects="1 graph, 0 graph breaks, 0 limits hit, 0 programs the second time, right results",
        means="The warm-up takes as many times longer as there are more graphs; if results are wrong, "
        'set backend.gaudi.mode = "lazy".',
    ),
    # -------------------------------------------------------------------------------------------------- kernels
    Check(
        name="FusedSDPA",
        run="kernels.fused_sdpa",
        groups=MODES,
        does="attention of 2 sequences, 8 query and 2 key heads, 128 tokens, causal with padding and with a mask, in bfloat16",
        expects="within 0.03 of the same in float32 on the CPU",
        means="The kernel is missing or wrong: set backend.gaudi.fused_sdpa = false.",
    ),
    Check(
        name="FusedRMSNorm",
        run="kernels.norm",
        groups=MODES,
        does="the RMS norm of 16 tokens of 256 elements, in bfloat16, against its published meaning in plain operations",
        expects="a relative error of the whole of at most 2%",
        means="The backend tries it when it loads a model and does not use it: norms run in plain operations. Report the release.",
        is_vital=False,
    ),
    Check(
        name="apply_rotary_pos_emb",
        run="kernels.rotary",
        groups=MODES,
        does="rotary embeddings of 16 tokens and 4 heads, in both modes, against their published meaning in plain operations",
        expects="a relative error of the whole of at most 2%",
        means="The backend tries it when it loads a model and does not use it: rotary embeddings run in plain operations. Report the release.",
        is_vital=False,
    ),
    Check(
        name="mixture_of_experts",
        run="kernels.experts",
        groups=MODES,
        does="8 experts, 2 of them for each of 64 tokens, in bfloat16, against every expert on every token",
        expects="a relative error of the whole of at most 2%",
        means="Mixtures of experts compute something else: do not serve them on this release, and report it.",
    ),
    Check(
        name="fp8",
        run="kernels.fp8",
        groups=MODES,
        does="a linear layer of 32 tokens with dynamic scales in fp8, against the same in bfloat16 on the CPU",
        expects="a relative error of the whole of at most 10%",
        means='fp8 computes something else, or saturates elsewhere: set backend.gaudi.fp8 = "off" and kv_cache_dtype = "auto".',
    ),
    Check(
        name="KV cache",
        run="kernels.cache",
        groups=MODES,
        does="write keys to slots of a flat cache with index_copy_, and gather blocks",
        expects="what was written where, and nothing elsewhere",
        means="Attention reads wrong keys: no text of this device can be trusted.",
    ),
    Check(
        name="block swaps",
        run="kernels.swaps",
        groups=MODES,
        does="swap two KV blocks as the defragmenter does",
        expects="each has the other's content; all others keep theirs",
        means="Set defragmenter off, and backend.gaudi.contiguous = false.",
    ),
    # --------------------------------------------------------------------------------------------------- engine
    Check(
        name="engine",
        run="engine.serves",
        groups=MODES,
        does="warm up an engine with the demo model and serve four requests",
        expects="all buckets are prepared, no request fails",
        means="The backend does not run here; the checks above should say why.",
    ),
    Check(
        name="greedy text",
        run="engine.greedy",
        groups=MODES,
        does="compare greedy tokens with those of the backend torch on the CPU",
        expects="all equal on the emulated device; on a Gaudi at least half, as near ties round otherwise in bfloat16",
        means="The forward computes something else: look at the checks of kernels and of the KV cache.",
    ),
    Check(
        name="seeded text",
        run="engine.seeded",
        groups=MODES,
        does="the same with temperature 0.8 and a seed",
        expects="all equal on the emulated device; on a Gaudi at least a quarter",
        means="If greedy text is right: the sampler draws otherwise than a CPU; look at the checks of numbers.",
    ),
    Check(
        name="nothing compiled",
        run="engine.compiles_nothing",
        groups=_GRAPHS,
        does="count compilations while those requests were served",
        expects="0 after the warm-up",
        means="Requests will wait for compilations: start with PT_HPU_METRICS_GC_DETAILS=1, whose warnings name the programs.",
    ),
    Check(
        name="nothing on the host",
        run="engine.falls_back_nowhere",
        groups=MODES,
        does="read the metric cpu_fallback over the whole life of that engine",
        expects="0",
        means="The operations named have no kernel: steps are slow, with a copy each way.",
    ),
    # ---------------------------------------------------------------------------------------------------- cards
    Check(
        name="all-reduce",
        run="cards.sums",
        groups=("cards",),
        does="sum 1 over all devices with hccl, a process for each",
        expects="the number of devices",
        means="Devices do not reach each other: see hl-smi, the network of the cards, and HABANA_VISIBLE_MODULES.",
    ),
    Check(
        name="ranks",
        run="cards.ranks",
        groups=("cards",),
        does="serve with [parallel] tensor = 2 on the demo model, in the configured mode: exchanges are part of graphs",
        expects="the tokens of the backend torch, half of them at least in bfloat16, and nothing compiled after the warm-up",
        means="Graphs do not hold what ranks exchange: try the other of backend.gaudi.mode = lazy and compile, or serve with one card.",
    ),
)


def checks_of(group: str) -> tuple[Check, ...]:
    """Return the checks of a group. Pure."""
    return tuple(check for check in TABLE if group in check.groups)
