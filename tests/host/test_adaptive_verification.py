"""vLLM's adaptive verification over our drafters and verifier, with tables for models."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from oracle.distributions import chain_distribution
from oracle.exact import Choices, Table, Tokens, deviation, extended
from oracle.test_program_exact import Chosen, exact_engine, proposed
from support.exact_joint_distribution import chi_square_p_value
from support.programs import MAX_NUM_REQS
from support.table_drafters import DraftModelSpeculator, TableDrafter, cascade, tables
from support.table_runner import OnlineAcceptanceEstimator, TableRunner, joint
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from vllm_hsd.cascade.adaptive_verification import MOST, BoundedConfidence, DraftConfidence
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.host.cascade_sampler import serve
from vllm_hsd.host.head_sources import with_lookups


@pytest.fixture(autouse=True)
def without_a_gpu() -> Iterator[None]:
    """Streams and events, which order copies, do nothing, and nothing is compiled."""
    nothing = mock.MagicMock()
    names = dict.fromkeys(("Stream", "Event", "current_stream", "set_stream"), nothing)
    plain = adaptive_verification._assign_draft_token_budget
    with (
        mock.patch.multiple(torch.cuda, **names),
        mock.patch.object(adaptive_verification, "_assign_draft_token_budget_compiled", plain),
    ):
        yield


class AdaptiveTableRunner(TableRunner):
    """A `TableRunner` whose drafts vLLM's manager cuts.

    `admits` draft tokens of a step cost nothing; further ones cost more than they give.
    """

    def __init__(self, *args, admits: int, **options) -> None:
        super().__init__(*args, adapts=True, **options)
        self.manager = adaptive_verification.AdaptiveVerificationManager(
            self.states,
            torch.zeros(self.count + 1, dtype=torch.int32),
            num_bonus_tokens=1,
            max_total_logits=self.count * (self.length + 1),
        )
        tokens = self.count * (self.length + 1)
        dear = self.count + admits + 1
        self.manager.cost_tables = adaptive_verification.build_cost_tables_from_curves(
            [(self.count, 0.0)], [(dear - 1, 1.0), (dear, 1e6), (tokens, 1e6)], self.count, tokens
        )
        for slot in self.slots.tolist():
            self.manager.add_request(slot)
        # Draft tokens of each request that the last step verified.
        self.admitted = torch.zeros(self.count, dtype=torch.int64)

    def input_batch(self) -> SimpleNamespace:
        """As the base's, with as many draft tokens of each request as are admitted."""
        if self.drafted is None:
            return super().input_batch()
        requests, longest = [str(i) for i in range(self.count)], self.drafted.shape[1]
        drafts = np.full(self.count, longest, dtype=np.int32)
        self.manager.get_num_tokens(
            dict.fromkeys(requests, longest + 1), {each: [-1] * longest for each in requests}
        )
        # On the host they are spread evenly, or as they were before.
        _, host_starts = self.manager.compact_batch(
            drafts, drafts + 1, np.arange(self.count + 1, dtype=np.int32) * (longest + 1)
        )
        # vLLM 0.33 adds what the host may know.
        starts, queries, *_ = self.manager.reallocate_drafts(requests, self.slots)
        self.admitted = starts.diff().long() - 1
        tokens = torch.cat((self.states.last_sampled_tokens[self.slots], self.drafted), 1)
        return self.batch_of(tokens, starts, host_starts, queries[: self.count + 1])

    def propose(self, *num_tokens: torch.Tensor) -> None:
        """As the base's, between what vLLM's runner does for adaptive verification."""
        DraftModelSpeculator.observe_verification(self.drafter, self.slots, *num_tokens)
        super().propose(*num_tokens)
        batch = SimpleNamespace(num_reqs=self.count, idx_mapping=self.slots)
        self.manager.record_confidences(self.drafter.draft_token_confidence_probs, batch)


def runner(params, name=None, *, admits):
    """Drafts of four tokens of a cascade; without its name of vLLM's drafter."""
    options = {} if name is None else {"cascade": cascade(name), "prompt_length": 4}
    return AdaptiveTableRunner(*tables(), params, length=4, admits=admits, **options)


def highest(name: str | None) -> torch.Tensor:
    """The table that the tokens of the highest level are drawn from."""
    level = {} if name is None else cascade(name)["levels"][-1]
    return level.get("model", tables()[1])


