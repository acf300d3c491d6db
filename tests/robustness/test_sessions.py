"""A session of several turns goes on from the tokens from which it would without speculation."""

import asyncio
from types import SimpleNamespace

import pytest
from support import neighbours
from support.engines import in_process

from vllm_hsd.host.engine_hooks import update_request_as_session

FIRST = (
    "class Node:\n    def __init__(self, name, value):\n        self.name = name\n"
    "        self.value = value\n\n    def __repr__(self):\n        return "
)
TURNS = [FIRST, "x = [", "y = {"]
NGRAM = {"ngram": {"max": 4}}
STOCK = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
LEVELS = {
    "lookup": [NGRAM],
    "branches": [{"sources": [NGRAM, {"ngram": {"max": 2}}], "branches": 4}],
    "model": [{**NGRAM, "num_tokens": 4}, {"model": str(neighbours.MODELS / "mid")}],
}
CONFIGURATIONS = {name: {"method": "hsd", "levels": levels} for name, levels in LEVELS.items()}
CONFIGURATIONS["stock drafter"] = {**STOCK, "rejection_sample_method": "hierarchical"}


def turns(speculative_config: dict | None) -> list[str]:
    """The texts of the turns of one session."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {"model": neighbours.ENGINE["model"], "dtype": "float32", "enforce_eager": True}
    arguments |= {"max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    given = AsyncEngineArgs(**arguments, speculative_config=speculative_config)
    greedy = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    greedy |= {"stop_token_ids": neighbours.tokens(".")}
    params = SamplingParams(**greedy, output_kind=RequestOutputKind.DELTA)
    texts, ended = [""], asyncio.Event()

    async def inputs():
        for turn in TURNS:
            prompt = TokensPrompt(prompt_token_ids=neighbours.tokens(turn))
            yield StreamingInput(prompt=prompt, sampling_params=params)
            await ended.wait()
            ended.clear()

    async def answered():
        engine = AsyncLLM.from_engine_args(given)
        async for output in engine.generate(inputs(), params, "session"):
            texts[-1] += neighbours.TOKENIZER.decode(output.outputs[0].token_ids)
            if output.outputs[0].finish_reason is not None:
                texts.append("")
                ended.set()
        engine.shutdown()
        return texts[: len(TURNS)]

    return asyncio.run(answered())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_turns_are_those_of_no_speculation(name):
    config = {**CONFIGURATIONS[name], "num_speculative_tokens": 8}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    plain, found = (
        in_process(turns, {"speculative_config": each}, env=environment) for each in (None, config)
    )
    assert found == plain and all(plain)


@pytest.mark.parametrize(("computed", "kept"), [(9, 9), (10, 9), (13, 9), (6, 6)])
def test_a_turn_keeps_all_but_its_last_token(computed, kept):
    """Ten tokens, the last of which ended the turn; of a draft more may have been computed."""
    session = SimpleNamespace(num_computed_tokens=computed, num_tokens=10)
    update_request_as_session(lambda self, session, update: None, None, session, None)
    assert session.num_computed_tokens == kept
