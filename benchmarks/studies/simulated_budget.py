"""What `adaptive` would draft, replayed on recorded text: greedy, exact in tokens, at given times.

    python -m benchmarks.studies.simulated_budget --prompts DIR    # or `make bench-budget`

Records once, with the Qwen2.5-Coder family, the target's greedy answers, and at each of their
places the 0.5B's likeliest token and its probability. From then on no model runs: greedy drafts are
accepted while they equal the answer, lookups search the text itself, and time is a sum over passes
of times that are stated below. So the budget can be compared, in seconds, with every fixed
configuration, in any order of prompts, always from a cold start. Writes simulated_budget.csv: over
the best fixed configuration of each set, chosen with hindsight.
"""

import argparse
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.studies import demo, edits
from benchmarks.studies.demo_cascade import PROMPTS
from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.step_times import TIMED_AT_START
from vllm_hsd.cascade.level import DraftingLevel, LookupResult, of_each_token
from vllm_hsd.tools.lookup_level import Texts
from vllm_hsd.tools.planner.prompts import Prompt, read_prompts
from vllm_hsd.tools.planner.suffix_level import SuffixLevel

SETS = "alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"
NUM_PROMPTS, MAX_TOKENS, LENGTH, NUM_ORDERS = 5, 96, 8, 12
SLOTS = np.zeros(1, dtype=np.int64)
# Levels and draft lengths.
FIXED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "no speculation": ((), ()),
    "suffix 8": ((0,), (8,)),
    **{f"0.5B {n}": ((1,), (n,)) for n in (2, 3, 4)},
    "suffix 4 < 0.5B 4": ((0, 1), (4, 4)),
    "suffix 8 < 0.5B 8": ((0, 1), (8, 8)),
}


@dataclass(frozen=True)
class Times:
    """Seconds of passes by tokens, as traced on a core of an AMD EPYC (family 26), bfloat16.

    Attributes:
        target: a pass over one token; slope: what each further one adds, as a share.
        small: a pass of the 0.5B over one token; read: over each token of a prompt.
        search: a lookup.
    """

    target: float = 0.122
    slope: float = 0.06
    small: float = 0.040
    read: float = 0.002
    search: float = 0.001

    def verify(self, tokens: int) -> float:
        """A pass of the target."""
        return self.target * (1 + self.slope * (tokens - 1))

    def draft(self, tokens: int) -> float:
        """A pass of the 0.5B."""
        return self.small + self.read * (tokens - 1)


MACHINES = {
    "measured": Times(),
    "dear tokens": Times(slope=0.12),
    "cheap tokens": Times(slope=0.02),
    "small drafter": Times(small=0.020, read=0.001),
    "large drafter": Times(small=0.065),
}


@dataclass(frozen=True)
class Answer:
    """A recorded answer.

    Attributes:
        set: of its prompt.
        prompt, tokens: ids.
        small: the 0.5B's likeliest token at each place of the answer.
        sure: its probability.
    """

    set: str
    prompt: list[int]
    tokens: list[int]
    small: list[int]
    sure: list[float]

    def offer(self, added: Sequence[int]) -> tuple[list[int], list[float]]:
        """A suffix lookup after the prompt and some tokens: what it drafts, and its estimates."""
        return _offer(tuple(self.prompt), tuple(added))


@cache
def _offer(prompt: tuple[int, ...], added: tuple[int, ...]) -> tuple[list[int], list[float]]:
    level, text = SuffixLevel(), np.array([prompt + added], dtype=np.int32)
    level.committed = {0: text.shape[1]}
    found = level.lookup(Texts(text, SLOTS, SLOTS, SLOTS + text.shape[1]), SLOTS + LENGTH)
    count = int(found.counts[0])
    return found.token_ids[0, :count].tolist(), of_each_token(found.confidence)[0, :count].tolist()


