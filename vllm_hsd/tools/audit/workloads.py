"""Workloads: requests as servers meet them, each kind under a load of its own.

A workload mixes requests of all kinds in a batch: greedy ones and ones with seeds, whose text is
compared token by token, and drawn ones, whose tokens are scored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_hsd.tools.audit import sampled
from vllm_hsd.tools.audit.load import Load
from vllm_hsd.tools.audit.sampled import Progress, Setting, Texts, under
from vllm_hsd.tools.audit.seeded import Seeded
from vllm_hsd.tools.audit.servers import Server
from vllm_hsd.tools.engine import ADAPTER

# Of plain requests in small batches, which `verify` samples by itself.
STEADY = "steady"
Request = tuple[Sequence[int], dict[str, Any]]


@dataclass(frozen=True)
class Facts:
    """What an engine is like; as defaults, what is known of a server.

    Attributes:
        longest: most tokens of a request.
        block, groups: tokens of a block of the KV cache, and groups of layers that take blocks.
        caches: whether blocks are shared by requests with the same beginning.
        thinking: token ids that begin thinking; None without a configuration for budgets.
        letters: whether the engine has a tokenizer.
        local: whether it is an engine and no server.
        stops: token ids that are frequent, and their texts.
        adapters: directories of LoRA adapters that the engine serves.
    """

    longest: int = 1024
    block: int = 16
    groups: int = 1
    caches: bool = True
    thinking: tuple[int, ...] | None = None
    letters: bool = False
    local: bool = False
    stops: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
    adapters: tuple[str, ...] = ()


class Workload:
    """One kind of workload; `request` makes its requests.

    Attributes:
        what: for the page.
        answer: tokens of an answer, about.
        turns: turns of every chat.
        at_once: requests that are served together.
        met: counter of what the workload is for, see `Found.met`; empty for none.
        filters: whether its requests have parameters that a server's log-probabilities ignore.
    """

    what = ""
    answer = 32
    turns = 1
    at_once = 16
    met = ""
    filters = False

    def lacks(self, facts: Facts) -> str | None:
        """Why the engine cannot be given this workload; None where it can."""
        if self.filters and not facts.local:
            return "a server's log-probabilities leave such parameters out"
        return None

    def load(self, facts: Facts) -> Load:
        """How the engine is loaded meanwhile."""
        return Load(self.at_once)

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        """The prompt and the special parameters of request i."""
        return prompt, {}


class Turns(Workload):
    what = "chats of three turns, each found in the prefix cache"
    turns = 3
    met = "prefix_cache_hits"

    def lacks(self, facts: Facts) -> str | None:
        if not facts.caches:
            return "its prefix cache is off"
        if self._first(facts) + self.turns * (self.answer + 8) > facts.longest:
            return f"a block of the cache has {facts.block} tokens, too many for its chats"
        return None

    def _first(self, facts: Facts) -> int:
        # Chats that begin alike part in the second half of a block: their answers fill it.
        blocks = 1 + -(-self.answer // facts.block)
        return blocks * facts.block - self.answer // 2

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        return _repeated(prompt, self._first(facts)), {}


class Crowd(Workload):
    # Of lengths from 4 to 32.
    answer = 18
    filters = True

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.what = f"requests with parameters of their own that join and leave, {at_once} at once"

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"repetition_penalty": 1.3},
            {"top_k": 20},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"min_tokens": 4, "stop_token_ids": list(facts.stops[0])},
            {"top_p": 0.9},
        )
        return prompt[: 1 + i % len(prompt)], {
            "max_tokens": 4 + 7 * i % 29,
            **kinds[i % len(kinds)],
        }


class Thinking(Workload):
    what = "thinking budgets that end beside requests without one"
    filters = True

    def lacks(self, facts: Facts) -> str | None:
        if facts.local and facts.thinking is None:
            return "no strings that begin and end thinking are known"
        return super().lacks(facts)

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        if i % 2:
            return prompt, {}
        assert facts.thinking is not None
        return [*facts.thinking, *prompt], {"thinking_token_budget": len(prompt) + 3 + i % 19}


SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "even": {"type": "boolean"}},
        "required": ["name", "even"],
        "additionalProperties": False,
    },
    # As `tool_choice: "required"` makes one.
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": ["look_up", "add"]},
                "parameters": {
                    "type": "object",
                    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9999}},
                    "required": ["count"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        },
    },
)


class Schemas(Workload):
    what = "JSON schemas and tool calls beside plain requests"
    answer = 48
    filters = True

    def lacks(self, facts: Facts) -> str | None:
        if facts.local and not facts.letters:
            return "it has no tokenizer"
        return super().lacks(facts)

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        if i % 3 == 2:
            return prompt, {}
        schema = {"json": json.dumps(SCHEMAS[i % 3])}
        return prompt, {"structured_outputs": schema, "ignore_eos": False}


class Stops(Workload):
    what = "stop tokens and stop strings"
    filters = True
    met = "stops"

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        token_ids, texts = facts.stops
        if i % 2 and texts:
            return prompt, {"stop": list(texts)}
        return prompt, {"stop_token_ids": list(token_ids)}


class Chunks(Workload):
    what = "long prompts that are read in chunks"
    answer = 16
    at_once = 4
    # Tokens of a step.
    chunk = 64

    def load(self, facts: Facts) -> Load:
        return Load(self.at_once, chunk=self.chunk)

    def lacks(self, facts: Facts) -> str | None:
        if facts.longest < 2 * self.chunk + 2 * self.answer:
            return f"its requests have {facts.longest} tokens at most"
        return None

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        longest = min(facts.longest - 2 * self.answer, 8 * self.chunk)
        return _repeated(prompt, longest - 7 * i % self.chunk), {}


class Preempted(Workload):
    what = "requests that are preempted, since the cache is small"
    at_once = 8
    met = "num_preemptions"

    def lacks(self, facts: Facts) -> str | None:
        if not facts.local:
            return "a server's cache is its own affair"
        if facts.block < self.answer or facts.longest < facts.block + 2 * self.answer:
            return f"its cache has blocks of {facts.block} tokens"
        return None

    def load(self, facts: Facts) -> Load:
        # Blocks of a request at its end; it starts with one.
        last = -(-(facts.block - self.answer // 2 + self.answer) // facts.block)
        room = self.at_once + self.at_once * (last - 1) // 4
        # One request must fit with its drafts, whatever the others hold.
        return Load(self.at_once, blocks=facts.groups * max(room, last + 2))

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        return _repeated(prompt, facts.block - self.answer // 2 + i % 8), {}


class Adapters(Workload):
    what = "LoRA adapters next to requests without one"

    def lacks(self, facts: Facts) -> str | None:
        return None if facts.adapters else "no adapters are given (--adapters)"

    def request(self, i: int, facts: Facts, prompt: Sequence[int]) -> Request:
        return prompt, {ADAPTER: [None, *facts.adapters][i % (len(facts.adapters) + 1)]}


WORKLOADS: dict[str, Workload] = {
    "turns": Turns(),
    "crowd16": Crowd(16),
    "crowd64": Crowd(64),
    "thinking": Thinking(),
    "schemas": Schemas(),
    "stops": Stops(),
    "chunks": Chunks(),
    "preempted": Preempted(),
    "adapters": Adapters(),
}


@dataclass
class Found:
    """Answers to a workload, and what was found of them.

    Attributes:
        drawn: answers whose tokens are scored.
        exact: greedy answers and answers with seeds, which are compared.
        met: how often what the workload is for was met; None where it is not counted.
        compared: `exact` with the text of no speculation; None where there were none, or it has
            not been compared yet.
    """

    name: str
    drawn: Texts
    exact: Texts
    met: int | None
    compared: Seeded | None = None


def adapters_of(served: Sequence[Found]) -> set[str]:
    """The adapters that requests were served with."""
    parts = (part for each in served for part in (each.drawn, each.exact))
    return {params[ADAPTER] for part in parts for params in part.params if params.get(ADAPTER)}


def run(
    name: str,
    engine: Any,
    facts: Facts,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    num_tokens: int,
    kinds: tuple[bool, bool],
    fixed_lengths: bool,
    progress: Progress,
    **recording: Any,
) -> Found:
    """Serve a workload.

    Args:
        settings: of the drawn requests, in turn; may be none.
        num_tokens: of all answers, about.
        kinds: whether there are greedy requests, and ones with seeds.
        fixed_lengths: see `Load`.
        recording: see `sampled.generate`.
    """
    workload = WORKLOADS[name]
    if isinstance(engine, Server):
        engine.at_once = workload.at_once
    else:
        load = replace(workload.load(facts), fixed_lengths=fixed_lengths)
        engine.call("vllm_hsd.tools.audit.load:apply", load)
    parameters = _parameters(settings, *kinds)
    count = max(num_tokens // (workload.answer * workload.turns), len(parameters))
    texts = Texts([name])
    for i in range(count):
        # Every kind of request and every prompt meets every set of parameters.
        number, kind = divmod(i, len(parameters))
        prompt, special = workload.request(number, facts, prompts[(number + kind) % len(prompts)])
        base = {"max_tokens": workload.answer, "ignore_eos": True, **parameters[kind], **special}
        if base.get("seed") is not None:
            base["seed"] += i
        _add(texts, prompt, base)
    before = _counted(engine, workload.met)
    rounds = []
    for turn in range(workload.turns):
        sampled.generate(engine, texts, max(count, 1), under(name, progress), **recording)
        rounds.append(texts)
        if turn + 1 < workload.turns:
            texts = _next_turn(texts, prompts)
    whole = sampled.merged(rounds)
    chosen = [each["temperature"] == 0 or each["seed"] is not None for each in whole.params]
    if workload.met == "stops":
        met: int | None = whole.finishes.count("stop")
    else:
        after = _counted(engine, workload.met)
        met = None if before is None or after is None else after - before
    return Found(
        name,
        whole.only([i for i, exact in enumerate(chosen) if not exact]),
        whole.only([i for i, exact in enumerate(chosen) if exact]),
        met,
    )


def _parameters(settings: Sequence[Setting], greedy: bool, seeded: bool) -> list[dict[str, Any]]:
    """Of the kinds of requests, in turn: as many drawn as compared ones."""
    drawn = [{"temperature": each.temperature, **each.others, "seed": None} for each in settings]
    found: list[dict[str, Any]] = []
    for i in range(max(2 * len(drawn), 1)):
        if greedy and not (seeded and drawn and i % 2):
            found.append({"temperature": 0.0, "seed": None})
        elif seeded and drawn:
            found.append({**drawn[i // 2 % len(drawn)], "seed": 1000})
        found += drawn[i % len(drawn) : i % len(drawn) + 1] if drawn else []
    return found


def _add(texts: Texts, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
    texts.prompts.append(prompt)
    texts.settings.append(0)
    texts.params.append(dict(params))


def _next_turn(texts: Texts, prompts: Sequence[Sequence[int]]) -> Texts:
    """The same chats, each with its answer and more words of the user."""
    found = Texts(texts.names)
    for i, (prompt, answer) in enumerate(zip(texts.prompts, texts.token_ids, strict=True)):
        words = prompts[(i + 1) % len(prompts)][:8]
        _add(found, [*prompt, *answer, *words], texts.params[i])
    return found


def _repeated(prompt: Sequence[int], length: int) -> list[int]:
    """A prompt of some length, whose places differ in what precedes them."""
    found = list(prompt)
    while len(found) < length:
        found += prompt[len(found) % len(prompt) :] or prompt
    return found[:length]


def _counted(engine: Any, counter: str) -> int | None:
    if not counter or counter == "stops" or isinstance(engine, Server):
        return None
    return int(engine.call("vllm_hsd.tools.audit.workloads:counter", counter))


# What follows runs in the engine's process.


def counter(llm: Any, name: str) -> float:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return values.get(f"vllm:{name}", 0.0)


def facts_of(llm: Any, texts: Sequence[Sequence[int]]) -> Facts:
    """What the engine is like.

    Args:
        texts: token ids, of which frequent ones become stops.
    """
    config = llm.llm_engine.vllm_config
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    reasoning = config.reasoning_config
    thinking = reasoning.reasoning_start_token_ids if reasoning is not None else None
    letters = not llm.model_config.skip_tokenizer_init
    counts = Counter(token for text in texts for token in text).most_common()
    # Each about as often as once in an answer, not the most frequent ones.
    stops = tuple(token for token, count in counts[2:8] if count)
    strings: dict[str, None] = {}
    if letters:
        tokenizer = llm.get_tokenizer()
        strings = dict.fromkeys(tokenizer.decode([token]) for token in stops)
    return Facts(
        llm.model_config.max_model_len,
        config.cache_config.block_size,
        len(cache.kv_cache_groups),
        bool(config.cache_config.enable_prefix_caching),
        None if thinking is None else tuple(thinking),
        letters,
        True,
        (stops, tuple(text for text in strings if text and "\ufffd" not in text)),
    )
