"""Exact distribution of steps with several drafts of a model: from drafts to what is emitted.

The program's, the tree's and the layout's kernels run; every draw is enumerated in the place of the
kernels that draw, which are given what those would be. `kernels/test_tree_kernels.py` and
`kernels/test_branch_walk.py` compare these with the rules that decide here.
"""

from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from host.test_several_programs import rows_of
from oracle import sequential
from oracle.exact import Choices, Table, Tokens, deviation
from oracle.test_program_exact import Chosen, exact_engine, exact_row

from vllm_hsd.cascade import several_drafts
from vllm_hsd.host.drawn_branches import DrawnBranches
from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.branch_walk import WalkResult
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.tree_verify import TreeResult

LEAST = Fraction(1, 1000)


class EnumeratedStep:
    """One request at temperature 1 whose drafts are verified as an engine does."""

    def __init__(self, drafts: int, length: int, vocabulary: int) -> None:
        self.drafts, self.length, self.target = drafts, length, Table(vocabulary, 1)
        self.engine = engine = exact_engine((length,), vocabulary=vocabulary, drafts=drafts)
        self.chosen = Chosen(engine)
        self.slot = int(engine.index[0])
        self.hosted = hosted = DrawnBranches.__new__(DrawnBranches)
        inputs = drafts * (length + 1)
        hosted.state, hosted.drafts, hosted.longest = engine.state, engine.several, length
        hosted.counts = torch.zeros(1, drafts, dtype=torch.int32)
        hosted.offsets = {length: torch.arange(0, inputs, length + 1, dtype=torch.int32)[None]}
        hosted.winner, hosted.emitted = torch.zeros(2, 1, dtype=torch.int32)
        parameters = SimpleNamespace(temperature=engine.temperature)
        speculator = SimpleNamespace(parameters=parameters, scales=engine.scales)
        hosted.runner = SimpleNamespace(speculator=speculator)

    def emit(self, rows: list, text: Tokens, cut=None, chain: ChainResult | None = None) -> Tokens:
        """Verify rows after `text`, of which the scheduler has kept `cut` inputs.

        `chain` is what the first row came to where it is not verified with the others.
        """
        hosted, each = self.hosted, self.length + 1
        inputs, target = [], []
        for row in rows:
            inputs += [0, *row, *[0] * (self.length - len(row))]
            own = self.target.rows((*row,), len(row) + 1, text)
            target += [*own, *[own[-1]] * (self.length - len(row))]
        inputs, target = inputs[:cut], target[:cut]
        kept = [min(max(len(inputs) - r * each, 0), len(row) + 1) for r, row in enumerate(rows)]
        hosted.counts[0] = torch.tensor(kept)
        batch = SimpleNamespace(cu_num_logits_np=np.zeros(1, dtype=np.int32))
        tokens = torch.tensor(inputs, dtype=torch.int32)
        several = np.ones(1, dtype=bool)
        step = {"length": self.length, "several": several, "batch": batch, "inputs": tokens}
        hosted.step = SimpleNamespace(**step)
        hosted.verified = 0
        nothing = torch.full((1, each), -1), *torch.zeros(2, 1, dtype=torch.int32)
        found, counts = hosted.follow(
            chain or ChainResult(*nothing, torch.zeros(1, each)),
            torch.tensor([[float(p) for p in row] for row in target]).double().log(),
            torch.tensor([0, len(inputs)], dtype=torch.int32),
            torch.tensor([self.slot]),
            torch.zeros(len(self.engine.seeds), dtype=torch.int64),
            temperature=self.engine.temperature,
            seeds=self.engine.seeds,
            level=1,
            positions=None,
            thresholds=None,
        )
        emitted = tuple(found[0, : int(counts[0])].tolist())
        winner = int(hosted.winner[0])
        assert (*rows[winner],)[: len(emitted) - 1] == emitted[:-1]
        assert int(hosted.emitted[0]) == len(emitted)
        return emitted

    def verify_tree(
        self, target, draft, tokens, parents, temperature, seeds, draws, *, level, draft_temperature
    ) -> TreeResult:
        """By `sequential.traversal`, on what the kernels would be given."""
        assert temperature == draft_temperature == 1
        if (tokens < 0).all():
            # Not verified together: nothing of it is looked at, and nothing was gathered for it.
            none = torch.zeros(1, dtype=torch.int32)
            unseen = torch.zeros(1, tokens.shape[1] + 1, dtype=torch.int64)
            return TreeResult(unseen, torch.full_like(tokens, -1), none, none + 1)
        number: dict[tuple[int, int], int] = {}
        nodes = {-1: sequential.Node(exact_row(target[0, 0]), [])}
        listed = zip(tokens[0].tolist(), parents[0].tolist(), strict=True)
        for i, (token, parent) in enumerate(listed):
            if token < 0:
                continue
            first = number.setdefault((parent, token), i)
            if first == i:
                nodes[i] = sequential.Node(exact_row(target[0, i + 1]), [])
            proposal = exact_row(draft[0, parent + 1])
            nodes[parent].children.append((token, proposal, nodes[first]))
        choices = self.chosen.choices
        emitted = sequential.traversal(nodes[-1], choices.bernoulli, choices.sample)
        path = [-1]
        for token in emitted[:-1]:
            path.append(number[path[-1], token])
        result = torch.full((1, tokens.shape[1] + 1), -1), torch.full_like(tokens, -1)
        result[0][0, : len(emitted)] = torch.tensor(emitted)
        result[1][0, : len(path) - 1] = torch.tensor(path[1:])
        accepted = torch.tensor([len(emitted) - 1], dtype=torch.int32)
        return TreeResult(*result, accepted, accepted + 1)

    def follow_branches(self, *args, **options) -> WalkResult:
        """By the kernel's reference, of whose draws all are tried."""

        def sample_row(logits, *_, **__):
            token = self.chosen.choices.sample(exact_row(logits[0]))
            return torch.tensor([token]), torch.zeros(1)

        with mock.patch.object(reference, "sample_row", sample_row):
            return reference.follow_branches(*args, **options)