class Stream:
    """One request after another, by a fixed configuration or by the budget that serves.

    Args:
        fixed: levels and draft lengths; None for the budget, which has seen nothing yet.
    """

    def __init__(self, times: Times, fixed: tuple | None = None) -> None:
        self.times, self.fixed = times, fixed
        self.budget = None
        if fixed is None:
            lookup = DraftingLevel(LENGTH, LENGTH, looks_up=True)
            model = DraftingLevel(LENGTH, LENGTH, verifies=True, ends=True)
            self.budget = DraftBudget([lookup, model], 1)
            # A server times its levels when it starts.
            for tokens in TIMED_AT_START:
                self.budget.times[1].observe(tokens, times.draft(tokens))

    def answer(self, answer: Answer) -> float:
        """Seconds of an answer after its first token."""
        self.answered, self.seconds, self.place, self.read = answer, 0.0, 1, 0
        if self.budget is not None:
            self.budget.forget(0)
        while self.place < len(answer.tokens):
            self._step()
        return self.seconds

    def _step(self) -> None:
        budget, tokens = self.budget, self.answered.tokens
        began, room = self.seconds, min(LENGTH, len(tokens) - self.place - 1)
        # With `adaptive` the first token does not wait for a model.
        plan = self._plan(0 if budget is not None and self.place == 1 else room)
        levels, lengths, room = plan
        self.sure: list[float] = []
        draft: list[int] = []
        if levels == (0,):
            draft, self.sure = (each[:room] for each in self._look_up([], budget is None))
        elif levels and room:
            draft = self._cascade(levels, lengths, room)
        accepted = 0
        for token, right in zip(draft, tokens[self.place :], strict=False):
            if token != right:
                break
            accepted += 1
        drafting = self.seconds - began
        if budget is not None:
            estimates = np.full((1, LENGTH), np.nan)
            estimates[0, : len(self.sure)] = self.sure
            top, drafted = (levels[-1] if levels else 0), SLOTS + len(draft)
            budget.drafted_for_target(top, SLOTS, SLOTS + room * bool(levels), drafted, drafting)
            budget.times[-1].observe(1 + len(draft), self.times.verify(1 + len(draft)))
            if draft:
                verdict = drafted, estimates, SLOTS + accepted
                budget.learn_acceptance(top, budget.target, SLOTS, *verdict)
            budget.step_ended(SLOTS, drafted, SLOTS + accepted)
        self.seconds += self.times.verify(1 + len(draft))
        if 1 in levels:
            kept = min(accepted, max(len(draft) - 1, 0))
            self.read = len(self.answered.prompt) + self.place + kept
        self.place += accepted + 1

    def _plan(self, room: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Levels, their draft lengths, and most tokens of the draft."""
        if self.budget is None:
            assert self.fixed is not None
            levels, lengths = self.fixed
            return (levels, lengths, min(room, lengths[-1])) if levels else ((), (), 0)
        if not room:
            return (), (), 0
        tokens, estimates = self._look_up([])
        width, counts = max(len(tokens[:room]), 1), SLOTS + len(tokens[:room])
        confidence = np.zeros((1, width))
        confidence[0, : counts[0]] = np.cumprod(estimates[:room])
        offer = LookupResult(np.zeros((1, width), dtype=np.int64), counts, confidence)
        missed, left = self._missed(), len(self.answered.tokens) - self.place
        late = self.budget.times[1].seconds(missed) if missed > 0 else 0.0
        found = self.budget.plan(
            SLOTS, SLOTS + room, 1, offer, np.array([[0.0], [late]]), SLOTS + left
        )
        self.budget.searched(1, self.times.search, found.gained)
        self.prices = found.further
        selected = found.selection
        if not selected.levels:
            return (), (), 0
        most = room if selected.most is None else int(selected.most[0])
        return selected.levels, selected.draft_lengths, min(most, selected.draft_lengths[-1])

    def _missed(self) -> int:
        return len(self.answered.prompt) + self.place - 1 - self.read

    def _look_up(
        self, drafted: Sequence[int], searches: bool = True
    ) -> tuple[list[int], list[float]]:
        if searches:
            self.seconds += self.times.search
        return self.answered.offer([*self.answered.tokens[: self.place], *drafted])

    def _cascade(self, levels: tuple[int, ...], lengths: tuple[int, ...], room: int) -> list[int]:
        """A draft of the 0.5B, with lookups below it or without."""
        answer, budget = self.answered, self.budget
        if (missed := self._missed()) > 1:
            self._pass(missed - 1)
        draft: list[int] = []
        right = True
        while len(draft) < room:
            began, looked, estimates = self.seconds, [], []
            wanted = min(lengths[0], room - len(draft) - 1) if 0 in levels else 0
            if wanted:
                # The first offer is known.
                tokens, sure = self._look_up(draft, bool(draft) or budget is None)
                looked, estimates = tokens[:wanted], sure[:wanted]
            drafting = self.seconds - began
            seconds = self._pass(1 + len(looked), observe=0 not in levels)
            accepted = 0
            for token in [*looked, None]:
                at = self.place + len(draft)
                # What it says after a wrong token is not recorded: nothing that is accepted.
                own = answer.small[at] if right and at < len(answer.tokens) else -1
                if token is not None and token != own:
                    token = None
                draft.append(own)
                self.sure.append(answer.sure[at] if own >= 0 else 0.6)
                right = right and own >= 0 and own == answer.tokens[at]
                if token is None:
                    break
                accepted += 1
            if budget is None:
                continue
            if 0 in levels:
                given = np.full((1, LENGTH), np.nan)
                given[0, : len(estimates)] = estimates
                budget.level_verified(
                    0,
                    1,
                    SLOTS,
                    requested=SLOTS + wanted,
                    drafted=SLOTS + len(looked),
                    estimates=given,
                    accepted=SLOTS + accepted,
                    computed=1 + len(looked),
                    drafting_seconds=drafting,
                    verifying_seconds=seconds,
                )
            known = np.zeros((1, max(LENGTH, len(draft))))
            known[0, : len(draft)] = self.sure
            if not budget.goes_on(1, SLOTS, known, SLOTS + len(draft), self.prices)[0]:
                break
        self.sure = self.sure[:room]
        return draft[:room]

    def _pass(self, tokens: int, observe: bool = True) -> float:
        seconds = self.times.draft(tokens)
        self.seconds += seconds
        if observe and self.budget is not None:
            self.budget.times[1].observe(tokens, seconds)
        return seconds


def record(prompts: dict[str, list[Prompt]], path: Path) -> None:
    """Let the family answer, and write what both models say."""
    from vllm import LLM, SamplingParams

    engine: dict[str, Any] = {
        "max_model_len": 4096,
        "enforce_eager": True,
        "seed": 0,
        "kv_cache_memory_bytes": 1 << 29,
    }
    sets = [name for name, chats in prompts.items() for _ in chats]
    chats: Any = [chat for own in prompts.values() for chat in own]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    target = LLM(str(qwen_coder("1.5B")), **engine)
    answers = [
        (list(found.prompt_token_ids or ()), list(found.outputs[0].token_ids))
        for found in target.chat(chats, params)
    ]
    del target
    small, lines = LLM(str(qwen_coder("0.5B")), enable_prefix_caching=False, **engine), []
    for name, (prompt, tokens) in zip(sets, answers, strict=True):
        one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        found = small.generate([{"prompt_token_ids": prompt + tokens}], one)[0].prompt_logprobs
        best = [max(row.items(), key=lambda each: each[1].logprob) for row in found[len(prompt) :]]
        said = {"small": [t for t, _ in best], "sure": [exp(p.logprob) for _, p in best]}
        lines.append(json.dumps({"set": name, "prompt": prompt, "tokens": tokens, **said}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def orders(answers: Sequence[Answer]) -> dict[str, list[list[Answer]]]:
    """Streams that each begin cold: all sets mixed, some times; a set each; an answer each."""
    by_set = {a.set: [b for b in answers if b.set == a.set] for a in answers}
    return {
        "mixed": [random.Random(i).sample(answers, len(answers)) for i in range(NUM_ORDERS)],
        "a set": list(by_set.values()),
        "one answer": [[each] for each in answers],
    }


def rows(answers: Sequence[Answer], machine: str) -> list[dict[str, Any]]:
    """The budget over the best fixed configuration of each set, and that one over none."""
    times, sets = MACHINES[machine], list(dict.fromkeys(a.set for a in answers))

    def total(seconds: dict[int, float], name: str) -> float:
        return sum(seconds[id(a)] for a in answers if a.set == name)

    def run(streams: list[list[Answer]], fixed: tuple | None) -> dict[int, float]:
        found: defaultdict[int, list[float]] = defaultdict(list)
        for stream in streams:
            serving = Stream(times, fixed)
            for answer in stream:
                found[id(answer)].append(serving.answer(answer))
        return {key: float(np.mean(seconds)) for key, seconds in found.items()}

    fixed = {name: run([list(answers)], levels) for name, levels in FIXED.items()}
    table = []
    for order, streams in orders(answers).items():
        own = run(streams, None)
        for name in sets:
            best = min(FIXED, key=lambda each: total(fixed[each], name))
            over = total(fixed[best], name) / total(own, name)
            gain = total(fixed["no speculation"], name) / total(fixed[best], name)
            table.append(
                {"times": machine, "order": order, "set": name, "best_fixed": best}
                | {"best_over_none": round(gain, 3), "adaptive_over_best": round(over, 3)}
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, help="a directory of JSON lines files of the sets")
    parser.add_argument("--output", type=Path, default=RESULTS / "simulated_budget")
    options = parser.parse_args()
    texts = {**demo.read_prompts(PROMPTS), "edits of functions": edits.prompts()}
    prompts = {k: [[{"role": "user", "content": t}] for t in own] for k, own in texts.items()}
    for name in SETS:
        prompts[name] = read_prompts(options.prompts / f"{name}.jsonl" if options.prompts else name)
    few = {name: chats[:NUM_PROMPTS] for name, chats in prompts.items()}
    # Other prompts are another recording.
    digest = hashlib.sha256(json.dumps(few).encode()).hexdigest()[:12]
    path = options.output / f"answers_{digest}.jsonl"
    if not path.exists():
        record(few, path)
    answers = [Answer(**json.loads(line)) for line in path.read_text().splitlines()]
    answers = [each for each in answers if len(each.tokens) > LENGTH]
    table = []
    for machine in MACHINES:
        found = rows(answers, machine)
        table += found
        for order in dict.fromkeys(row["order"] for row in found):
            own = [row["adaptive_over_best"] for row in found if row["order"] == order]
            print(f"{machine}, {order}: {np.exp(np.log(own).mean()):.3f}, least {min(own):.2f}")
    write_csv(options.output / "simulated_budget.csv", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
