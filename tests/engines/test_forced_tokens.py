"""What needs a tokenizer: stop strings, bad words, the end of a text, grammars.

Tokens that a grammar forces are drafted in the place of drafts, and no text changes.
"""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import differing, ids, run_engine, run_jobs
from support.level_files import cascade
from support.marks import slow
from support.odd_requests import EOS, LETTERS, TOKENIZER
from support.soak_requests import CHOICES, PATTERN
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from vllm_hsd.host import forced_tokens
from vllm_hsd.host.forced_tokens import ATTRIBUTE, FORCED, force

PROMPTS = [TOKENIZER.encode(text) for text in ("abc", "def fed", "a cab a bed", "0123", "{", "cdc")]
TEXT = {
    "skip_tokenizer_init": False,
    # Random models would fill their JSON with blanks.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
KEYS = ("the_first_of_all_keys", "another", "and_the_last")
SCHEMA = {
    "type": "object",
    "properties": {key: {"enum": [f"{key}_is_long", None]} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
JSON = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 150}
GREEDY, FREE = {**JSON, "temperature": 0}, {"max_tokens": 40, "temperature": 0}
WORDS = {**FREE, "allowed_token_ids": LETTERS}
OFF = {"extra_args": {"hsd_num_tokens": 0}}
PARAMS: dict[str, dict | list[dict]] = {
    "greedy": GREEDY,
    "seeded": [{**JSON, "seed": i} for i in range(6)],
    "few tokens": [{**GREEDY, "max_tokens": 20 + i} for i in range(6)],
    "next to others": [FREE, GREEDY] * 3,
    "off": {**GREEDY, **OFF},
    "other grammars": [
        {**FREE, "structured_outputs": each}
        for each in ({"choice": CHOICES}, {"regex": PATTERN}, {"choice": ["é1", "è2"]})
    ]
    * 2,
    "stop strings": [
        {**WORDS, "stop": ["ab", "c", "fe", "dd"]},
        {**WORDS, "stop": ["ab", "ff"], "include_stop_str_in_output": True, "min_tokens": 5},
    ]
    * 3,
    "bad words": {**WORDS, "bad_words": ["a", "bc", "dd"]},
    "end of text": [
        {**FREE, "logit_bias": {EOS: 5.0}},
        {**FREE, "logit_bias": {EOS: 9.0}, "min_tokens": 7},
    ]
    * 3,
}
JOBS = {name: {"prompts": PROMPTS, "params": params} for name, params in PARAMS.items()}
JOBS["next to others"]["arrive"] = [0, 1, 2, 3, 4, 5]
NGRAM, SIX = {"ngram": {}}, {"num_speculative_tokens": 6}
LEVELS = {
    "prediction": lambda f: cascade({"prediction": {}}, **SIX),
    "branches": lambda f: {
        **cascade({"sources": [NGRAM, {"suffix": {}}], "branches": 3}),
        "max_model_len": 512,
    },
    "two models": lambda f: cascade({"model": f.small, "num_tokens": 3}, {"model": f.mid}, **SIX),
    "adaptive": lambda f: cascade({"model": f.small}, adaptive=True),
    "next to a model": lambda f: cascade({"sources": [NGRAM, {"model": f.small}]}),
}
SLOW = ("two models", "adaptive", "next to a model")


def counted(llm, jobs: dict) -> dict:
    """Results of jobs, with their forced tokens, drafted and accepted."""
    from vllm_hsd.tools.level_metrics import source_counts, sources_since

    results = {}
    for name, job in jobs.items():
        before = source_counts()
        results |= run_jobs(llm, {name: job})
        found = sources_since(before).get(FORCED, {"drafted": 0, "accepted": 0})
        results[name][FORCED] = [found["drafted"], found["accepted"]]
    return results


@pytest.fixture(scope="module")
def plain(text_family) -> dict:
    found = run_engine({"model": text_family.target, **TEXT}, JOBS)
    for name in ("stop strings", "end of text"):
        assert any(output["finish"] == "stop" for [output] in found[name]["outputs"])
    return found


@pytest.fixture(scope="module", params=[*(n for n in LEVELS if n not in SLOW), *slow(*SLOW)])
def results(request, text_family) -> tuple[str, dict]:
    engine = {"model": text_family.target, **TEXT, **LEVELS[request.param](text_family)}
    return request.param, run_engine(engine, JOBS, work=counted)


def test_forced_tokens_change_no_text(results, plain):
    _, found = results
    assert differing(found, plain) == []
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


def forces_one_letter() -> None:
    forced_tokens.forced_tokens = lambda grammar, *_: TOKENIZER.encode("zzz")


def rejections(llm, jobs) -> tuple[dict, int]:
    """Results, and what moved the thresholds of levels whose drafts end by entropy."""

    def moved(worker) -> int:
        return int(worker.model_runner.speculator.thresholds.count.sum())

    return counted(llm, jobs)["letters"], llm.collective_rpc(moved)[0]


def test_wrong_tokens_change_no_text_and_move_no_threshold(text_family):
    """A rule that takes for forced what the grammar only allows: the target refuses it."""
    levels = cascade({"model": text_family.small, "stopping": "entropy"})
    engine = {"model": text_family.target, **TEXT, **levels}
    params = {"structured_outputs": {"regex": "[a-z]*"}, "temperature": 0, "max_tokens": 20}
    job = {"letters": {"prompts": PROMPTS, "params": params}}
    patch = "engines.test_forced_tokens:forces_one_letter"
    wrong, moved = run_engine(engine, job, work=rejections, patch=patch)
    drafted, accepted = wrong[FORCED]
    assert accepted < drafted and moved == 0
    right, moved = run_engine(engine, job, work=rejections)
    assert right[FORCED] == [0, 0] and moved > 0
    assert ids(wrong) == ids(right)


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
    for backend in BACKENDS:
        grammar, manager = grammar_of(backend, tokenizer, REGEX, f"{re.escape(text)}[a-z]")
        found = forced_tokens.forced_tokens(grammar, manager, {EOS}, 60)
        assert found == tokens and grammar.accept_tokens("", found)


BACKENDS = XgrammarBackend, GuidanceBackend
BYTES = bytes_to_unicode()
REGEX, GRAMMAR = StructuredOutputOptions.REGEX, StructuredOutputOptions.GRAMMAR


def grammar_of(backend, tokenizer, *spec) -> tuple[Any, SimpleNamespace]:
    """A grammar as vLLM compiles it, and what is used of its manager."""
    structured = SimpleNamespace(disable_any_whitespace=True, disable_additional_properties=False)
    config = {"model_config": None, "structured_outputs_config": structured}
    compiling = backend(
        SimpleNamespace(speculative_config=None, **config), tokenizer, len(tokenizer)
    )
    manager = SimpleNamespace(tokenizer=tokenizer, backend=compiling)
    return compiling.compile_grammar(*spec), manager


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("spec", "before", "expected"),
    [
        ((REGEX, "ab(c|d)"), b"", "ab"),
        ((REGEX, "ab(cd|ce)?"), b"", "ab"),
        ((REGEX, "[ab]c"), b"", ""),
        ((REGEX, "a*"), b"", ""),
        # Alternatives that part inside a character, and a text that stands there.
        ((REGEX, "xy(é|è)z"), b"", "xy"),
        ((REGEX, "(é|è)z"), b"", ""),
        ((REGEX, "😀z"), b"\xf0\x9f", ""),
        # Without an end, or with one far away.
        ((GRAMMAR, 'root ::= "a" root'), b"", "aaaaa"),
        ((REGEX, "a{1000}"), b"", "aaaaa"),
    ],
)
def test_what_a_grammar_forces(backend, spec, before, expected):
    if spec[0] is GRAMMAR and backend is GuidanceBackend:
        pytest.skip("llguidance refuses it, with or without forced tokens")
    tokenizer = tokenizer_of("bytes")
    grammar, manager = grammar_of(backend, tokenizer, *spec)
    # A byte is a token of its own.
    assert grammar.accept_tokens("", [tokenizer.convert_tokens_to_ids(BYTES[b]) for b in before])
    found = forced_tokens.forced_tokens(grammar, manager, {tokenizer.eos_token_id}, 5)
    assert tokenizer.decode(found)[:5] == expected and len(found) <= 5
    # Nothing of the grammar has moved.
    assert forced_tokens.forced_tokens(grammar, manager, {tokenizer.eos_token_id}, 5) == found
    assert grammar.validate_tokens(found) == found


def test_tokens_may_be_written_as_bytes():
    """As tiktoken's are; a grammar may also end with a token that no one has named."""
    written = [b"ab", b"a", b"abc", b"x"]
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [written[i] for i in ids])
    assert forced_tokens._beginning([0, 1, 2], tokenizer, set()) == 1
    assert forced_tokens._beginning([0, 3], tokenizer, set()) is None
    tokenizer = tokenizer_of("bytes")
    grammar, manager = grammar_of(XgrammarBackend, tokenizer, REGEX, "ab")
    found = forced_tokens.forced_tokens(grammar, manager, set(), 9)
    assert grammar.validate_tokens(found) == found and not grammar.is_terminated()


