"""Nothing that a client asks for raises in the engine or disturbs another request."""

import itertools

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
STOCK = "vLLM's n-grams"
FAST = ("bigram, two models, horizontal", STOCK)
# Its levels are also in the first.
SLOW = "two models"


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


def speculation(name: str, family, directory) -> dict:
    if name == STOCK:
        return {"speculative_config": stock("ngram", prompt_lookup_max=3)}
    small, mid = {"model": family.small, "num_tokens": 3}, {"model": family.mid}
    if name == SLOW:
        return cascade(small, mid)
    table = str(directory / "table.safetensors")
    texts = [np.array(PROMPT * 20), np.array(GOOD_PROMPT * 20)]
    write_store(collect_texts(texts, vocab_size=VOCABULARY), table)
    lowest = {"bigram": table, "num_tokens": 2}
    return cascade(lowest, small, mid, num_speculative_tokens=7, horizontal_tokens=2)


def engine(family, **arguments) -> dict:
    crowd = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256, "skip_tokenizer_init": False}
    return {"model": family.target, **crowd, **arguments}


@pytest.fixture(scope="module")
def plain(text_family):
    """Name of an odd request, or "alone" -> answer of an engine without speculation."""
    jobs = {"alone": with_good([]), "together": with_good(list(TABLE))}
    found = run_engine(engine(text_family), jobs, work=run_odd_jobs)
    return {"alone": found["alone"], **dict(zip(TABLE, found["together"][1:-1], strict=True))}


@pytest.fixture(
    scope="module",
    # Odd requests in one batch with the good ones; the slow form tries each by itself.
    params=[*itertools.product(FAST, [12]), *slow((SLOW, 12), *((n, 1) for n in (*FAST, SLOW)))],
    ids=lambda param: f"{param[0]}, {param[1]} at once",
)
def speculated(request, text_family, tmp_path_factory) -> tuple[list, dict]:
    """Answers to the good requests of every batch, and to odd ones by name."""
    name, size = request.param
    config = speculation(name, text_family, tmp_path_factory.mktemp("tables"))
    batches = [[], *groups(size)]
    jobs = {str(i): with_good(names) for i, names in enumerate(batches)}
    found = run_engine(engine(text_family, **config), jobs, work=run_odd_jobs).values()
    odd = {
        name: answer
        for names, answers in zip(batches, found, strict=True)
        for name, answer in zip(names, answers[1:-1], strict=True)
    }
    return [[answers[0], answers[-1]] for answers in found], odd


def test_answers_are_those_of_no_speculation(plain, speculated):
    """Token for token where plain vLLM's answer is not random, otherwise in form."""
    _, answers = speculated
    wrong = {}
    for name, odd in TABLE.items():
        expected, got = plain[name], answers[name]
        if odd.exact or isinstance(expected, dict) or isinstance(got, dict):  # refused
            sound = expected == got
        else:
            sound = all(well_formed(odd, each) for each in got) and len(got) == len(expected)
        if not sound:
            wrong[name] = (expected, got)
    assert wrong == {}


def well_formed(odd, sequence: dict) -> bool:
    allowed = odd.params.get("allowed_token_ids", range(VOCABULARY))
    limit = min(odd.params["max_tokens"], MAX_MODEL_LEN - len(odd.prompt))
    ended = len(sequence["ids"]) == limit or sequence["finish"] == "stop"
    return ended and 0 < len(sequence["ids"]) <= limit and set(sequence["ids"]) <= set(allowed)


def test_neighbors_notice_nothing(plain, speculated):
    good, _ = speculated
    assert [i for i, found in enumerate(good) if found != plain["alone"]] == []
