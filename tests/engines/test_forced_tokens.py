"""Tokens that a grammar forces: drafted in the place of drafts, and no text changes."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import xgrammar
from support.engines import ids, run_engine, run_jobs
from support.level_files import cascade
from support.marks import slow
from support.odd_requests import TOKENIZER
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vllm_hsd.host import forced_tokens
from vllm_hsd.host.forced_tokens import ATTRIBUTE, FORCED, force

KEYS = ("the_first_of_all_keys", "another", "and_the_last")
SCHEMA = {
    "type": "object",
    "properties": {key: {"enum": [f"{key}_is_long", None]} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
PROMPTS = [TOKENIZER.encode(text) for text in ("abc", "def fed", "a cab a bed", "0123", "{", "cdc")]
JSON = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 150}
FREE = {"max_tokens": 40, "temperature": 0}
OFF = {"extra_args": {"hsd_num_tokens": 0}}
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": {**JSON, "temperature": 0}},
    "seeded": {"prompts": PROMPTS, "params": [{**JSON, "seed": i} for i in range(6)]},
    "few tokens": {
        "prompts": PROMPTS,
        "params": [{**JSON, "temperature": 0, "max_tokens": 20 + i} for i in range(6)],
    },
    "next to others": {
        "prompts": PROMPTS,
        "params": [{**JSON, "temperature": 0} if i % 2 else FREE for i in range(6)],
        "arrive": [0, 1, 2, 3, 4, 5],
    },
    "off": {"prompts": PROMPTS, "params": {**JSON, "temperature": 0, **OFF}},
}
LEVELS = {
    "prediction": lambda family: cascade({"prediction": {}}, num_speculative_tokens=6),
    "branches": lambda family: {
        **cascade({"sources": [{"ngram": {}}, {"suffix": {}}], "branches": 3}),
        "max_model_len": 512,
    },
    "two models": lambda family: cascade(
        {"model": family.small, "num_tokens": 3}, {"model": family.mid}, num_speculative_tokens=6
    ),
    "adaptive": lambda family: cascade({"model": family.small}, adaptive=True),
    "next to a model": lambda family: cascade(
        {"sources": [{"ngram": {}}, {"model": family.small}]}
    ),
}
SLOW = ("adaptive", "next to a model")
GRAMMARS = {
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


def counted(llm, jobs: dict) -> dict:
    """Results of jobs, with their forced tokens, drafted and accepted."""
    from vllm_hsd.host.metrics import source_counts, sources_since

    results = {}
    for name, job in jobs.items():
        before = source_counts()
        results |= run_jobs(llm, {name: job})
        found = sources_since(before).get(FORCED, {"drafted": 0, "accepted": 0})
        results[name][FORCED] = [found["drafted"], found["accepted"]]
    return results


@pytest.fixture(scope="module")
def plain(text_family) -> dict:
    return run_engine({"model": text_family.target, **GRAMMARS}, JOBS)


@pytest.fixture(scope="module", params=[*(n for n in LEVELS if n not in SLOW), *slow(*SLOW)])
def results(request, text_family) -> tuple[str, dict]:
    engine = {"model": text_family.target, **GRAMMARS, **LEVELS[request.param](text_family)}
    return request.param, run_engine(engine, JOBS, work=counted)


def test_forced_tokens_change_no_text(results, plain):
    _, found = results
    for name in JOBS:
        assert ids(found[name]) == ids(plain[name]), name
    for output in found["greedy"]["outputs"]:
        assert list(json.loads(output[0]["text"])) == list(KEYS)


def test_they_are_drafted_and_counted(results):
    name, found = results
    drafted, accepted = found["greedy"][FORCED]
    assert 0.9 * drafted < accepted <= drafted
    assert accepted > 6 * len("".join(KEYS))
    counters, levels = found["greedy"]["counters"], found["greedy"]["levels"]
    assert levels[-1]["accepted"] == counters["spec_decode_num_accepted_tokens"] - accepted
    if name == "prediction":
        # Without a prediction nothing else is drafted.
        assert levels[0]["drafted"] == 0
    assert found["off"][FORCED] == [0, 0]
    assert all(level["drafted"] == 0 for level in found["off"]["levels"])


def drafts_something_else() -> None:
    forced_tokens.forced_tokens = lambda grammar, tokenizer: TOKENIZER.encode('{"th}}')


def test_wrong_tokens_change_no_text(text_family, plain):
    """A rule that takes for forced what is not: grammar and target refuse it."""
    engine = {"model": text_family.target, **GRAMMARS, **LEVELS["two models"](text_family)}
    patch = "engines.test_forced_tokens:drafts_something_else"
    found = run_engine(engine, {"greedy": JOBS["greedy"]}, work=counted, patch=patch)["greedy"]
    assert ids(found) == ids(plain["greedy"])


def forces_one_letter() -> None:
    forced_tokens.forced_tokens = lambda grammar, tokenizer: TOKENIZER.encode("zzz")


def rejections(llm, jobs) -> tuple[list[float], int]:
    """Forced tokens, and what moved the thresholds of levels whose drafts end by entropy."""

    def moved(worker) -> int:
        return int(worker.model_runner.speculator.thresholds.count.sum())

    found = counted(llm, jobs)
    return found["letters"][FORCED], llm.collective_rpc(moved)[0]


def test_a_rejected_token_that_no_level_drafted_moves_no_threshold(text_family):
    levels = cascade({"model": text_family.small, "stopping": "entropy"})
    engine = {"model": text_family.target, **GRAMMARS, **levels}
    params = {"structured_outputs": {"regex": "[a-z]*"}, "temperature": 0, "max_tokens": 20}
    job = {"letters": {"prompts": PROMPTS, "params": params}}
    patch = "engines.test_forced_tokens:forces_one_letter"
    (drafted, accepted), moved = run_engine(engine, job, work=rejections, patch=patch)
    assert accepted < drafted and moved == 0
    _, moved = run_engine(engine, job, work=rejections)
    assert moved > 0


class Grammar:
    """Of xgrammar's kind: text that must follow, of which tokens up to `valid` are allowed."""

    def __init__(self, text: str, valid: int = 99) -> None:
        self.matcher = SimpleNamespace(find_jump_forward_string=lambda: text)
        self.valid = valid

    def is_terminated(self) -> bool:
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self.valid]


