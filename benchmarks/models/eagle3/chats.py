"""Chats as token ids, and a command that lets the target write them.

Given the bare opening of a user turn, a chat model writes a question at temperature 1; then it
answers it, at one of several temperatures. A drafter should learn from text that its target wrote.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.eagle3 import FAST_DTYPE
from benchmarks.models.smollm2 import smollm2

HELD_OUT = 20  # one chat in so many is never trained on
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of the answers, in turn
QUESTION_TOKENS = 100
ANSWER_TOKENS = 256


@dataclass(frozen=True)
class Chat:
    """One chat: token ids of its prompt and its answer, and the answer's temperature."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the whole chat."""
        return self.prompt + self.answer

    @property
    def held_out(self) -> bool:
        """Whether the chat belongs to the evaluation: a function of its prompt alone."""
        digest = hashlib.sha256(json.dumps(self.prompt).encode()).digest()
        return int.from_bytes(digest[:4]) % HELD_OUT == 0


def read_chats(path: Path) -> list[Chat]:
    """Chats of a gzipped file: one JSON object a line with token ids and a temperature."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Chat(tuple(r["prompt_token_ids"]), tuple(r["answer_token_ids"]), r["temperature"])
        for r in rows
    ]


def write_chats(path: Path, chats: list[Chat]) -> None:
    """Writes what `read_chats` reads; the file appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    with gzip.open(scratch, "wt") as file:
        for chat in chats:
            row = {
                "prompt_token_ids": chat.prompt,
                "answer_token_ids": chat.answer,
                "temperature": chat.temperature,
            }
            file.write(json.dumps(row) + "\n")
    os.replace(scratch, path)


def converse(target: Path, count: int, seed: int, dtype: str) -> list[Chat]:
    """Lets the target write `count` questions and answer those that come to an end.

    Args:
        target: Directory of a chat model with its tokenizer.
        count: Questions.
        seed: Of vLLM's sampling; another seed gives other chats.
        dtype: Of the engine.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(target),
        dtype=dtype,
        seed=seed,
        max_model_len=1024,
        max_num_seqs=128,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 31,
    )
    tokenizer = llm.get_tokenizer()
    mark = "QUESTION"
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    opening, closing = (
        tokenizer.encode(text, add_special_tokens=False) for text in template.split(mark)
    )
    end = closing[0]
    asked = llm.generate(
        [{"prompt_token_ids": opening}] * count,
        SamplingParams(temperature=1, max_tokens=QUESTION_TOKENS, stop_token_ids=[end]),
    )
    questions = [
        list(o.outputs[0].token_ids) for o in asked if o.outputs[0].finish_reason == "stop"
    ]
    prompts = [opening + q[:-1] + closing for q in questions if len(q) > 1]
    temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(len(prompts))]
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(temperature=t, max_tokens=ANSWER_TOKENS) for t in temperatures],
    )
    return [
        Chat(tuple(prompt), tuple(answer.outputs[0].token_ids), temperature)
        for prompt, answer, temperature in zip(prompts, answers, temperatures, strict=True)
    ]


def main() -> None:
    """Command line."""
    from benchmarks.models.eagle3.features import WORK

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--target", type=Path, help="directory of a chat model; SmolLM2 if left out"
    )
    parser.add_argument("--work", type=Path, default=WORK, help="directory that gets chats/")
    parser.add_argument("--count", type=int, default=1024, help="questions")
    parser.add_argument(
        "--dtype", default=str(FAST_DTYPE).removeprefix("torch."), help="bfloat16 or float32"
    )
    args = parser.parse_args()
    directory = args.work / "chats"
    seed = len(list(directory.glob("*.jsonl.gz")))
    chats = converse(args.target or smollm2(), args.count, seed, args.dtype)
    path = directory / f"written{seed:03d}.jsonl.gz"
    write_chats(path, chats)
    print(f"{path}: {len(chats)} chats, {sum(len(c.answer) for c in chats)} answer tokens")


if __name__ == "__main__":
    main()
