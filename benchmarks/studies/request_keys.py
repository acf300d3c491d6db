"""What a request says of its answer: a predicted text, and a grammar that forces tokens.

    python -m benchmarks.studies.request_keys

Five files are the answers, and the prediction is what each was before an edit, which is not in the
prompt: with another name in all places, a line less and a line more. JSON follows five schemas of
20 keys. No speculation and one cascade, which every request uses as its keys say, take turns at
temperature 0, one request at a time. Every answer is paired with the plain one of its turn.
"""

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.columns import Table, counts, times
from benchmarks.common import RESULTS, options
from benchmarks.models.qwen_coder import qwen_coder
from vllm_hsd.tools.engine import EngineProcess, Generation

# What is asked for, a name in the answer, and that name before the edit.
FILES = (
    ("a class `Warehouse` (add, remove, price, total, report)", "Warehouse", "Inventory"),
    ("functions that print statistics of a CSV file of temperatures", "temperature", "reading"),
    ("a class `Scheduler` that runs tasks by priority and retries them", "Scheduler", "Runner"),
    ("a command line program that counts the words of text files", "word", "token"),
    ("a class `Matrix` (add, multiply, transpose, determinant, print)", "Matrix", "Grid"),
)
SUBJECTS = ("the novel Moby-Dick", "the city of Lisbon", "the violin", "the Moon", "the bicycle")
# Keys that suit any of them: texts, integers and choices.
TEXTS = (
    *("name", "subtitle", "short_description", "long_description", "category", "country_of_origin"),
    *("language_of_the_name", "best_known_for", "opening_sentence", "most_famous_person"),
    *("typical_colour", "main_material", "closest_relative", "common_misunderstanding"),
    *("how_it_is_used_today", "where_to_see_it", "advice_for_beginners", "closing_remark"),
)
INTEGERS = (
    *("first_year", "last_change_year", "number_of_parts", "number_of_names", "age_in_years"),
    *("price_in_dollars", "weight_in_grams", "visitors_a_year", "recommended_age", "rating"),
)
CHOICES = {
    "popularity": ["hardly known", "known to experts", "known to everybody"],
    "condition": ["excellent", "acceptable", "in need of repair"],
    "difficulty_level": ["beginner", "intermediate", "advanced"],
    "has_a_film": ["yes, more than one", "yes, exactly one", "none at all"],
}
KEYS_OF_SCHEMA = 20
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


def before_the_edit(text: str, new: str, old: str, seed: int) -> str:
    """A file with another name, without one of its lines and with one that it does not have.

    Their places, in the first and in the last half, depend on the seed.
    """
    rng, lines = Random(seed), text.replace(new, old).split("\n")
    half = len(lines) // 2
    lines.insert(rng.randint(half, len(lines)), "    # Not done yet.")
    del lines[rng.randrange(max(half, 1))]
    return "\n".join(lines)


def schema(seed: int) -> dict[str, Any]:
    """A JSON schema of KEYS_OF_SCHEMA required keys in an order of their own."""
    kinds: dict[str, dict[str, Any]] = {key: {"type": "string"} for key in TEXTS}
    kinds |= {key: {"type": "integer"} for key in INTEGERS}
    kinds |= {key: {"enum": values} for key, values in CHOICES.items()}
    keys = Random(seed).sample([*kinds], KEYS_OF_SCHEMA)
    return {
        "type": "object",
        "properties": {key: kinds[key] for key in keys},
        "required": keys,
        "additionalProperties": False,
    }


def force(llm: Any, switched_on: bool) -> None:
    """Let grammars force tokens from now on, or not; runs in the engine's process."""
    mock.patch.stopall()
    if not switched_on:
        mock.patch("vllm_hsd.host.forced_tokens.forced_tokens", lambda *_: []).start()


class Task(NamedTuple):
    """What is asked for, and the keys of each way to answer it."""

    prompt: list[int]
    params: dict[str, Any]
    keys: dict[str, dict[str, Any]]


class Study:
    """Two engines and the table of what they answer.

    Args:
        rounds: answers of each way to each task.
        longest: tokens of an answer.
        tasks: most files, and most schemas.
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
        for seed, (file, new, old) in enumerate(FILES[: self.tasks]):
            prompt = self.plain.call(chat, f"Write {file}: 60 lines of Python without comments.")
            answer = self._answer(self.plain, prompt, self.params)
            before = before_the_edit(answer.texts[0], new, old, seed)
            keys: dict[str, dict[str, Any]] = {PLAIN: {}, UNSAID: {}}
            keys[SAID] = {"hsd_prediction": before}
            keys[WRONG] = {"hsd_prediction": " ".join(reversed(before.split(" ")))}
            tasks.append(Task(prompt, self.params, keys))
        self._compare("edit of a file", tasks)

    def grammars(self) -> None:
        """A schema for every subject."""
        tasks = []
        for seed, subject in enumerate(SUBJECTS[: self.tasks]):
            own = schema(seed)
            asked = f"Describe {subject} as JSON with the keys {', '.join(own['required'])}."
            params = {**self.params, "structured_outputs": {"json": own}}
            ways: dict[str, dict[str, Any]] = {PLAIN: {}, FREE: {}, FORCED: {}}
            tasks.append(Task(self.plain.call(chat, asked), params, ways))
        self._compare(f"JSON of {KEYS_OF_SCHEMA} keys", tasks)

    def _compare(self, group: str, tasks: list[Task]) -> None:
        found: dict[str, list[Generation]] = {}
        for turn in range(self.rounds):
            for task in tasks:
                names = [*task.keys]
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    engine = self.plain if name == PLAIN else self.cascade
                    if name in (FREE, FORCED):
                        engine.call(force, name == FORCED)
                    answer = self._answer(engine, task.prompt, task.params, task.keys[name])
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
            print(summary(row), flush=True)

    def _answer(
        self,
        engine: EngineProcess,
        prompt: list[int],
        params: dict[str, Any],
        keys: dict[str, Any] | None = None,
    ) -> Generation:
        return engine.generate([prompt], {**params, "extra_args": keys or None})


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    return (
        f"{row['group']}, {row['configuration']}: {row['speedup']:.2f} times no speculation, "
        f"quartiles of {row['batches']} answers {row['speedup_low']:.2f} to "
        f"{row['speedup_high']:.2f}; {row['tokens_per_step']:.2f} tokens per step"
    )


def main() -> None:
    parser: argparse.ArgumentParser = options(__doc__, RESULTS / "request_keys")
    parser.add_argument("--size", default="0.5B", help="of the Qwen2.5-Coder target")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each way to each task")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--tasks", type=int, default=5, help="most files, and most schemas")
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


if __name__ == "__main__":
    main()
