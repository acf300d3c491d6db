"""Combinations of stock vLLM (0.32, 0.33) that are wrong today; docs/known-faults.md is made of it.

`doctor` and `advise` name those that a configuration meets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Combination:
    """What a fault depends on.

    Attributes:
        method: of speculation as vLLM names it, "hsd" for ours; None without speculation.
        ours: whether our samplers verify.
        device: vLLM's name of the kind of device.
        runner: "V1" or "V2".
        recurrent: whether the target keeps a state that is no KV cache.
        prefix_caching: whether it is on.
        release: of vLLM, as in "0.33".
        rule: vLLM's `rejection_sample_method`.
        async_scheduling, adaptive_verification: whether they are on.
        by_batch_size: whether draft lengths follow the batch size.
        tensor_parallel: ranks that verify together.
        short_graphs: whether the largest batch of drafts has no CUDA graph.
        short_draft: whether the draft model knows fewer positions than are served.
        compiled_ahead: whether the model is compiled, and kept for later starts.
    """

    method: str | None
    ours: bool
    device: str
    runner: str
    recurrent: bool = False
    prefix_caching: bool = True
    release: str = ""
    rule: str = "standard"
    async_scheduling: bool = False
    adaptive_verification: bool = False
    by_batch_size: bool = False
    tensor_parallel: int = 1
    short_graphs: bool = False
    short_draft: bool = False
    compiled_ahead: bool = False

    @classmethod
    def of(cls, config: Any) -> Combination:
        from vllm import envs
        from vllm.platforms import current_platform

        from vllm_hsd.host.engine_hooks import NeedsHooks
        from vllm_hsd.host.registry import installed_release

        own, graphs = config.speculative_config, config.compilation_config
        drafts = getattr(own, "draft_model_config", None)
        positions = getattr(getattr(drafts, "hf_config", None), "max_position_embeddings", None)
        widest = config.scheduler_config.max_num_seqs * (config.num_speculative_tokens + 1)
        return cls(
            method=getattr(own, "method", None),
            ours=isinstance(own, NeedsHooks),
            device=current_platform.device_type,
            runner="V2" if config.use_v2_model_runner else "V1",
            recurrent=bool(config.model_config.is_hybrid or config.model_config.is_attention_free),
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            release=installed_release(),
            rule=getattr(own, "rejection_sample_method", "standard"),
            async_scheduling=bool(config.scheduler_config.async_scheduling),
            adaptive_verification=getattr(own, "enable_adaptive_verification", False),
            by_batch_size=bool(getattr(own, "num_speculative_tokens_per_batch_size", None)),
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            short_graphs=0 < (graphs.max_cudagraph_capture_size or 0) < widest,
            short_draft=bool(positions) and positions < config.model_config.max_model_len,
            compiled_ahead=bool(graphs.mode) and envs.VLLM_USE_AOT_COMPILE,
        )

    @property
    def stock(self) -> bool:
        """Whether vLLM's own samplers verify drafts."""
        return self.method is not None and not self.ours


@dataclass(frozen=True)
class KnownFault:
    """A fault of vLLM's.

    Attributes:
        condition: what has to come together, after "with".
        symptom: what one sees.
        way_out: what to do.
        meets: whether a combination can meet it; requests decide the rest.
        issue: vLLM's.
        seen: how we know of it.
    """

    condition: str
    symptom: str
    way_out: str
    meets: Callable[[Combination], bool]
    issue: str = "none filed"
    seen: str = "run on 0.32"

    @property
    def sentence(self) -> str:
        """What the reports say."""
        return (
            f"known fault of vLLM with {self.condition}: {self.symptom}. Way out: {self.way_out} "
            f"({self.issue}; {self.seen})"
        )


REPORTED = "reported, open; not run by us"
GONE_METHODS = KnownFault(
    "method `medusa` or `mlp_speculator`",
    "vLLM 0.33 has neither and refuses them; 0.32 does not start with the second",
    "an EAGLE-3 head or a small model, or for `medusa` vLLM 0.32",
    issue="vllm-project/vllm#47825",
    seen="read in 0.33",
    meets=lambda c: c.method in ("medusa", "mlp_speculator"),
)

