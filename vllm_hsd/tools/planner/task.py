"""What to measure: the arguments of `vllm-hsd profile`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_hsd.tools.planner.profile import Candidate, Sampling


@dataclass(frozen=True)
class Task:
    """What to measure, and how much text to measure it on.

    Attributes:
        target: path or hub name of the target.
        candidates: as `candidates` builds them: lookups, a head, models, exits.
        max_draft_tokens: longest draft that the profile covers (H).
        text_tokens: tokens of the target's continuation of each prompt.
        contexts: contexts per candidate from which it draws continuations of its own.
        texts_per_forward: most texts per forward; fewer where their logits are large.
        engine_args: arguments of `vllm.LLM` in addition to the models.
        batch_sizes: requests per step that are timed.
        clock: "wall", or "cpu" for the time that the engine's main thread really ran, which
            is the wall time of a quiet machine when models run on one CPU thread.
        seed: of everything drawn.
    """

    target: str
    candidates: Sequence[Candidate]
    sampling: Sampling = field(default_factory=Sampling)
    max_draft_tokens: int = 16
    text_tokens: int = 96
    contexts: int = 512
    texts_per_forward: int = 16
    engine_args: dict[str, Any] = field(default_factory=dict)
    batch_sizes: Sequence[int] = (1,)
    clock: Literal["wall", "cpu"] = "wall"
    seed: int = 0

    def fingerprint(
        self, prompts: Sequence[Sequence[int]], versions: dict[str, str], machine: dict[str, Any]
    ) -> str:
        """Digest that is equal only for the same measurement of the same token ids and files."""
        paths = [self.target, *_strings([each.keys() for each in self.candidates])]
        files = [
            each for path in paths if path and Path(path).exists() for each in _files(Path(path))
        ]
        values = asdict(self) | {
            "machine": machine,
            "files": [(str(each), each.stat().st_size, each.stat().st_mtime) for each in files],
            "candidates": [candidate.model_dump() for candidate in self.candidates],
            "sampling": self.sampling.model_dump(),
            "prompts": prompts,
            "versions": versions,
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _strings(value: Any) -> Iterator[str]:
    """All that a level's keys hold, at any depth; paths among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _files(path: Path) -> list[Path]:
    """A file, or those of a directory, in which a profile's own directory may lie."""
    return [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())


def candidates(
    *,
    models: Sequence[str] = (),
    exits: Sequence[int] = (),
    exit_heads: Sequence[tuple[str, int]] = (),
    ngram: int | None = None,
    suffix: str | None = None,
    bigram: str | None = None,
    bigram_model: str | None = None,
    eagle3: str | None = None,
) -> list[Candidate]:
    """Candidates in the order in which one engine can host them: exits by their depth, last.

    Several lookups are candidates each, and together as the sources of one level.

    Args:
        exit_heads: directory and layer of each.
        ngram: longest match of a prompt lookup.
        suffix: store of a suffix lookup; empty for one of the request's own text.
        bigram: store of a bigram lookup.
        bigram_model: store of a bigram model.
        eagle3: directory of an EAGLE-3 head.
    """
    heads = zip(_short([path for path, _ in exit_heads]), exit_heads, strict=True)
    leaving: list[tuple[int, str, dict[str, Any]]] = [
        (layer, f"exit {layer}", {"early_exit": layer}) for layer in exits
    ]
    leaving += [(layer, name, {"exit_head": _absolute(path)}) for name, (path, layer) in heads]
    lookups: list[tuple[str, dict[str, Any]]] = []
    if ngram is not None:
        lookups.append((f"ngram {ngram}", {"ngram": {"max": ngram}}))
    if suffix is not None:
        lookups.append(("suffix", {"suffix": {"store": _absolute(suffix)} if suffix else {}}))
    if bigram is not None:
        lookups.append(("bigram", {"bigram": _absolute(bigram)}))
    if len(lookups) > 1:
        together = "+".join(name for name, _ in lookups)
        # What a recorded text shows is how far one draft is accepted.
        lookups.append((together, {"sources": [level for _, level in lookups], "branches": 1}))
    found = [
        *lookups,
        *([("eagle3", {"eagle3": _absolute(eagle3)})] if eagle3 is not None else []),
        *([("bigram model", {"bigram_model": _absolute(bigram_model)})] if bigram_model else []),
        *((n, {"model": _absolute(path)}) for n, path in zip(_short(models), models, strict=True)),
        *((name, level) for _, name, level in sorted(leaving, key=lambda each: each[0])),
    ]
    return [Candidate.model_validate({"name": name, "level": level}) for name, level in found]


def _short(paths: Sequence[str]) -> list[str]:
    """Names of the paths without their directories, where they differ."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def _absolute(path: str) -> str:
    """A server may start in another directory than the one that the path was typed in."""
    return str(Path(path).resolve()) if Path(path).exists() else path
