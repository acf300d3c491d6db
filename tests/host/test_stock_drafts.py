"""Our verifier under vLLM's own drafters, with tables in the place of models."""

import importlib
import inspect
import pkgutil
from unittest import mock

import numpy as np
import pytest
import torch
from support.exact_joint_distribution import next_token_distribution
from support.table_drafters import DraftModelSpeculator, tables
from support.table_runner import CASES, TableRunner
from triton.runtime.jit import JITFunction
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.sample import gumbel

from vllm_hsd.cascade.schedule import DRAWS_PER_LENGTH
from vllm_hsd.errors import UserError
from vllm_hsd.host import sampler, stock_drafters
from vllm_hsd.host.read_config import FILTER, REGISTRY
from vllm_hsd.rules import verify_chain
from vllm_hsd.rules.rng import host_uniforms


def runner(params, steps: int = 0, **options):
    target, draft = tables()
    served = TableRunner(target, options.pop("draft", draft), params, length=3, **options)
    for _ in range(steps):
        served.step()
    return served


def host_verdict(case, target, draft, text, drafted, seed):
    """Tokens that the host's verifier emits for one request.

    text: tokens so far; drafted: [K] int64. The uniforms are those of the target's stream.
    """
    prompt, output = text[:1], text[1:]
    rows = []
    for t in range(len(drafted) + 1):
        so_far = [*output, *drafted[:t].tolist()]
        logits = target[(prompt + so_far)[-1]].double().numpy()
        rows.append(next_token_distribution(logits, prompt, tuple(so_far), case, None))
    p = torch.from_numpy(np.stack(rows))
    contexts = torch.tensor([text[-1], *drafted.tolist()[:-1]])
    filters = {k: v for k, v in case.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    proposals = [
        next_token_distribution(row, prompt, (), filters, None)
        for row in draft[contexts].double().numpy()
    ]
    q = torch.from_numpy(np.stack(proposals))
    draws = len(text) * DRAWS_PER_LENGTH + np.arange(len(drafted) + 1)
    uniforms = host_uniforms(np.array([seed]), np.array([1]), draws)
    return verify_chain(p, q, drafted.tolist(), uniforms)[0]


def test_every_verdict_is_that_of_the_hosts_verifier():
    """The same seeds and drafts give the same tokens on the host and by the kernels."""
    cases = list(CASES.values())
    served = runner(cases)
    seeds = served.sampler.sampling_states.seeds.np[served.slots.numpy()].tolist()
    target, draft = tables()
    accepted = []
    for _ in range(5):
        texts, drafted = served.texts(), served.drafted
        output = served.step()
        if drafted is None:
            continue
        for i, case in enumerate(cases):
            count = int(output.num_sampled[i])
            found = output.sampled_token_ids[i, :count].tolist()
            expected = host_verdict(case, target, draft, texts[i], drafted[i], seeds[i])
            assert found == expected, (case, texts[i], drafted[i])
            accepted.append(count - 1)
    assert set(accepted) >= {0, 1, 3}


def test_no_uniform_is_met_twice(monkeypatch):
    met = []

    def sample_row(logits, temperature, seeds, draws, **options):
        met.extend((0, *key) for key in zip(seeds.tolist(), draws.tolist(), strict=True))
        return original_sample(logits, temperature, seeds, draws, **options)

    def verify(*rows, seeds, draws, **options):
        *_, cu, index = rows
        for slot, count in zip(index.tolist(), cu.diff().tolist(), strict=True):
            met.extend((1, int(seeds[slot]), int(draws[slot]) + t) for t in range(count))
        return original_verify(*rows, seeds=seeds, draws=draws, **options)

    original_sample, original_verify = stock_drafters.sample_row, sampler.verify_chain_padded
    monkeypatch.setattr(stock_drafters, "sample_row", sample_row)
    monkeypatch.setattr(sampler, "verify_chain_padded", verify)
    runner([{}] * 5, steps=4)
    assert len(met) == len(set(met)) > 80


def test_logits_are_not_copied_for_temperatures_and_filters(monkeypatch):
    """But for filtered requests with a seed, whose text is to be vLLM's to the last bit."""
    filtered = [{"temperature": 0.7, "top_p": 0.8}, {"min_p": 0.1}, {"top_k": 3}]
    served = runner([*filtered, {"temperature": 0.0}, {}, {"temperature": 0.7, "seed": 1}])
    monkeypatch.setattr(served.sampler, "apply_sampling_params", None)
    for _ in range(3):
        served.step()
    for params in ({"min_p": 0.1, "seed": 1}, {"presence_penalty": 0.5}):
        served = runner([{"temperature": 0.7}, params])
        monkeypatch.setattr(served.sampler, "apply_sampling_params", None)
        with pytest.raises(TypeError):
            served.step()


def test_drafts_are_filtered_as_their_request():
    """Kept rows hold -inf for what no draft may be; greedy and coupled requests keep none."""
    served = runner([{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 2, "seed": 5}], 1)
    draft = served.draft
    before = torch.tensor([text[-1] for text in served.texts()])
    contexts = torch.cat((before[:, None], served.drafted[:, :-1]), 1)
    rows = served.drafter.draft_logits[served.slots]
    drawn = draft[contexts].gather(2, served.drafted[:, :, None])
    kept = rows.isfinite().sum(2)
    assert (kept[0] == 2).all() and (kept[1:3] < len(draft)).any()
    assert rows[:3].gather(2, served.drafted[:3, :, None]).equal(drawn[:3])
    assert (rows[3] == 0).all()
    assert (drawn[3] >= draft[contexts[3]].topk(2).values[:, -1:]).all()


def test_a_request_that_keeps_one_token_is_greedy():
    """Of equal logits vLLM's filter keeps the first one, and ours all."""
    served = runner([{"top_k": 1}, {"top_k": 1, "seed": 3, "temperature": 2.0}, {"top_k": 2}], 1)
    temperature = served.runner.rejection_sampler.parameters.temperature[served.slots]
    assert (temperature == 0).tolist() == [True, True, False]
    assert (served.drafter.draft_logits[served.slots[:2]] == 0).all()


def test_the_verifier_is_given_the_logsumexps_of_kept_rows(monkeypatch):
    """So a verification takes 3 launches and does not read a proposal row to normalize it."""
    given, verify, run = [], sampler.verify_chain_padded, JITFunction.run

    def counted(target, draft, *args, **options):
        given.append((draft, options["draft_lse"]))
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=run) as launched:
            result = verify(target, draft, *args, **options)
        assert launched.call_count == 3
        return result

    monkeypatch.setattr(sampler, "verify_chain_padded", counted)
    served = runner([{"temperature": 0.7}] * 2, steps=2)
    rows, lse = given[-1]
    expected = (rows[served.slots] / 0.7).logsumexp(-1)
    # The rows of the last proposal are newer than those that were verified; both are kept alike.
    assert torch.allclose(lse[served.slots], expected, atol=1e-5)


