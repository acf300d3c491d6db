"""Orders and scores by q / p: exact for every token, and what their checks find."""

import numpy as np
import pytest
import torch

from vllm_hsd.tools.audit import directions
from vllm_hsd.tools.audit.directions import BEFORE, FAULTS, SCORE, SHIFTS, THIRD, VARIANCE, marks
from vllm_hsd.tools.audit.lean import enough, factors, lean_checks
from vllm_hsd.tools.audit.statistics import Check, needed

CASES = {
    "all tokens": (lambda p, g: torch.rand(len(p), generator=g), 12),
    "the likeliest": (lambda p, g: torch.rand(len(p), generator=g) ** 3, 4),
    "ties with the rest": (lambda p, g: p * (0.95 + 0.1 * torch.rand(len(p), generator=g)), 5),
    "a point mass": (lambda p, g: torch.eye(len(p))[3], 1),
    "the same": (lambda p, g: p.clone(), 12),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_marks_of_every_token(name, masked):
    make, width = CASES[name]
    g = torch.Generator().manual_seed(1)
    p = torch.rand(12, generator=g)
    p[[2, 7]] *= not masked
    p /= p.sum()
    q = make(p, g)
    q /= q.sum()
    probs, ids = q.topk(width)
    likeliest = torch.stack((ids.float(), probs)).repeat(12, 1, 1).numpy()
    found = marks(p.expand(12, -1), torch.arange(12), likeliest)
    own = p.double().numpy()
    # What is before the tokens, and the tokens themselves, fill [0, 1] without gaps.
    order = found[:, BEFORE].argsort(kind="stable")
    order = order[own[order] > 0]
    edges = np.concatenate(([0], own[order].cumsum()))
    assert found[order, BEFORE] == pytest.approx(edges[:-1], abs=1e-6)
    score = found[:, SCORE]
    assert (own * score).sum() == pytest.approx(0, abs=1e-6)
    for power, column in ((2, VARIANCE), (3, THIRD)):
        assert found[:, column] == pytest.approx((own * score**power).sum(), abs=1e-6)
    # q in place of p, and everything accepted, are the same fault.
    shifts = found[0, SHIFTS : SHIFTS + FAULTS]
    everything = 1 + directions.OVER.index(np.inf)
    assert shifts[0] == pytest.approx(shifts[everything])
    assert shifts[0] == pytest.approx((q.double().numpy() * score).sum(), abs=1e-5) or masked
    assert (shifts[: 1 + len(directions.OVER)] >= -1e-6).all()
    assert (shifts[1 + len(directions.OVER) :] <= 1e-6).all()


def test_unknown_rows_are_left_out():
    unknown = np.full((1, 2, 4), -1, dtype=np.float32)
    assert np.isnan(marks(torch.full((1, 5), 0.2), torch.tensor([1]), unknown)).all()


def texts(seed: int, share: float) -> np.ndarray:
    """Marks of 4,000 tokens, of which `share` are drawn from q in place of p."""
    g = torch.Generator().manual_seed(seed)
    p, q = torch.softmax(torch.randn(2, 4000, 9, generator=g), -1)
    use = torch.where(torch.rand(4000, 1, generator=g) < share, q, p)
    tokens = torch.multinomial(use, 1, generator=g)[:, 0]
    return marks(p, tokens, directions.rows_of(q.log()))


def lean(found: np.ndarray, share: float = 1.0) -> Check:
    """The only check of marks of one place."""
    (check,) = lean_checks("", "q", found, np.full(len(found), "1", dtype=object), share)
    return check


def test_p_values_of_sound_text_are_uniform_and_a_detectable_share_is_found():
    p_values = [lean(texts(seed, 0)).p_value for seed in range(40)]
    assert np.quantile(p_values, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.2)
    check = lean(texts(0, 0))
    least = check.detectable(1e-6)
    share = least / check.faults[0][1]
    found = [lean(texts(seed, share)) for seed in range(10)]
    assert max(each.p_value for each in found) < 1e-5
    assert np.mean([each.shift for each in found]) == pytest.approx(least, rel=0.1)
    above, below = factors(check, 1e-6)
    assert 1 < above < 2 and 0.5 < below < 1 and needed(1e-6) == pytest.approx(7.22, abs=0.01)


@pytest.mark.parametrize(("likely", "places"), [(0.02, 1500), (0.1, 500), (0.1, 4000)])
def test_as_much_is_found_of_a_lookup_whose_tokens_are_unlikely(likely, places):
    """Its scores are skewed, and vary more where a fault takes its tokens."""
    probs = torch.full((places, 8), (1 - likely) / 7)
    probs[:, 0] = likely
    rows = np.tile(np.array([[0], [1]], dtype=np.float32), (places, 1, 1))
    kinds = [marks(probs, torch.full((places,), token), rows) for token in (0, 1)]
    rng = np.random.default_rng(0)

    def drawn(share: float) -> Check:
        taken = rng.random(places) < share + (1 - share) * likely
        return lean(np.where(taken[:, None], *kinds))

    check = drawn(0.0)
    share = check.detectable(1e-6) / check.faults[0][1]
    assert share < 0.2
    # Of 200 runs with probability .99: fewer than 193 with probability 1e-3.
    assert sum(drawn(share).p_value < 1e-6 for _ in range(200)) >= 193


def test_nothing_can_lean_to_a_drafter_that_is_the_target():
    p = torch.softmax(torch.randn(500, 9), -1)
    tokens = torch.multinomial(p, 1)[:, 0]
    check = lean(marks(p, tokens, directions.rows_of(p.log())))
    assert not check.faults and check.p_value == 1 and check.detectable(1e-6) == np.inf
    # Nor is anything missed.
    assert enough(check, 1e-6)


def test_power_is_that_of_the_drafted_places():
    found = texts(0, 0)
    every, few = lean(found), lean(found, share=0.1)
    assert few.detectable(1e-6) == pytest.approx(10 * every.detectable(1e-6))
    assert enough(every, 1e-6) and not enough(few, 1e-6)
    found[100:] = np.nan
    known = lean(found)
    assert known.num_tokens == 100 and not enough(known, 1e-6)
