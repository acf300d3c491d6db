"""Sources on the device against `tools.planner.lookup_choice`, step by step on growing texts."""

from functools import partial

import numpy as np
import pytest
import torch
from support.marks import slow
from support.proposal_states import MAX_NUM_REQS
from support.suffix_requests import Requests, markov, store_of

from vllm_hsd.budget.constants import FIRST_PAUSE, PRIOR_ACCEPTANCE
from vllm_hsd.budget.further_passes import FurtherPasses
from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.budget.trials import Trials
from vllm_hsd.cascade.bigram import successors
from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.cascade.lookups import lookup_bigram, lookup_ngram
from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.cascade.text_store import collect_texts
from vllm_hsd.levels.ngram import NgramLevelConfig
from vllm_hsd.tools.lookup_level import LookupLevel, Texts
from vllm_hsd.tools.planner.bigram_levels import BigramLevel
from vllm_hsd.tools.planner.lookup_choice import LookupChoice
from vllm_hsd.tools.planner.prompt_lookup import PromptLookup
from vllm_hsd.tools.planner.suffix_level import SuffixLevel

LENGTH, VOCABULARY = 6, 12


class Host:
    """`tools.planner.lookup_choice` for all requests."""

    def __init__(self, lookups) -> None:
        self.choice = LookupChoice(lookups, 0.05, MAX_NUM_REQS)
        # Drafts for which the last source, had it offered all that was requested, was best.
        self.wanted = 0

    def draft(self, requests: Requests) -> list[list[int]]:
        rows = np.flatnonzero(requests.requested)
        slots, ends, most = rows, requests.ends[rows], requests.requested[rows]
        self.choice.read(Texts(requests.tokens, rows, slots, requests.committed[rows]))
        found = self.choice.lookup(Texts(requests.tokens, rows, slots, ends), most)
        whole = np.stack([*self.choice.counts[:-1, slots], most])
        best, _ = self.choice.best(slots, whole, most)
        self.wanted += int((best == len(self.choice.lookups) - 1).sum())
        drafts: list[list[int]] = [[] for _ in requests.requested]
        for b, token_ids, count in zip(rows, found.token_ids, found.counts, strict=True):
            drafts[b] = token_ids[:count].tolist()
        return drafts


def lookups(stored):
    """The same three on the device and on the host."""
    texts, store = store_of(*stored, vocabulary=VOCABULARY), collect_texts(stored, VOCABULARY)
    following, probs = map(torch.from_numpy, successors(store))
    ngram = NgramLevelConfig(ngram={"max": 3})
    on_device = [
        (partial(lookup_ngram, shortest=1, longest=3), ngram.estimates("cpu")),
        (SuffixLookup(texts, 0.05, torch.device("cpu")), None),
        (lambda state, text: lookup_bigram(state, following), Estimates(probs, by_token=True)),
    ]
    return on_device, [PromptLookup(1, 3), SuffixLevel(texts, 0.05), BigramLevel(store)]


def sources(on_device):
    return SourcesLookup(on_device, 0.05, MAX_NUM_REQS, LENGTH, torch.device("cpu"))


def drafts_of(state, ends) -> list[list[int]]:
    each = enumerate(zip(ends.tolist(), state.drafted[0].tolist(), strict=True))
    return [state.window[b, end : end + count].tolist() for b, (end, count) in each]


def assert_learned(device: SourcesLookup, host: Host) -> None:
    """Of four requests."""
    learned, slots = host.choice.acceptance, MAX_NUM_REQS - 1 - np.arange(4)
    np.testing.assert_allclose(device.shared.numpy(), learned.shared, rtol=1e-12)
    np.testing.assert_allclose(device.own.numpy()[..., slots], learned.own[..., :4], rtol=1e-12)


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_choice_and_what_it_learns_are_the_hosts(seed):
    """With unverified ends, requests that sit out a step, and one whose slot is given away."""
    rng = np.random.default_rng(seed)
    on_device, plain = lookups([markov(rng, 60, VOCABULARY) for _ in range(3)])
    device, host = sources(on_device), Host(plain)
    texts = [markov(rng, int(rng.integers(4, 30)), VOCABULARY) for _ in range(4)]
    chosen = []
    for step in range(14):
        unverified = [rng.integers(0, VOCABULARY, int(rng.integers(0, 2))) for _ in texts]
        requested = rng.integers(0, LENGTH + 1, 4) * (rng.random(4) < 0.9)
        requested[step % 4] = LENGTH
        requests = Requests(list(zip(texts, unverified, strict=True)), requested, LENGTH)
        if step == 9:
            texts[2] = markov(rng, 9, VOCABULARY)
            requests = Requests([(text, []) for text in texts], requested, LENGTH)
            device.forget(torch.tensor([MAX_NUM_REQS - 3]))
            host.choice.forget(2)
        ends = requests.state.end.clone()
        device(requests.state, requests.text)
        drafts = host.draft(requests)
        assert drafts_of(requests.state, ends) == drafts
        assert requests.state.end.sub(ends).equal(requests.state.drafted[0])
        for b in np.flatnonzero(requested):
            # Mostly the text goes on as it was drafted.
            kept = drafts[b][: rng.integers(0, len(drafts[b]) + 1)]
            texts[b] = np.append(texts[b], [*kept, rng.integers(VOCABULARY)])
            chosen.append(len(drafts[b]))
        requests.guarded.assert_guards()
        assert_learned(device, host)
    # Every lookup was right and wrong, and none is always the choice.
    assert (device.shared.sum((2, 3)) > 0).all() and len(set(chosen)) > 3