LIMITED = SimpleNamespace(extra_args={"hsd_num_tokens": 1}, all_stop_token_ids={EOS})


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("abcdefgh", {}, 5),
        ("", {}, None),
        ("ab-", {}, 2),
        ("abc", {"is_prefill_chunk": True}, None),
        ("abc", {"is_finished": lambda: True}, None),
        ("abc", {"use_structured_output": False}, None),
        ("abc", {"max_tokens": 10, "num_output_tokens": 7}, 2),
        ("abc", {"max_tokens": 10, "num_output_tokens": 9}, None),
        ("abc", {"sampling_params": LIMITED}, 1),
    ],
)
@pytest.mark.parametrize("reasons", [False, True])
def test_when_tokens_are_forced(text, given, expected, reasons, monkeypatch):
    """By a grammar of letters."""
    monkeypatch.setattr("vllm_hsd.config.platform.read_on_host", lambda: True)
    given_text = TOKENIZER.encode(text, add_special_tokens=False)
    monkeypatch.setattr(forced_tokens, "forced_tokens", lambda *given: given_text[: given[-1]])
    letters = TOKENIZER.encode(text.partition("-")[0], add_special_tokens=False)
    grammar = SimpleNamespace(
        is_terminated=lambda: False, validate_tokens=lambda tokens: tokens[: len(letters)]
    )
    request = {
        "use_structured_output": True,
        "is_prefill_chunk": False,
        "is_finished": lambda: False,
        "structured_output_request": SimpleNamespace(grammar=grammar, reasoning_ended=None),
        "sampling_params": SimpleNamespace(extra_args=None, all_stop_token_ids={EOS}),
        "max_tokens": 50,
        "num_output_tokens": 0,
    }
    manager = SimpleNamespace(
        tokenizer=TOKENIZER, enable_in_reasoning=False, reasoner_cls=object() if reasons else None
    )
    hsd = SimpleNamespace(several_drafts=False, num_speculative_tokens=5)
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(hsd=hsd)),
        requests={"a": SimpleNamespace(**{**request, **given})},
        structured_output_manager=manager,
        dynamic_sd_lookup=None,
    )
    drafts = SimpleNamespace(req_ids=["a", "gone"], draft_token_ids=[[1, 2, 3], [4]])
    found = force(scheduler, drafts)
    if expected is None or reasons:
        assert not found and drafts.draft_token_ids == [[1, 2, 3], [4]]
    else:
        assert len(found["a"]) == expected and drafts.draft_token_ids == [found["a"], [4]]
    assert getattr(scheduler, ATTRIBUTE) == found
    scheduler.dynamic_sd_lookup = [5, 5, 0]  # by requests of a step
    drafts.draft_token_ids = [[], []]
    assert force(scheduler, drafts) == {}
    assert drafts.draft_token_ids == [[], []] and getattr(scheduler, ATTRIBUTE) == {}
