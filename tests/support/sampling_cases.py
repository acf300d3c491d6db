"""Sampling parameters with prompts, and the comparison of sampled tokens with their distribution.

Models have a vocabulary of 5 (fixture `small_vocabulary`), so that the joint distribution of a few
tokens can be enumerated. Results repeat: requests without a seed follow the engine's.
"""

import functools

from support.exact_joint_distribution import chi_square_p_value, joint_distribution, marginal

from vllm_hsd.tools.audit.tiny_models import EOS

# Of one comparison by the tail of chi-square, which few samples exceed: a correct sampler fails one
# of some hundred with a probability of up to 2e-5 (simulated).
SIGNIFICANCE = 1e-6
MAX_TOKENS, COMPARED = 6, 4

CASES = {
    "temperature 0.7": ([2, 3, 0], {"temperature": 0.7}),
    "temperature 1": ([3], {}),
    "temperature 1.3 with eos": ([4, 2], {"temperature": 1.3, "ignore_eos": False}),
    "top_k": ([2, 4, 4, 0, 3, 3], {"top_k": 3, "temperature": 1.3}),
    "top_p": ([0, 3], {"top_p": 0.8}),
    "min_p": ([3, 3, 2], {"min_p": 0.15}),
    "penalties": (
        [4, 4, 3],
        {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ),
    "bias and eos": (
        [2, 2, 4, 3],
        # Where top_p needs every token, vLLM's kernel leaves the least likely one out.
        {"logit_bias": {2: 1.0}, "min_tokens": 2, "ignore_eos": False, "top_p": 0.7},
    ),
    "bad words": ([3, 0, 0, 4], {"bad_words_ids": [[2], [3, 3]], "allowed_token_ids": [0, 2, 3]}),
    "with seeds": ([0, 4, 2], {"temperature": 0.9}),
    "greedy": ([3, 2], {"temperature": 0}),
}

# Decoding crosses a block boundary.
LONG_CASES = {
    f"{name}, long prompt": ([i * i % 5 for i in range(26)], CASES[name][1])
    for name in ("temperature 0.7", "top_p", "penalties")
}


def sampling_job(cases: dict, count: int, max_tokens: int = MAX_TOKENS) -> dict:
    """A job for `run_engine`: `count` requests of every case, interleaved in every batch."""
    params = [
        {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": i if name == "with seeds" else None,
            **cases[name][1],
        }
        for i in range(count)
        for name in cases
    ]
    return {
        "prompts": [prompt for _ in range(count) for prompt, _ in cases.values()],
        "params": params,
    }


@functools.cache
def exact_distribution(model: str, case: str) -> dict[tuple[int, ...], float]:
    """Outcome -> probability of the first MAX_TOKENS tokens."""
    prompt, params = {**CASES, **LONG_CASES}[case]
    eos = None if params.get("ignore_eos", True) else EOS
    return joint_distribution(model, prompt, MAX_TOKENS, params, eos)


def p_values(model: str, cases: dict, result: dict) -> dict[str, float]:
    """p-values of a `sampling_job`: of its first tokens; of the last of these with all later."""
    outputs = [tuple(output[0]["ids"][:MAX_TOKENS]) for output in result["outputs"]]
    found = {}
    for number, case in enumerate(cases):
        samples = outputs[number :: len(cases)]
        for part in (slice(0, COMPARED), slice(COMPARED - 1, None)):
            found[f"{case}, from token {part.start}"] = chi_square_p_value(
                [output[part] for output in samples],
                marginal(exact_distribution(model, case), part),
            )
    return found


def verify_in_parts() -> None:
    """Verify batches in parts of four rows of logits, for five tokens."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    rejection_sampler.MAX_CHUNK_BYTES = 4 * 5 * 4