KNOWN_FAULTS = (
    KnownFault(
        "vLLM's own verification on a CPU on the V1 runner, temperature above 0",
        "sampled tokens do not follow the target",
        "temperature 0, or the V2 runner, which serves where vllm-hsd is installed, but for "
        'methods `suffix` and `custom_class`; in place of `suffix`, `"levels": [{"suffix": {}}]`',
        issue="vllm-project/vllm#55005, vllm-project/vllm#55006",
        seen="run on 0.32 and 0.33",
        meets=lambda c: c.stock and c.device == "cpu" and c.runner == "V1",
    ),
    KnownFault(
        "a streaming-input session under any speculation, where a stop token ends a turn inside "
        "an accepted draft",
        "the next turn goes on from other tokens, and from cache entries of tokens behind the stop",
        'one request for each turn, or method `"hsd"` or `"hierarchical"`',
        meets=lambda c: c.stock,
    ),
    KnownFault(
        "a request with a `thinking_token_budget` that leaves the batch before it is spent, on the "
        "V1 runner, with or without speculation",
        "the request that moves into its row ends its text as if it had been thinking",
        'the V2 runner, on which method `"hsd"` and `"hierarchical"` serve',
        meets=lambda c: not c.ours and c.runner == "V1",
    ),
    KnownFault(
        "a request with a `thinking_token_budget` that is preempted after its end, on the V1 "
        "runner without speculation",
        "the tokens that end its thinking are written once more",
        "more memory for the cache, or the V2 runner",
        meets=lambda c: not c.ours and c.runner == "V1",
    ),
    KnownFault(
        "a request with `logprob_token_ids` in a batch with one with `logprobs`, without "
        "speculation on the V1 runner",
        "the other request gets the log-probabilities of the listed tokens, not of the likely ones",
        "separate engines, or the V2 runner",
        meets=lambda c: c.method is None and c.runner == "V1",
    ),
    KnownFault(
        "a request with `logprob_token_ids` next to one with `logprobs` under vLLM's own "
        "speculation on the V1 runner",
        "the engine ends",
        '`"rejection_sample_method": "hierarchical"`',
        meets=lambda c: c.stock and c.runner == "V1",
    ),
    KnownFault(
        "a request with `logprob_token_ids` under vLLM's own speculation on the V2 runner",
        "steps with drafts pass over the list",
        '`"rejection_sample_method": "hierarchical"`',
        seen="read in 0.32",
        meets=lambda c: c.stock and c.runner == "V2",
    ),
    KnownFault(
        "a request with a seed whose prompt is prefilled in chunks, on a CPU without speculation",
        "the engine ends: torch cannot rewind a generator there",
        "`max_num_batched_tokens` above the longest prompt",
        meets=lambda c: c.method is None and c.device == "cpu" and c.runner == "V1",
    ),
    KnownFault(
        "`top_p` without `top_k` at temperatures up to about .1 on the V2 runner; under `hsd` and "
        "`hierarchical` next to a request that vLLM processes, as for a penalty",
        "tokens that `top_p` excludes: the filter keeps all",
        "`top_k` as well, 1000 for example",
        seen="0.32's kernel run on a CPU, where vllm-hsd filters by torch in its place",
        meets=lambda c: c.device == "cuda" and c.runner == "V2",
    ),
    KnownFault(
        "any speculation on a CPU below a target with recurrent layers",
        "texts differ from those without speculation: the state of rejected tokens is kept",
        "no speculation",
        meets=lambda c: c.stock and c.device == "cpu" and c.recurrent,
    ),
    KnownFault(
        "prefix caching, MTP layers and a target with recurrent layers",
        "wrong tool calls and answers after prefix-cache hits",
        "`--no-enable-prefix-caching`",
        issue="vllm-project/vllm#53912, vllm-project/vllm#47194",
        seen="reported for 0.28, open; not run by us",
        meets=lambda c: c.method == "mtp" and c.recurrent and c.prefix_caching,
    ),
    KnownFault(
        "prompt log-probabilities under speculation with CUDA graphs, prompts no longer than the "
        "largest captured size",
        "log-probabilities of the prompt are those of other states",
        "ask for them from an engine without speculation",
        issue="vllm-project/vllm#53520",
        seen="reported for 0.26, open; not run by us",
        meets=lambda c: c.stock and c.device == "cuda" and c.runner == "V1",
    ),
    KnownFault(
        "a grammar with a reasoning parser, where the reasoning ends inside a draft",
        "the tokens behind its end are not checked: invalid JSON",
        "no speculation for such requests",
        issue="vllm-project/vllm#36138",
        seen=REPORTED,
        meets=lambda c: c.stock,
    ),
    KnownFault(
        "captured CUDA graphs that end below max_num_seqs * (num_speculative_tokens + 1), as by a "
        "`max_cudagraph_capture_size` that is no multiple of vLLM's steps",
        "slow, not wrong: the largest batches are verified without a graph",
        "list `cudagraph_capture_sizes`, that size included",
        issue="vllm-project/vllm#37865, vllm-project/vllm#54933",
        seen=REPORTED,
        meets=lambda c: c.method is not None and c.device == "cuda" and c.short_graphs,
    ),
    KnownFault(
        "prefix caching and any speculation below a target with recurrent layers",
        "slow, not wrong: the prefix cache is hit no more",
        "no speculation where prompts repeat",
        issue="vllm-project/vllm#54360",
        seen="reported for a nightly after 0.28, open; not run by us",
        meets=lambda c: c.stock and c.recurrent and c.prefix_caching,
    ),
    KnownFault(
        "prefix caching, asynchronous scheduling and speculation below a target with recurrent "
        "layers, on the V1 runner",
        "under load a request takes another's count of accepted tokens: wrong texts",
        "`--no-async-scheduling`, or the V2 runner",
        issue="vllm-project/vllm#53919",
        seen=REPORTED,
        meets=lambda c: (
            c.stock and c.recurrent and c.prefix_caching and c.async_scheduling and c.runner == "V1"
        ),
    ),
    KnownFault(
        "`num_speculative_tokens_per_batch_size` on the V1 runner on a GPU",
        "slow, not wrong: throughput collapses above a threshold of the table",
        "the V2 runner, or one length",
        issue="vllm-project/vllm#49548",
        seen=REPORTED,
        meets=lambda c: c.stock and c.by_batch_size and c.device == "cuda" and c.runner == "V1",
    ),
    KnownFault(
        "`enable_adaptive_verification` with tensor parallelism",
        "ranks can choose different drafts: fewer tokens are accepted, then the engine hangs",
        '`"enable_adaptive_verification": false`',
        issue="vllm-project/vllm#54011, vllm-project/vllm#56831",
        seen=REPORTED,
        meets=lambda c: c.adaptive_verification and c.tensor_parallel > 1,
    ),
    KnownFault(
        "a DFlash or DSpark draft that knows fewer positions than `max_model_len`, on the V2 "
        "runner of 0.32",
        "the first longer request ends the engine with an illegal memory access",
        "`--max-model-len` within the draft's `max_position_embeddings`, or vLLM 0.33",
        issue="vllm-project/vllm#57941, vllm-project/vllm#57964",
        seen="reported; read in 0.32 and 0.33; not run by us",
        meets=lambda c: (
            c.method in ("dflash", "dspark")
            and c.short_draft
            and c.runner == "V2"
            and c.release == "0.32"
        ),
    ),
    KnownFault(
        '`"rejection_sample_method": "block"` in 0.32, temperature above 0',
        "rejected positions meet their uniforms again: sampled tokens do not follow the target",
        '`"hierarchical"`, or vLLM 0.33',
        seen="read in 0.32 and 0.33",
        meets=lambda c: c.stock and c.rule == "block" and c.release == "0.32",
    ),
    KnownFault(
        '`"rejection_sample_method"` `"fly"` or `"synthetic"`',
        "texts are not the target's, by intention",
        '`"standard"`, or `"hierarchical"`',
        seen="read in 0.33",
        meets=lambda c: c.rule in ("fly", "synthetic"),
    ),
    KnownFault(
        "a compiled engine on a CPU, with or without speculation",
        "slow, not wrong: what a start has compiled cannot be loaded (`finalize_loading` in the "
        "log), and the next one takes minutes again",
        "`VLLM_USE_AOT_COMPILE=0` in the environment",
        issue="vllm-project/vllm#45447, in its log",
        seen="run on 0.32, read in 0.33",
        meets=lambda c: c.device == "cpu" and c.compiled_ahead,
    ),
    GONE_METHODS,
)


def met_by(combination: Combination) -> Iterator[str]:
    """A sentence for every fault that a combination can meet."""
    yield from (fault.sentence for fault in KNOWN_FAULTS if fault.meets(combination))
