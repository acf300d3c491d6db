"""What speculation leaves of vLLM's prefix cache: hit rates of conversations.

    python -m benchmarks.studies.prefix_hits --prompts mt_bench      # a few minutes

SmolLM2-135M-Instruct answers both turns of MT-Bench's questions, two conversations at once, with no
speculation and with each configuration, in float32 and greedily, so that all answer the same text
and are asked the same. A row says how many tokens of the prompts vLLM looked for, and how many of
them it had.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, options, write_csv
from benchmarks.models.smollm2 import smollm2
from benchmarks.studies.configs import SUFFIX, fixed, vllms_own
from benchmarks.sweep import PLAIN, Config
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.planner.prompts import prompts_file

COUNTERS = {"queries": "vllm:prefix_cache_queries", "hits": "vllm:prefix_cache_hits"}


def configurations() -> dict[str, Config]:
    """No speculation, vLLM's own methods, and a lookup, fixed and adaptive."""
    return {
        PLAIN: None,
        **vllms_own(),
        "suffix 8": fixed(SUFFIX),
        "suffix, adaptive": fixed(SUFFIX, adaptive=True),
    }


def answer(llm: Any, questions: Sequence[Sequence[str]], max_tokens: int) -> dict[str, float]:
    """Both turns of every conversation, and what vLLM counted; runs in the engine's process."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for first in range(0, len(questions), 2):
        chats: list[list[Any]] = [[] for _ in questions[first : first + 2]]
        for turn in zip(*questions[first : first + 2], strict=True):
            for chat, text in zip(chats, turn, strict=True):
                chat.append({"role": "user", "content": text})
            found = llm.chat(chats, greedy, use_tqdm=False)
            for chat, output in zip(chats, found, strict=True):
                chat.append({"role": "assistant", "content": output.outputs[0].text})
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return {name: values[metric] for name, metric in COUNTERS.items()}


def rows(chosen: Any, configs: Mapping[str, Config]) -> list[dict[str, Any]]:
    """A row for each configuration."""
    lines = prompts_file(chosen.prompts).read_text().strip().split("\n")
    questions = [json.loads(line)["turns"][:2] for line in lines[: chosen.num_prompts]]
    found = []
    for name, config in configs.items():
        engine_args = {
            "model": os.path.relpath(smollm2()),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": True,
            **({"speculative_config": config} if config else {}),
        }
        with EngineProcess(engine_args, name, log=chosen.output / "engine.log") as engine:
            counted = engine.call(answer, questions, chosen.max_tokens)
        rate = counted["hits"] / counted["queries"]
        found.append({"configuration": name, **counted, "hit_rate": rate})
        progress(f"{name}: {rate:.3f}")
    return found


def main() -> int:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--prompts", type=Path, default="mt_bench", help="file with two turns")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=300)
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    write_csv(chosen.output / "prefix_hits.csv", rows(chosen, configurations()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