# What the estimator starts with, for a row whose likeliest token has even odds.
UNMEASURED = float(torch.tensor(-0.2).sigmoid())


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize(
    ("name", "measured"),
    [
        *((name, "all") for name in (None, "one", "three", "entropy", "sources")),
        *((name, "some") for name in ("unverified", "horizontal")),
        ("choice", "greedy"),
        ("lookup alone", "none"),
    ],
)
def test_a_confidence_goes_by_the_row_and_never_by_the_token(name, measured, temperature):
    served = runner([{"temperature": temperature}] * 40, name, admits=80)
    served.step()
    state, kinds = getattr(served.drafter, "state", None), set()
    for _ in range(8):
        probs = served.drafter.draft_token_confidence_probs[: served.count].tolist()
        lengths = [4] * served.count if state is None else state.draft_length.tolist()
        for text, row, length, drafted in zip(
            served.texts(), probs, lengths, served.drafted.tolist(), strict=False
        ):
            assert row[length:] == [0.0] * (4 - length)
            for before, prob in zip([text[-1], *drafted], row[:length], strict=False):
                odds = (highest(name)[before] / (temperature or 1.0)).softmax(0).amax().logit()
                of_row = float((0.5 * odds - 0.2).sigmoid())
                kinds.add(abs(prob - of_row) < 1e-5)
                assert abs(prob - of_row) < 1e-5 or prob == pytest.approx(UNMEASURED)
        served.step()
    if measured == "greedy":  # above it no lookup is chosen here
        measured = "all" if temperature else "some"
    assert kinds == {"all": {True}, "some": {True, False}, "none": {False}}[measured]


def model(length: int, generator: torch.Generator) -> dict[tuple[int, ...], torch.Tensor]:
    """Prefix of at most `length` of 3 tokens -> float64 [3], a row."""
    prefixes = [p for n in range(length + 1) for p in itertools.product(range(3), repeat=n)]
    rows = torch.rand(len(prefixes), 3, generator=generator, dtype=torch.float64) ** 2
    return dict(zip(prefixes, rows / rows.sum(1, keepdim=True), strict=True))


def emitted(target, draft, tokens, length: int) -> torch.Tensor:
    """[27] distribution of the first three tokens of a request whose draft ends at a length."""
    rows = torch.stack([target[tokens[:i]] for i in range(length + 1)])
    proposals = torch.stack([draft[tokens[:i]] for i in range(length)]) if length else rows[:0]
    found = chain_distribution(rows, proposals, torch.tensor(tokens[:length], dtype=torch.int64))
    begun = {(*tokens[:t], v): float(p) for (t, v), p in np.ndenumerate(found.numpy())}
    whole = extended(begun, lambda text: target[text].tolist(), 3)
    texts = itertools.product(range(3), repeat=3)
    return torch.tensor([float(whole[text]) for text in texts], dtype=torch.float64)


def bias(rule, budget: int) -> float:
    """Total variation distance of the joint text of two requests whose drafts share a budget."""
    generator = torch.Generator().manual_seed(5)
    models = [(model(2, generator), model(1, generator)) for _ in range(2)]
    drafts = list(itertools.product(range(3), repeat=2))
    memory = {
        (r, tokens, n): emitted(*models[r], tokens, n)
        for r, tokens, n in itertools.product(range(2), drafts, range(3))
    }
    found = torch.zeros(27, 27, dtype=torch.float64)
    for pair in itertools.product(drafts, repeat=2):
        rows = [
            [draft[t[:i]] for i in range(2)] for (_, draft), t in zip(models, pair, strict=True)
        ]
        weight = np.prod([float(rows[r][i][pair[r][i]]) for r in range(2) for i in range(2)])
        probs = torch.tensor([[rule(rows[r][i], pair[r][i]) for i in range(2)] for r in range(2)])
        admitted = torch.full((2,), 2, dtype=torch.int32)
        share = adaptive_verification._assign_draft_token_budget
        share(probs.float(), torch.arange(2), admitted, budget, 2)
        one, other = (memory[r, pair[r], int(admitted[r])] for r in range(2))
        found += weight * one[:, None] * other
    exact = [emitted(target, draft, (0, 0), 0) for target, draft in models]
    return float((found - exact[0][:, None] * exact[1]).abs().sum() / 2)


def of_row(row, token) -> float:
    return float(row.amax())