def bias(drafts: int, length: int, vocabulary=2, steps=1, cut=None, **faults):
    """Total variation distance to the target's joint distribution, and the rows that won.

    Args:
        cut: inputs that the scheduler keeps.
        faults: "rows" changes what is verified of the drafts, "sample" is the sampler's
            replacement, "verify" wraps the verification of the tree.
    """
    step, won = EnumeratedStep(drafts, length, vocabulary), set()
    chosen, engine = step.chosen, step.engine

    def generate(choices: Choices) -> Tokens:
        chosen.begin(choices)
        text: Tokens = ()
        for _ in range(steps):
            engine.propose()
            [rows] = rows_of(engine)
            assert all(len(row) == length for row in rows)
            if "rows" in faults:
                rows = faults["rows"](rows)
            emitted = step.emit(rows, text, cut)
            won.add(int(step.hosted.winner[0]))
            engine.commit(0, list(emitted))
            text = (*text, *emitted)
        return text

    sample = faults.get("sample", lambda original: original)(chosen.sample_row)
    verify = faults.get("verify", lambda original: original)(step.verify_tree)
    with (
        chosen.draws(sample_row=sample),
        mock.patch.object(several_drafts, "row_thresholds", reference.row_thresholds),
        mock.patch("vllm_hsd.kernels.drawn_rows.verify_tree", verify),
        mock.patch("vllm_hsd.kernels.blocks.LOGIT_DTYPES", (torch.float64,)),
        mock.patch("vllm_hsd.host.branches.follow_branches", step.follow_branches),
    ):
        return deviation(generate, step.target, steps * (length + 1)), won


@pytest.mark.parametrize(
    ("drafts", "length", "settings"),
    [
        (2, 2, {}),
        (3, 1, {"vocabulary": 3}),
        # The scheduler has cut the last row.
        (2, 2, {"cut": 5}),
        (2, 1, {"steps": 2}),
        (3, 2, {}),
        (2, 2, {"vocabulary": 3}),
        (2, 3, {}),
    ],
)
def test_a_step_has_the_distribution_of_the_target(drafts, length, settings):
    found, won = bias(drafts, length, **settings)
    assert found == 0
    assert len(won) == drafts


def by_rows_before(rows: list[list[int]]) -> list[list[int]]:
    """Rows are cut by the tokens of earlier ones, as where a scheduler keeps so many of all."""
    chain, second, *later = rows
    return [chain, second[: 1 + chain[0] % 2], *(row[: second[0]] for row in later)]


@pytest.mark.parametrize("shape", [(2, 2), (3, 1, 3)])
def test_rows_may_end_by_what_was_drawn_before_them(shape):
    assert bias(*shape, rows=by_rows_before)[0] == 0


def one_uniform_for_all_rows(original):
    """All rows take the draws of the chain."""
    drawn: list[tuple] = []

    def sample_row(logits, *state, draw_offset, **options):
        if draw_offset == 0:
            drawn[:] = [original(logits, *state, draw_offset=0, **options)]
        return drawn[0]

    return sample_row


def of_another_place(original):
    """The draft's logits at the root are those of the first node."""

    def verify(target, draft, *rest, **options):
        draft = draft.clone()
        draft[:, 0] = draft[:, 1]
        return original(target, draft, *rest, **options)

    return verify


def by_its_own_token(rows: list[list[int]]) -> list[list[int]]:
    """A row is left out by its own first token."""
    return [rows[0], *(row if row[0] == 1 else [] for row in rows[1:])]


@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        ((2, 1, 3), {"sample": one_uniform_for_all_rows}),
        ((2, 2), {"verify": of_another_place}),
        ((2, 1, 3), {"rows": by_its_own_token}),
    ],
    ids=["same uniforms", "rows of another place", "left out by its own token"],
)
def test_faults_are_caught(shape, faults):
    found, _ = bias(*shape, **faults)
    print(float(found))
    assert found > LEAST