def test_drafts_that_are_drawn_at_once_are_accepted_where_they_are_the_targets():
    """As by DFlash, at any temperature, with a filter and with a seed."""
    rows = torch.tensor([0.5, 0.2, 1.0, 0.0, 0.3, 0.1]).repeat(6, 1)
    params = [{}, {"temperature": 0.7, "top_k": 3}, {"seed": 3}, {"temperature": 0.0}]
    served = TableRunner(rows, rows, params, length=3, drafter="DFlashSpeculator")
    for _ in range(5):
        served.step()
    assert served.accepted == served.verified > 0
    assert len({tuple(text) for text in served.texts()}) > 2


@pytest.mark.parametrize("row", [float("nan"), float("inf"), -float("inf")])
def test_invalid_rows_end_in_token_0(row):
    served = runner([{}, {"temperature": 0.0}, {"top_p": 0.9}], steps=1)
    output = served.step(logits=lambda tokens: torch.full((len(tokens), 6), row))
    assert output.num_sampled[0] == output.num_sampled[2] == 1
    assert output.sampled_token_ids[[0, 2], 0].tolist() == [0, 0]
    assert output.num_sampled[1] >= 1
    served.step()


@pytest.mark.parametrize("other", [{}, {"repetition_penalty": 1.1}, {"seed": 1, "top_p": 0.9}])
def test_top_p_holds_at_a_low_temperature_whatever_else_is_in_the_batch(other):
    """vLLM's Triton kernel, which filters rows that vLLM processes, keeps all tokens there."""
    REGISTRY.place(FILTER)
    target, _ = tables(vocabulary=600)
    target = 2.5 * target
    # Of .40, .33 and .27, and nothing else: two are kept.
    target[:, :3] = torch.tensor([12.0, 11.98, 11.96])
    served = TableRunner(target, target, [{"temperature": 0.1, "top_p": 0.5}, other], length=3)
    for _ in range(10):
        served.step()
    text = served.texts()[0][1:]
    assert len(text) >= 10 and set(text) == {0, 1}


