"""A target with Mamba-2 layers below cascades: vLLM's own kernels, compiled for a CPU."""

import pytest
from support import engines
from support.engines import ids
from support.level_files import cascade
from support.recurrent_target import write_recurrent_models
from support.tiny_models import greedy_text

pytestmark = pytest.mark.slow
PROMPTS, COUNT = engines.PROMPTS[:3], 14
PARAMS = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
JOBS = {"text": {"prompts": PROMPTS, "params": PARAMS, "arrive": [0, 1, 3]}}
# Prompts come in parts, next to requests that decode.
CROWDED = {"max_num_batched_tokens": 16, "max_num_seqs": 3}
NGRAM = {"ngram": {"max": 3}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str, list[list[int]]]:
    """The target, a drafter, and the greedy tokens of no speculation by transformers."""
    target, drafter = write_recurrent_models(tmp_path_factory.mktemp("recurrent"))
    return target, drafter, greedy_text(target, PROMPTS, COUNT)


def run(target: str, *levels: dict, faults: str = "use_kernels", **engine) -> tuple[list, list]:
    """(tokens of each request, counts of each level)."""
    engine = {"model": target, "enable_prefix_caching": False, **CROWDED, **engine}
    if levels:
        engine |= cascade(*levels, untested=True)
    patch = f"support.recurrent_target:{faults}"
    result = engines.run_engine(engine, JOBS, patch=patch)["text"]
    print(result["counters"], result["levels"])
    return ids(result), result["levels"]


def test_texts_are_those_of_no_speculation(models):
    target, drafter, texts = models
    assert run(target)[0] == texts
    for cascaded in ([NGRAM], [{**NGRAM, "num_tokens": 3}, {"model": drafter}]):
        found, levels = run(target, *cascaded)
        assert found == texts
        assert all(level["drafted"] > level["accepted"] for level in levels)
    assert levels[-1]["accepted"] > 3


def test_a_wrong_count_of_accepted_tokens_is_found(models):
    target, drafter, texts = models
    found, _ = run(target, {"model": drafter}, faults="use_kernels+miscount")
    assert found != texts
