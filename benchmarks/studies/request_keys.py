"""What a request says of its answer: a predicted text, and a grammar that forces tokens.

    python -m benchmarks.studies.request_keys

A file is the answer, and the prediction is what it was before an edit, which is not in the prompt:
with another name in all places, a line less and a line more. JSON follows a schema of 20 keys. No
speculation and one cascade, which every request uses as its keys say, take turns at temperature 0,
one request at a time.
"""

import argparse
import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.columns import Table, counts, times
from benchmarks.common import RESULTS, options
from benchmarks.models.qwen_coder import qwen_coder
from vllm_hsd.tools.engine import EngineProcess, Generation

# What is asked for, a name in the answer, and that name before the edit.
FILES = (
    ("a class `Warehouse` (add, remove, price, total, report)", "Warehouse", "Inventory"),
    ("functions that print statistics of a CSV file of temperatures", "temperature", "reading"),
)
KEYS = (
    *("title", "subtitle", "author_name", "author_country", "publisher", "publication_year"),
    *("language", "number_of_pages", "genre", "main_character", "opening_sentence", "setting"),
    *("average_rating", "number_of_ratings", "cover_colour", "price_in_dollars", "isbn"),
    *("has_a_film_version", "recommended_age", "summary"),
)
NUMBERS = ("publication_year", "number_of_pages", "number_of_ratings", "recommended_age")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "integer" if key in NUMBERS else "string"} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
BOOKS = ("Moby-Dick", "The Hobbit")
CASCADE = {
    "method": "hsd",
    "num_speculative_tokens": 16,
    "levels": [{"sources": [{"prediction": {}}, {"suffix": {}}]}],
}
ENGINE = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 29,
    "enable_prefix_caching": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
PLAIN, UNSAID, SAID = "no speculation", "suffix alone", "prediction"
WRONG = "a wrong prediction"
FREE, FORCED = "without forced tokens", "with forced tokens"


def chat(llm: Any, request: str) -> list[int]:
    """Token ids of a prompt; runs in the engine's process."""
    text = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
    )
    found: list[int] = llm.get_tokenizer().encode(text)
    return found


def before_the_edit(text: str, new: str, old: str) -> str:
    """A file with another name, without one of its lines and with one that it does not have."""
    lines = text.replace(new, old).split("\n")
    del lines[len(lines) // 3]
    lines.insert(2 * len(lines) // 3, "    # Not done yet.")
    return "\n".join(lines)


def force(llm: Any, switched_on: bool) -> None:
    """Let grammars force tokens from now on, or not; runs in the engine's process."""
    mock.patch.stopall()
    if not switched_on:
        mock.patch("vllm_hsd.host.forced_tokens.forced_tokens", lambda *_: []).start()


class Study:
    """Two engines and the table of what they answer.

    Args:
        rounds: answers of each way to each task.
        longest: tokens of an answer.
        tasks: most files, and most books.
    """

    def __init__(
        self,
        plain: EngineProcess,
        cascade: EngineProcess,
        table: Table,
        rounds: int,
        longest: int,
        tasks: int,
    ) -> None:
        self.plain, self.cascade, self.table, self.rounds = plain, cascade, table, rounds
        self.params = {"temperature": 0, "max_tokens": longest}
        self.tasks = tasks

    def edits(self) -> None:
        """Every file, with the old one as prediction; a wrong one has its words in reverse."""
        tasks = []
        for file, new, old in FILES[: self.tasks]:
            prompt = self.plain.call(chat, f"Write {file}: 60 lines of Python without comments.")
            before = before_the_edit(self._answer(self.plain, prompt).texts[0], new, old)
            keys: dict[str, dict[str, Any]] = {PLAIN: {}, UNSAID: {}}
            keys[SAID] = {"hsd_prediction": before}
            keys[WRONG] = {"hsd_prediction": " ".join(reversed(before.split(" ")))}
            tasks.append((prompt, keys))
        self._compare("edit of a file", tasks)

    def grammars(self) -> None:
        """The schema for every book."""
        asked = "Describe the novel {} as JSON with the keys {}."
        prompts = [
            self.plain.call(chat, asked.format(book, ", ".join(KEYS)))
            for book in BOOKS[: self.tasks]
        ]
        self.params = {**self.params, "structured_outputs": {"json": SCHEMA}}
        ways: dict[str, dict[str, Any]] = {PLAIN: {}, FREE: {}, FORCED: {}}
        self._compare("JSON of 20 keys", [(prompt, ways) for prompt in prompts])

    def _compare(
        self, group: str, tasks: list[tuple[list[int], dict[str, dict[str, Any]]]]
    ) -> None:
        found: dict[str, list[Generation]] = {}
        for turn in range(self.rounds):
            for prompt, keys in tasks:
                names = [*keys]
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    engine = self.plain if name == PLAIN else self.cascade
                    if name in (FREE, FORCED):
                        engine.call(force, name == FORCED)
                    answer = self._answer(engine, prompt, keys[name])
                    found.setdefault(name, []).append(answer)
                    found_in = answer.num_target_steps, answer.seconds, answer.cpu_seconds
                    print(group, name, answer.num_tokens, *found_in, flush=True)
        self._add(group, found)
        # Of one thread, whatever else the machine does.
        on_cpu = {
            name: [replace(answer, seconds=answer.cpu_seconds) for answer in answers]
            for name, answers in found.items()
        }
        self._add(f"{group}, CPU time", on_cpu)

    def _add(self, group: str, found: dict[str, list[Generation]]) -> None:
        plain = found[PLAIN]
        for name, answers in found.items():
            differ = sum(a.token_ids != b.token_ids for a, b in zip(answers, plain, strict=True))
            cell = {"group": group, "batch_size": 1, "temperature": 0.0, "configuration": name}
            row = cell | times(answers, plain) | counts(answers) | {"greedy_differences": differ}
            row |= {
                "dtype": self.plain.engine_args["dtype"],
                "max_tokens": self.params["max_tokens"],
            }
            self.table.add([row])

    def _answer(
        self, engine: EngineProcess, prompt: list[int], keys: dict[str, Any] | None = None
    ) -> Generation:
        return engine.generate([prompt], {**self.params, "extra_args": keys or None})


def main() -> None:
    parser: argparse.ArgumentParser = options(__doc__, RESULTS / "request_keys")
    parser.add_argument("--size", default="0.5B", help="of the Qwen2.5-Coder target")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each way to each task")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--tasks", type=int, default=2, help="most files, and most books")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--cases", nargs="+", default=["edits", "grammars"], help="what to answer")
    given = parser.parse_args()
    engine = {**ENGINE, "dtype": given.dtype, "model": os.path.relpath(qwen_coder(given.size))}
    environment = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    table = Table(Path(given.output, "request_keys.csv"))
    with ExitStack() as stack:
        plain, cascade = (
            stack.enter_context(EngineProcess({**engine, **more}, environment=environment))
            for more in ({}, {"speculative_config": CASCADE})
        )
        study = Study(plain, cascade, table, given.rounds, given.max_tokens, given.tasks)
        for case in given.cases:
            getattr(study, case)()
    print(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
