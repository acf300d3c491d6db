"""Public sets of prompts by name, SPEED-Bench and Spec-Bench as `vllm bench serve` has them.

vLLM's own classes for these two need pandas and files that the user has fetched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_hsd.checked_files import written_whole
from vllm_hsd.errors import UserError, brief, quoted

# At most 80 questions each, those of EAGLE's evaluation.
EAGLE_SETS = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")
PUBLIC_SETS = (*EAGLE_SETS, "spec_bench", "speed_bench")
EAGLE_URL = "https://raw.githubusercontent.com/SafeAILab/EAGLE/main/eagle/data/{}/question.jsonl"
SPEC_BENCH_URL = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)
SPEED_BENCH = "nvidia/SPEED-Bench"
# Values of vLLM's --speed-bench-dataset-subset.
SUBSETS = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))
# In place of a text whose source has to be asked for it, which SPEED-Bench's own script does.
_ELSEWHERE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class PublicSet:
    """A set, or its prompts of one category.

    Attributes:
        name: one of `PUBLIC_SETS`.
        subset: one of `SUBSETS` for speed_bench, else empty.
        category: as the set's own file spells it; None for all.
    """

    name: str
    subset: str = ""
    category: str | None = None

    @classmethod
    def of(cls, text: str) -> PublicSet:
        """SET[:CATEGORY], or speed_bench[:SUBSET[:CATEGORY]].

        Raises:
            UserError: there is no such set or subset.
        """
        name, *parts = text.split(":")
        subset = ""
        if name == "speed_bench":
            subset, *parts = parts or SUBSETS[:1]
            if subset not in SUBSETS:
                raise UserError(
                    f"speed_bench has no subset {quoted(subset)}: give {', '.join(SUBSETS)}."
                )
        if name not in PUBLIC_SETS or len(parts) > 1:
            raise UserError(
                f"no prompts file {quoted(text)}; public sets are {', '.join(PUBLIC_SETS)}, with "
                ":CATEGORY after them, speed_bench with :SUBSET[:CATEGORY]."
            )
        return cls(name, subset, parts[0] if parts else None)

    def file(self) -> Path:
        """All categories as JSON lines, in the Hugging Face cache; fetched when first asked for.

        Raises:
            UserError: it cannot be fetched.
        """
        # Only now: it is slow to import, and few commands fetch.
        from huggingface_hub import cached_assets_path

        stem = "-".join(filter(None, (self.name, self.subset)))
        try:
            kept = cached_assets_path("vllm-hsd", "prompts") / f"{stem}.jsonl"
            if not kept.exists():
                text = self._hub_text() if self.subset else self._url_text()
                with written_whole(kept) as unfinished:
                    unfinished.write_bytes(text)
        except Exception as error:  # whatever a network, a hub, a proxy's page or a disk raises
            raise UserError(
                f"the public prompts '{self.name}' cannot be fetched ({brief(error)}): give a file."
            ) from None
        return kept

    def _url_text(self) -> bytes:
        from urllib.request import urlopen

        url = SPEC_BENCH_URL if self.name == "spec_bench" else EAGLE_URL.format(self.name)
        with urlopen(url, timeout=30) as response:
            text: bytes = response.read()
        # Not the page of a proxy, for example.
        json.loads(text.split(b"\n")[0])["turns"]
        return text

    def _hub_text(self) -> bytes:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ImportError("it needs the package datasets: pip install datasets") from None
        rows = load_dataset(SPEED_BENCH, self.subset, split="test")
        lines = [{"category": row["category"], "turns": list(row["turns"])} for row in rows]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    def chosen(self, entries: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """The (place, parsed line) pairs of the category that hold a text; says how many do not.

        Raises:
            UserError: the set has no such category.
        """
        categories = {str(entry.get("category")) for _, entry in entries}
        if self.category not in (None, *categories):
            raise UserError(
                f"{self.name} has no category {quoted(self.category)}: give one of "
                f"{', '.join(sorted(categories))}."
            )
        own = [pair for pair in entries if self.category in (None, pair[1].get("category"))]
        found = [pair for pair in own if not str(pair[1]["turns"][0]).startswith(_ELSEWHERE)]
        if len(found) < len(own):
            print(
                f"{self.name}: {len(own) - len(found)} of {len(own)} prompts are left out, since "
                "their sources keep the texts. The script that `vllm bench serve` names fetches "
                "them: give a file of its directory.",
                file=sys.stderr,
            )
        return found