def test_the_sampler_ends_a_draft_after_the_refused_token():
    served, verify = runner([{}] * 4, steps=1), sampler.verify_chain_padded
    # Acceptable draft tokens: 0, 1, 2 and 3 (all).
    invalid = torch.arange(4)[None, :] > torch.tensor([0, 1, 2, 3])[:, None]
    with mock.patch.object(sampler, "verify_chain_padded", wraps=verify) as verified:
        served.step(invalid.flatten())
    _, _, tokens, *_ = verified.call_args.args
    assert (tokens.view(4, 4)[:, 1:] >= 0).sum(1).tolist() == [1, 2, 3, 3]


def own_rows(served):
    """A drafter equal to the target that draws and writes its rows without `sample_draft`."""
    generator, rows = torch.Generator().manual_seed(0), served.drafter.draft_logits

    def propose(*_):
        token, columns = served.states.last_sampled_tokens[served.slots, 0], []
        for step in range(served.length):
            rows[served.slots, step] = served.target[token]
            probs = served.target[token].softmax(-1)
            token = torch.multinomial(probs, 1, generator=generator)[:, 0]
            columns.append(token)
        served.drafted = torch.stack(columns, 1)

    served.propose = propose
    for _ in range(8):
        served.step()
    return served


@pytest.mark.parametrize("name", ["DFlash2Speculator", "LiLiCorrSpeculator"])
def test_rows_that_a_drafter_writes_itself_are_those_that_are_verified(name):
    target, _ = tables()
    given = {"params": [{"temperature": 1.0}] * 6, "draft": target, "drafter": name}
    if hasattr(gumbel, "spec_step_seed"):
        served = own_rows(runner(**given))
        assert served.accepted == served.verified > 0
        return
    with pytest.raises(UserError, match=f"{name} draws from: set draft_sample_method .* or vLLM"):
        runner(**given)
    assert runner(**given, keeps_rows=False).drafter.draft_logits is None


def test_no_draft_token_is_accepted_whose_row_was_not_kept():
    target, _ = tables()
    served = own_rows(runner([{"temperature": 1.0}] * 6, draft=target))
    assert served.accepted == 0 < served.verified


def names_of(code) -> set[str]:
    """Names that a function's code reads, those of the functions in it included."""
    inner = [each for each in code.co_consts if isinstance(each, type(code))]
    return set(code.co_names).union(*map(names_of, inner))


def drawing(speculator: type) -> set[str]:
    """Names that the methods of a drafter read, but for `sample_draft` itself."""
    methods = [getattr(speculator, name) for name in dir(speculator) if name != "sample_draft"]
    return set().union(*(names_of(m.__code__) for m in methods if inspect.isfunction(m)))


def test_of_every_drafter_of_vllm_it_is_known_how_it_draws():
    """One that a release adds, or changes, is kept out by name until it is read."""
    found = {}
    for module in pkgutil.walk_packages(spec_decode.__path__, spec_decode.__name__ + "."):
        for each in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(each) and issubclass(each, DraftModelSpeculator):
                found[each.__name__] = drawing(each)
    abstract = {"DraftModelSpeculator", "AutoRegressiveSpeculator", "TargetDependentARSpeculator"}
    draws = {name for name, names in found.items() if "sample_draft" in names} - abstract
    assert draws == set(stock_drafters._SAMPLED)
    noise = {"gumbel_sample", "gumbel_noised_argmax", "multinomial", "exponential_"}
    assert not any(found[name] & noise for name in draws)
    own = {name for name, names in found.items() if "candidate_sampler" in names}
    assert own == set(stock_drafters._OWN_ROWS)