@pytest.mark.every_kernel
def test_another_rule_is_caught():
    """Negative control of the comparison above: what is learned is left out."""
    rng = np.random.default_rng(0)
    on_device, plain = lookups([markov(rng, 60, VOCABULARY) for _ in range(3)])
    device, host = sources(on_device), Host(plain)
    text = markov(rng, 25, VOCABULARY)
    differ = 0
    for _ in range(10):
        device.own.zero_()
        device.shared.zero_()
        requests = Requests([(text, [])], [LENGTH], LENGTH)
        device(requests.state, requests.text)
        differ += int(requests.state.drafted[0, 0]) != len(host.draft(requests)[0])
        text = np.append(text, [rng.integers(VOCABULARY)])
    assert differ


class Drawn(LookupLevel):
    """What a drafter has drawn in a step, `longest` tokens at most, known by its places alone."""

    def draw(self, rng, requests: Requests, longest: int) -> None:
        self.longest = longest
        self.token_ids = rng.integers(0, 3, (len(requests.requested), LENGTH))

    def lookup(self, texts, requested) -> LookupResult:
        rows, width = texts.rows, int(requested.max(initial=0))
        confidence = np.cumprod(np.full((len(rows), width), PRIOR_ACCEPTANCE), axis=1)
        counts = np.minimum(requested, self.longest)
        return LookupResult(self.token_ids[rows, :width], counts, confidence)


@pytest.mark.every_kernel
def test_a_drafter_is_one_more_source():
    """Known by what was verified of it, of greedy and coupled requests also where it was not."""
    rng = np.random.default_rng(0)
    (ngram, *_), _ = lookups([markov(rng, 60, VOCABULARY) for _ in range(3)])
    cpu, drawn = torch.device("cpu"), Drawn()
    device = SourcesLookup([ngram], 0.05, MAX_NUM_REQS, LENGTH, cpu, has_drafter=True)
    host = Host([PromptLookup(1, 3), drawn])
    texts = [rng.integers(0, 3, int(rng.integers(4, 20))) for _ in range(4)]
    temperature = torch.tensor([0.0, 1.0, -1.0, 0.7])
    chosen = set()
    for step in range(20):
        requests = Requests([(text, []) for text in texts], [LENGTH, LENGTH, LENGTH, 3], LENGTH)
        state, ends = requests.state, requests.state.end.clone()
        # Of its first pass alone in some steps.
        drawn.draw(rng, requests, 1 if step % 3 else LENGTH)
        state.temperature[0] = temperature
        device.offer(state, requests.text)
        assert state.end.equal(ends) and not state.drafted.any()
        for b, most in enumerate(np.minimum(requests.requested, drawn.longest).tolist()):
            state.window[b, ends[b] : ends[b] + most] = torch.from_numpy(drawn.token_ids[b, :most])
            state.end[b] += most
            state.drafted[0, b] = most
        device.choose(state)
        drafts = host.draft(requests)
        assert drafts_of(state, ends) == drafts and int(device.wanted) == host.wanted
        for b, draft in enumerate(drafts):
            is_drawn = bool(device.drawn[MAX_NUM_REQS - 1 - b])
            assert not is_drawn or draft == drawn.token_ids[b, : len(draft)].tolist()
            if temperature[b] > 0:
                host.choice.counts[1, b] = len(draft) if is_drawn else 0
            chosen.add((b, is_drawn))
            # The drafter is wrong more often than it is taken for before.
            texts[b] = np.append(texts[b], [*([] if is_drawn else draft), rng.integers(3)])
        requests.guarded.assert_guards()
        assert_learned(device, host)
    assert len(chosen) > 6, chosen
    assert 0 < host.wanted < 20 * 4


def test_passes_go_by_counts_that_are_two_steps_old():
    """No step waits for a younger one."""

    class Event:
        recorded = None

        def record(self):
            self.recorded = step

        def synchronize(self):
            assert self.recorded == (step - 2 if step > 1 else None)

    wanted = torch.zeros(1, dtype=torch.int64)
    further = FurtherPasses(wanted)
    further.arrived, further.trials = [Event() for _ in further.copies], Trials(1, steps=2)
    runs = []
    for step in range(FIRST_PAUSE + 40):
        if further.due():
            runs.append(step)
        wanted += step in (10, 20, 21, 22)
    trial = 25 + FIRST_PAUSE
    assert runs == [0, 1, 13, 23, 24, 25, trial + 1, trial + 2]