class Other(Grammar):
    """Of a backend that says nothing of what must follow."""

    def __init__(self) -> None:
        self.valid = 99


class Guidance(Other):
    """Of llguidance's kind, which says it in tokens."""

    ll_matcher = SimpleNamespace(compute_ff_tokens=lambda: [7, 8])


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Trained on some JSON; of SentencePiece's kind it puts a space before every text."""
    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind != "bytes"))
    if kind == "bytes":
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    elif kind == "Metaspace":
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        model.normalizer = normalizers.Sequence([*spaces])
    if kind != "bytes":
        parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        model.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    texts = [json.dumps(dict.fromkeys(KEYS[n:], "x"), indent=n) for n in (0, 1, 2)] * 20
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if kind != "bytes")]
    model.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [],
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")


# Forced in the middle of an answer: by a schema, and texts with spaces and lines.
CONTINUED = ('{"the_first_of_all_keys": "', "the_first", ' "another"', '\n  "another"', "\n\n")


@pytest.mark.parametrize("kind", ["bytes", "Metaspace", "Prepend"])
@pytest.mark.parametrize("text", CONTINUED)
def test_a_text_that_goes_on_has_no_space_of_its_own(kind, text):
    tokenizer = tokenizer_of(kind)
    before = tokenizer.encode("x", add_special_tokens=False)
    tokens = forced_tokens._continued(tokenizer, text)
    assert tokenizer.decode([*before, *tokens]) == f"x{text}"
    plain = tokenizer.encode(text, add_special_tokens=False)
    # Metaspace puts none before a space.
    assert (tokens == plain) is (kind == "bytes" or (kind == "Metaspace" and text[0] == " "))
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))
    grammar = compiler.compile_grammar(f"root ::= {json.dumps(text)} [a-z]")
    matcher = xgrammar.GrammarMatcher(grammar)
    found = forced_tokens.forced_tokens(SimpleNamespace(matcher=matcher), tokenizer)
    assert found == tokens and all(matcher.accept_token(token) for token in found)


LIMITED = SimpleNamespace(extra_args={"hsd_num_tokens": 1})


def request_of(grammar, **more) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "use_structured_output": True,
            "is_prefill_chunk": False,
            "is_finished": lambda: False,
            "structured_output_request": SimpleNamespace(grammar=grammar, reasoning_ended=None),
            "sampling_params": SimpleNamespace(extra_args=None),
            "max_tokens": 50,
            "num_output_tokens": 0,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (request_of(Grammar("abcdefgh")), 5),
        (request_of(Grammar("abcdefgh", valid=2)), 2),
        (request_of(Grammar("")), None),
        (request_of(Other()), None),
        (request_of(Grammar("abc"), is_prefill_chunk=True), None),
        (request_of(Grammar("abc"), is_finished=lambda: True), None),
        (request_of(Grammar("abc"), use_structured_output=False), None),
        (request_of(Grammar("abc"), max_tokens=10, num_output_tokens=7), 2),
        (request_of(Grammar("abc"), max_tokens=10, num_output_tokens=9), None),
        (request_of(Grammar("abc"), sampling_params=LIMITED), 1),
        (request_of(Guidance()), 2),
    ],
)
@pytest.mark.parametrize("reasons", [False, True])
def test_when_tokens_are_forced(request_, expected, reasons):
    manager = SimpleNamespace(
        tokenizer=TOKENIZER, enable_in_reasoning=False, reasoner_cls=object() if reasons else None
    )
    hsd = SimpleNamespace(several_drafts=False, num_speculative_tokens=5)
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(hsd=hsd)),
        requests={"a": request_},
        structured_output_manager=manager,
        dynamic_sd_lookup=None,
    )
    drafts = SimpleNamespace(req_ids=["a", "gone"], draft_token_ids=[[1, 2, 3], [4]])
    with mock.patch("vllm_hsd.config.platform.read_on_host", lambda: True):
        found = force(scheduler, drafts)
    if expected is None or reasons:
        assert not found and drafts.draft_token_ids == [[1, 2, 3], [4]]
    else:
        assert len(found["a"]) == expected and drafts.draft_token_ids == [found["a"], [4]]
    assert getattr(scheduler, ATTRIBUTE) == found
    scheduler.dynamic_sd_lookup = [5, 5, 0]  # by requests of a step
    drafts.draft_token_ids = [[], []]
    with mock.patch("vllm_hsd.config.platform.read_on_host", lambda: True):
        assert force(scheduler, drafts) == {}
    assert drafts.draft_token_ids == [[], []] and getattr(scheduler, ATTRIBUTE) == {}