def of_token(row, token) -> float:
    """What must not be."""
    return float(row[token])


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_shared_budgets_leave_the_joint_text_of_requests_exact(budget):
    assert bias(of_row, budget) < 1e-12
    # Negative control.
    assert bias(of_token, budget) > 1e-3


def p_value(name, *, by_token=False, count=300) -> float:
    """Of three tokens after the prompt, where three of eight draft tokens are admitted."""
    served = runner([{}] * count, name, admits=3 * count // 2)
    record, prompt, uneven = served.manager.record_confidences, 1 if name is None else 4, False

    def recorded(probs, batch):
        before = [text[-1] for text in served.texts()]
        contexts = torch.cat((torch.tensor(before)[:, None], served.drafted[:, :-1]), 1)
        rows = highest(name)[contexts].softmax(-1)
        record(rows.gather(2, served.drafted[:, :, None])[:, :, 0], batch)

    if by_token:
        # Confidences are what the tokens' own probabilities are.
        served.manager.record_confidences = recorded
    while min(map(len, served.texts())) < prompt + 3:
        served.step()
        uneven |= len(set(served.admitted.tolist())) > 1
    assert uneven
    texts = [tuple(text[prompt : prompt + 3]) for text in served.texts()]
    return chi_square_p_value(texts, joint({}, 3))


@pytest.mark.parametrize("name", [None, "two", "choice", "horizontal"])
def test_text_follows_the_target(name):
    assert p_value(name) > 1e-6


@pytest.mark.parametrize("name", [None, "one"])
def test_confidences_of_the_tokens_themselves_are_caught(name):
    """Negative control of the comparison above."""
    assert p_value(name, by_token=True, count=800) < 1e-6


def test_what_fills_a_draft_up_was_not_rejected():
    """The estimator learns from tokens alone, and not from those that the manager left out."""
    served = runner([{"temperature": 0.8}] * 40, "entropy", admits=60)
    estimator, judged = served.drafter.confidence.estimator, torch.zeros(4)
    served.step()
    for _ in range(3):
        lengths = served.drafter.state.draft_length[: served.count].clone()
        accepted = served.step().num_sampled.clone() - 1
        verified = torch.minimum(served.admitted, lengths)
        assert (accepted <= verified).all() and (verified < 4).any()
        seen = torch.minimum(accepted + 1, verified)
        judged += (seen[:, None] > torch.arange(4)).sum(0)
        assert estimator.counts.equal(judged)


def head_next_to_lookups(served):
    """A drafter of vLLM's, of tables, next to an n-gram lookup, in the place of the runner's."""

    class EagleSpeculator(TableDrafter):
        __module__ = "vllm.tables"

        def __init__(self, vllm_config, device):
            super().__init__(served.count, 4, len(served.draft), keeps_rows=True)
            self.num_speculative_steps, self.max_num_reqs = 4, served.count
            self.vocab_size, self.max_model_len, self.device = len(served.draft), 64, device
            self.draft_tokens = torch.zeros(served.count, 4, dtype=torch.int64)

        def propose(self, *_, num_speculative_tokens, **__):
            assert num_speculative_tokens in (0, 1, 4)
            return self.draft_tokens

    sources = [{"ngram": {"max": 2}}, {"eagle3": "head"}]
    given = {"num_speculative_tokens": 4, "levels": [{"sources": sources}]}
    level = CascadeConfig.parse(given).levels[0]
    config = SimpleNamespace(speculative_config=SimpleNamespace(hsd_sources=level))
    return with_lookups(EagleSpeculator)(config, torch.device("cpu"))


def test_lookups_next_to_a_head_take_its_confidences_away():
    served = TableRunner(*tables(), [{}] * 2, length=4, ours=False, prompt_length=4)
    drafter = head_next_to_lookups(served)
    drafter.acceptance_estimator = object()
    served.runner.speculator = drafter
    serve(served.runner)
    confidence = drafter.acceptance_estimator
    assert type(confidence) is DraftConfidence
    confidence.estimator.predictions.fill_(0.9)
    # The lookup drafts for the first request, of whose head nothing more is expected.
    drafter.lookup.own[0, 1, served.slots[0]] = -float(drafter.lookup.prior)
    served.states.all_token_ids.gpu[served.slots[1], :4] = torch.arange(4, dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=2, has_prefill=False, idx_mapping=served.slots, idx_mapping_np=served.slots.numpy()
    )
    sampled = torch.ones(2, dtype=torch.int32)
    drafter.propose(batch, {}, {}, None, None, sampled)
    assert drafter.lookup.drawn[served.slots].tolist() == [0.0, 1.0]
    first, second = drafter.draft_token_confidence_probs[:2]
    assert first[0] == pytest.approx(UNMEASURED) and second[0] == pytest.approx(0.9)
    # The first slot has a new request in a step that drafts nothing.
    batch.has_prefill, batch.is_prefilling_np = True, np.array([True, False])
    drafter.lookup.own[:, :, served.slots] = 1.0
    drafter.propose(batch, {}, {}, None, None, sampled, num_speculative_tokens=0)
    assert drafter.lookup.own[:, :, served.slots].sum((0, 1)).tolist() == [0.0, 4.0]


def program_bias(lengths, by_token=False, **keys) -> tuple[Fraction, set[int]]:
    """Total variation distance of a step whose draft ends where its product falls to 0.3.

    And how many tokens of drafts were left out, over all draws.
    """
    engine = exact_engine(lengths, vocabulary=2, **keys)
    longest, target = engine.schedule.num_speculative_tokens, Table(2, 1)
    estimator = OnlineAcceptanceEstimator(MAX_NUM_REQS + 1, longest, torch.device("cpu"))
    confidence = DraftConfidence(estimator, engine.state.lengths_of)
    engine.program.confidence, chosen, left_out = confidence, Chosen(engine), set()
    probs, slots = torch.zeros(1, longest), engine.index.long()

    def generate(choices: Choices) -> Tokens:
        chosen.begin(choices)
        confidence.begin(slots, torch.ones(MAX_NUM_REQS))
        [draft] = engine.propose()
        confidence.publish(probs, slots)
        if by_token:
            rows = proposed(engine.state.rows[-1][0], draft, 2)
            drawn = [float(row[token]) for row, token in zip(rows, draft, strict=True)]
            probs[0, : len(draft)] = torch.tensor(drawn)
        kept = int((probs[0].cumprod(0) > 0.3).sum())
        left_out.add(len(draft) - kept)
        accepted, token = chosen.target_step(target, draft[:kept], "block")
        return (*draft[:accepted], token)

    with chosen.draws():
        return deviation(generate, target, 4), left_out


@pytest.mark.parametrize(
    ("lengths", "keys"), [((3,), {}), ((1, 3), {}), ((1, 3), {"horizontal_tokens": 1})]
)
def test_drafts_of_the_program_that_end_by_confidence_leave_the_text_exact(lengths, keys):
    found, left_out = program_bias(lengths, **keys)
    assert found == 0 and len(left_out) > 1


@pytest.mark.parametrize("lengths", [(3,), (1, 3)])
def test_drafts_of_the_program_that_end_by_their_tokens_do_not(lengths):
    """Negative control."""
    assert program_bias(lengths, by_token=True)[0] > Fraction(1, 1000)


def test_log_probabilities_of_listed_tokens_are_those_of_admitted_places():
    params = [{"temperature": 0.8, "logprobs": 1}] * 5
    served = runner([*params, {"temperature": 0.8, "logprob_token_ids": [2, 4]}], "two", admits=9)
    for _ in range(3):
        before, drafted = served.texts(), served.drafted
        output = served.step()
    found = output.logprobs_tensors
    starts = found.cu_num_generated_tokens_tensor.tolist()
    assert starts == [0, *(served.admitted + 1).cumsum(0).tolist()]
    assert len(set(served.admitted.tolist())) > 1
    contexts = [before[-1][-1], *drafted[-1, : served.admitted[-1]].tolist()]
    rows = served.target[contexts].log_softmax(-1)
    at = starts[-2]
    for i in range(int(output.num_sampled[-1])):
        listed = found.logprob_token_ids[at + i].tolist().index(4)
        assert float(found.logprobs[at + i, listed]) == pytest.approx(float(rows[i, 4]), abs=1e-4)


@pytest.mark.parametrize("longest", [1, 8, 63])
def test_products_of_confidences_fall_strictly(longest):
    """No two places of a draft are alike, so that none decides for one before it."""
    bounded = BoundedConfidence(OnlineAcceptanceEstimator(1, longest, torch.device("cpu")))
    for prob in (bounded.least, MOST):
        products = torch.full((longest,), prob, dtype=torch.float32).cumprod(0)
        assert (products.diff() < 0).all() and 0 < products[-1] <= products[0] < 1
