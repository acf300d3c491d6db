"""Nothing that a client asks for raises in the engine or disturbs another request."""

from dataclasses import dataclass

import numpy as np
import pytest
from support.cascades import stock
from support.engines import run_engine, run_odd_jobs
from support.level_files import cascade
from support.marks import slow
from support.odd_requests import MAX_MODEL_LEN, PROMPT, TOKENIZER, VOCABULARY, table

from vllm_hsd.cascade.text_store import collect_texts, write_store

TABLE = table()
# One greedy and one seeded request next to every odd one: neither may notice its neighbor.
GOOD_PROMPT = TOKENIZER.encode("a cab a bed")
GOOD = [
    {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
    {"temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True},
]
ALONE = {"prompts": [GOOD_PROMPT] * 2, "params": GOOD}
# Odd requests in one batch with the good ones; the slow form tries each by itself.
GROUP_SIZES = [12, *slow(1)]


def with_good(names: list[str]) -> dict:
    """The odd requests of these names between the two good ones."""
    odd = [TABLE[name] for name in names]
    return {
        "prompts": [GOOD_PROMPT, *(list(request.prompt) for request in odd), GOOD_PROMPT],
        "params": [GOOD[0], *(request.params for request in odd), GOOD[1]],
    }


def groups(size: int) -> list[list[str]]:
    """Neighbors in the table, which are alike, are in different groups."""
    names = list(TABLE)
    count = -(-len(names) // size)
    return [names[i::count] for i in range(count)]


# vLLM's V1 runner refuses these with its own drafters.
REFUSED_BY_STOCK = ("min_p", "logit_bias")


def speculation(name: str, family, directory) -> dict:
    table = str(directory / "table.safetensors")
    write_store(
        collect_texts([np.array(PROMPT * 20), np.array(GOOD_PROMPT * 20)], vocab_size=VOCABULARY),
        table,
    )
    small, mid = {"model": family.small, "num_tokens": 3}, {"model": family.mid}
    lowest = {"bigram": table, "num_tokens": 2}
    return {
        "two models": cascade(small, mid),
        "bigram, two models, horizontal": cascade(
            lowest, small, mid, num_speculative_tokens=7, horizontal_tokens=2
        ),
        STOCK: {"speculative_config": stock("ngram", prompt_lookup_max=3)},
    }[name]


def engine(family, **arguments) -> dict:
    crowd = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256, "skip_tokenizer_init": False}
    return {"model": family.target, **crowd, **arguments}


@pytest.fixture(scope="module")
def plain(text_family):
    """Name of an odd request, or "alone" -> answer of an engine without speculation."""
    jobs = {"alone": ALONE, "together": with_good(list(TABLE))}
    found = run_engine(engine(text_family), jobs, work=run_odd_jobs)
    return {"alone": found["alone"], **dict(zip(TABLE, found["together"][1:-1], strict=True))}


STOCK = "vLLM's n-grams"


@dataclass(frozen=True)
class Answers:
    """Answers of an engine to the good and the odd requests.

    Attributes:
        alone: to the good requests without odd ones.
        good: to the good requests, for every batch: [greedy, seeded].
        grouped: name of an odd request -> answer in its group.
        together: name of an odd request -> answer where all are in one batch.
    """

    alone: list
    good: list[list]
    grouped: dict
    together: dict


@pytest.fixture(scope="module", params=GROUP_SIZES)
def size(request) -> int:
    return request.param


# The levels of the slow one are also in the first.
CONFIGURATIONS = ["bigram, two models, horizontal", STOCK, *slow("two models")]


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def speculated(request, size, text_family, tmp_path_factory) -> Answers:
    """First the good requests alone, then with each group, then everything at once."""
    config = speculation(request.param, text_family, tmp_path_factory.mktemp("tables"))
    arguments = engine(text_family, **config)
    batches = [*groups(size), list(TABLE)]
    jobs = {"alone": ALONE, **{str(i): with_good(names) for i, names in enumerate(batches)}}
    found = run_engine(arguments, jobs, work=run_odd_jobs)
    alone = found.pop("alone")
    *grouped, together = [
        dict(zip(names, answers[1:-1], strict=True))
        for names, answers in zip(batches, found.values(), strict=True)
    ]
    return Answers(
        alone,
        [[answers[0], answers[-1]] for answers in found.values()],
        {name: answer for group in grouped for name, answer in group.items()},
        together,
    )


def refused(answer) -> bool:
    return isinstance(answer, dict)


def expected_refusal(odd, answer) -> bool:
    """vLLM refuses min_p and logit_bias in one engine of three; no other answer may differ."""
    return refused(answer) and any(key in odd.params for key in REFUSED_BY_STOCK)


def test_answers_are_those_of_no_speculation(plain, speculated):
    """Token for token where plain vLLM's answer is not random, otherwise in form.

    An engine that raised would have ended with its process.
    """
    wrong = {}
    for name, odd in TABLE.items():
        expected, got = plain[name], speculated.grouped[name]
        if expected_refusal(odd, got):
            continue
        if refused(expected) or refused(got) or odd.exact:
            if expected != got:
                wrong[name] = (expected, got)
        elif not all(well_formed(odd, sequence) for sequence in got) or len(got) != len(expected):
            wrong[name] = (expected, got)
    assert wrong == {}


def well_formed(odd, sequence: dict) -> bool:
    allowed = odd.params.get("allowed_token_ids", range(VOCABULARY))
    limit = min(odd.params["max_tokens"], MAX_MODEL_LEN - len(odd.prompt))
    ended = len(sequence["ids"]) == limit or sequence["finish"] == "stop"
    return ended and 0 < len(sequence["ids"]) <= limit and set(sequence["ids"]) <= set(allowed)


def test_neighbors_notice_nothing(plain, speculated):
    assert speculated.alone == plain["alone"]
    assert [i for i, found in enumerate(speculated.good) if found != plain["alone"]] == []


def test_all_at_once_is_group_by_group(speculated):
    """Seeded requests repeat in a batch of a hundred."""
    for name, got in speculated.together.items():
        if TABLE[name].params.get("seed", -1) != -1:  # vLLM reads -1 as no seed.
            assert got == speculated.grouped[name], name
