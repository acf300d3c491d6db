"""Measured acceptance of a target's candidates by each other: rates and survival tables.

The target continues every prompt, and one teacher-forced pass of every model over these texts
gives all distributions on the same contexts: the pairwise rates, and the acceptance of every
drafter by the target. A level below the target verifies text of its own, so from where the
target would request a draft each candidate draws short continuations, which the others then
score. Lookups are replayed over the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.lookup_choice import LookupChoice
from vllm_hsd.tools.planner.models import ModelSet, probabilities
from vllm_hsd.tools.planner.profile import table_shapes
from vllm_hsd.tools.planner.prompt_lookup import replay, replay_choice
from vllm_hsd.tools.planner.survival import (
    VERIFIERS,
    lookup_table,
    survival_along,
    survival_table,
    visits,
    windows,
)
from vllm_hsd.tools.planner.task import Task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_LOG_PROB = -14.0
# Logits of all models on one batch of texts stay within this many bytes.
LOGITS_BYTES = 1 << 31


@dataclass(frozen=True)
class ScoredTexts:
    """Texts drawn from one model, and what all models make of them.

    Attributes:
        tokens, lengths: [N, L], and tokens of each up to its end-of-text token, which counts [N].
        log_probs: of each model at the tokens, [M + 1, N, L]; nan past a text's end and for
            models that did not score it.
        rates: mean of 1 - total variation of each pair over each text, [N, M + 1, M + 1]; nan
            where a model has no probabilities.
        offered, accepted: by candidate, what a lookup of H tokens before each token
            proposes and how many of it the text continues with, [N, L].
        by_start: by head, log_probs by where a draft begins and by its tokens, [N, L, H]; nan past
            a text's end.
    """

    tokens: Ints
    lengths: Ints
    log_probs: Floats
    rates: Floats
    offered: dict[int, Ints]
    accepted: dict[int, Ints]
    by_start: dict[int, Floats]


@dataclass(frozen=True)
class Acceptances:
    """What was measured on M + 1 models, the target last.

    Attributes:
        rates: mean of 1 - total variation on the target's texts, [M + 1, M + 1]; nan for prompt
            lookups.
        tables: by name, as for `profile.Profile.set_tables`.
        positions: contexts that the rates are means over.
    """

    rates: Floats
    tables: dict[str, Floats]
    positions: int


def measure_acceptance(
    models: ModelSet,
    contexts: Sequence[list[int]],
    task: Task,
    advance: Callable[[str], None] = lambda what: None,
) -> Acceptances:
    """Draw texts after contexts (token ids of the prompts) and compare all models on them.

    `advance` is told what was finished after every batch, see `num_batches`. Raises UserError
    where the target leaves nothing to draft.
    """
    task = _fitting(models, task)
    target, longest = len(models.candidates), task.max_draft_tokens
    # Texts of one batch are padded to the longest.
    contexts = sorted(contexts, key=len)
    texts = _texts(models, target, contexts, task, lambda: advance("the target's texts"))
    ratios = after_prefill(_ratios(texts.log_probs, texts.log_probs[target]))
    shapes = table_shapes(target + 1, models.lookups, longest)
    tables: dict[str, Floats] = {name: np.zeros(shape) for name, shape in shapes.items()}
    for name, table in tables.items():
        table[(..., 0) if name in VERIFIERS else (..., 0, 0)] = 1.0
    known = [i for i in models.with_probabilities if i != target]
    drafts = {i: windows(ratios[i], longest) for i in known}
    for i, log_probs in texts.by_start.items():
        verifying = windows(texts.log_probs[target], longest)
        drafts[i] = _ratios(log_probs, verifying)[:, 1:]
    _store_survival(tables, target, drafts, by_position=False)
    _store_lookups(tables, models, target, contexts, texts, task)
    for model in range(target):
        below = models.drafters_for(model)
        if not below:
            continue
        starts = _requested_contexts(contexts, texts, ratios[model], model, task)
        own = _texts(models, model, starts, task, lambda: advance("the candidates' texts"))
        along = _ratios(own.log_probs, own.log_probs[model])
        drafts = {i: windows(along[i], longest) for i in below if i not in models.lookups}
        _store_survival(tables, model, drafts, by_position=True)
        _store_lookups(tables, models, model, starts, own, task)
    rates = np.average(texts.rates, axis=0, weights=texts.lengths)
    return Acceptances(rates, tables, int(texts.lengths.sum()))


def _store_survival(
    tables: dict[str, Floats], verifier: int, drafts: dict[int, Floats], by_position: bool
) -> None:
    """Keep the survival that follows from the log ratios [N, L, H] of every drafter's drafts."""
    for rule in VERIFIERS:
        for i, log_ratios in drafts.items():
            tables[rule][verifier, i] = survival_table(log_ratios, rule, by_position)


def _store_lookups(
    tables: dict[str, Floats],
    models: ModelSet,
    model: int,
    contexts: Sequence[list[int]],
    texts: ScoredTexts,
    task: Task,
) -> None:
    """Keep the tables of lookups, and of several as one level, along the texts of a model, and the
    survival that follows from them.
    """
    longest, of_target = task.max_draft_tokens, model == len(models.candidates)
    # The prefill emits the first token.
    first = int(of_target)
    found = {i: (texts.offered[i][:, first:], texts.accepted[i][:, first:]) for i in texts.offered}
    each = zip(contexts, texts.tokens, texts.lengths, strict=True)
    parts = [(np.array([*context, *text[:first]]), text[first:end]) for context, text, end in each]
    for i in models.lookups:
        if isinstance(choice := models.models[i], LookupChoice):
            found[i] = replay_choice(choice, parts, longest, of_target)
    # A draft of n tokens accepts no more than n.
    within = np.arange(longest + 1) <= np.arange(longest + 1)[:, None, None]
    for i, (offered, accepted) in found.items():
        table = lookup_table(offered, accepted, texts.lengths - first, longest, not of_target)
        tables[f"lookup{i}"][model] = table
        reached = np.cumsum(table.sum(-2)[..., ::-1], -1)[..., ::-1]
        for name in VERIFIERS:
            tables[name][model, i] = np.minimum(reached * within, 1.0)


def num_batches(models: ModelSet, prompts: int, task: Task) -> int:
    """How often `measure_acceptance` calls `advance`."""
    each = _fitting(models, task).texts_per_forward
    drawing = sum(bool(models.drafters_for(i)) for i in range(len(models.candidates)))
    return -(-prompts // each) + drawing * -(-task.contexts // each)


def _fitting(models: ModelSet, task: Task) -> Task:
    width = len(models.models) * models.vocabulary * 4
    most = LOGITS_BYTES // (width * max(task.text_tokens, task.max_draft_tokens))
    return replace(task, texts_per_forward=max(1, min(task.texts_per_forward, most)))


def _texts(
    models: ModelSet,
    model: int,
    contexts: list[list[int]],
    task: Task,
    advance: Callable[[], None],
) -> ScoredTexts:
    """Continuations of all contexts, drawn from one model and scored by those that may meet it."""
    found = []
    for start in range(0, len(contexts), task.texts_per_forward):
        group = contexts[start : start + task.texts_per_forward]
        found.append(scored_texts(models, model, group, task, (task.seed, model, start)))
        advance()

    def joined(name: str, axis: int = 0) -> Any:
        parts = [getattr(part, name) for part in found]
        if isinstance(parts[0], dict):
            return {i: np.concatenate([part[i] for part in parts]) for i in parts[0]}
        return np.concatenate(parts, axis)

    return ScoredTexts(
        **{f.name: joined(f.name, int(f.name == "log_probs")) for f in fields(ScoredTexts)}
    )


def scored_texts(
    models: ModelSet, model: int, contexts: list[list[int]], task: Task, seed: tuple[int, ...]
) -> ScoredTexts:
    """One batch of `_texts`: of `text_tokens` if they are the target's, else of H tokens."""
    target = len(models.candidates)
    state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator(models.device).manual_seed(state)
    length = task.text_tokens if model == target else task.max_draft_tokens
    drawn = models.draw(model, contexts, length, task.sampling, generator)
    tokens = drawn.cpu().numpy()
    lengths = _lengths(models, tokens)
    meeting = range(target) if model == target else models.drafters_for(model)
    scoring = [i for i in models.with_probabilities if i in meeting or i == model]
    logits = _on_texts(models, contexts, drawn, scoring)
    log_probs = np.full((target + 1, *tokens.shape), np.nan)
    rates = np.full((len(tokens), target + 1, target + 1), np.nan)
    for row, end in enumerate(lengths):
        probs = torch.stack([probabilities(task.sampling, each[row][:end]) for each in logits])
        if model == target:
            for a, i in enumerate(scoring):
                overlap = torch.minimum(probs[a], probs[a:]).sum(-1).double().mean(-1)
                rates[row, i, scoring[a:]] = rates[row, scoring[a:], i] = overlap.cpu().numpy()
        index = drawn[row, :end].expand(len(scoring), -1).unsqueeze(-1)
        with np.errstate(divide="ignore"):
            at_text = np.log(probs.gather(-1, index).squeeze(-1).double().cpu().numpy())
        log_probs[scoring, row, :end] = at_text
    by_start: dict[int, Floats] = {}
    for i in set(models.heads) & set(scoring):
        by_start[i] = np.full((*tokens.shape, task.max_draft_tokens), np.nan)
        for row, end in enumerate(lengths):
            context = torch.tensor(contexts[row], device=models.device)
            chances = partial(probabilities, task.sampling)
            with np.errstate(divide="ignore"):
                found = models.models[i].log_probs(
                    context, drawn[row, :end], task.max_draft_tokens, chances
                )
            by_start[i][row, :end] = found
        if model != target:
            # The target has not verified such a text: the head drafts on its own states.
            log_probs[i] = by_start[i][:, 0, : tokens.shape[1]]
    offered, accepted = {}, {}
    for i in set(models.lookups) & set(meeting):
        if isinstance(lookup := models.models[i], LookupChoice):
            continue
        found = np.zeros((2, *tokens.shape), dtype=np.int64)
        for row, end in enumerate(lengths):
            texts = np.array(contexts[row]), tokens[row, :end]
            found[:, row, :end] = replay(lookup, *texts, task.max_draft_tokens, model == target)
        offered[i], accepted[i] = found
    return ScoredTexts(tokens, lengths, log_probs, rates, offered, accepted, by_start)


def _requested_contexts(
    prompts: list[list[int]], texts: ScoredTexts, ratios: Floats, model: int, task: Task
) -> list[list[int]]:
    """Contexts at which the target requests a candidate's draft: text by text, longest first."""
    rng = np.random.default_rng((task.seed, 1, model))
    reached = requested_at(ratios, task.max_draft_tokens).cumsum()
    # Evenly along all texts, which leaves less to chance than independent draws.
    even = (np.arange(task.contexts) + rng.random()) / task.contexts
    chosen = np.searchsorted(reached, even * reached[-1], side="right")[::-1]
    rows, ends = np.unravel_index(chosen, texts.tokens.shape)
    return [
        [*prompts[row], *texts.tokens[row, :end].tolist()]
        for row, end in zip(rows, ends, strict=True)
    ]


def requested_at(ratios: Floats, max_tokens: int) -> Floats:
    """Where the target requests a candidate's draft: P(text, position), [texts, L], from the
    candidate's ratios [texts, L - 1] of `after_prefill`.

    Not everywhere alike: a candidate drafts anew where it has just failed, and skips what was
    accepted. Drafts of all lengths count alike.
    """
    alive = survival_along(windows(ratios, max_tokens), "block")
    starts = [visits(alive, draft) for draft in range(1, max_tokens + 1)]
    chances = np.where(np.isnan(ratios), 0.0, sum(each / each.sum() for each in starts))
    return np.pad(chances / chances.sum(), ((0, 0), (1, 0)))


def _on_texts(
    models: ModelSet, contexts: list[list[int]], tokens: Tensor, scoring: Sequence[int]
) -> list[list[Tensor]]:
    """Logits per model and text, [L, V] each, that predict the tokens drawn after contexts."""
    cached = {model: models.continued(model, contexts, tokens) for model in scoring}
    length = tokens.shape[1]
    shortest = min(map(len, contexts)) - 1
    before = [torch.tensor(context, device=models.device) for context in contexts]
    whole = [torch.cat(pair) for pair in zip(before, tokens[:, :-1], strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    rest = models.logits(padded, shortest, [m for m, own in cached.items() if own is None])
    starts = [len(context) - 1 - shortest for context in contexts]
    return [
        list(own)
        if own is not None
        else [rest[model][row, start : start + length] for row, start in enumerate(starts)]
        for model, own in cached.items()
    ]


def _lengths(models: ModelSet, tokens: Ints) -> Ints:
    """Tokens of each text up to its end-of-text token, which counts."""
    end = models.target.generation_config.eos_token_id
    ends = [] if end is None else [end] if isinstance(end, int) else end
    ended = np.isin(tokens, ends)
    return np.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1])


def _ratios(log_probs: Floats, verifying: Floats) -> Floats:
    """log q - log p of models to the verifying one, each [..., N, L, ...]; nan past the ends.

    The verifying model drew these tokens, so where rounding puts one just outside its
    probabilities (top-p, near ties of greedy decoding) it still had some mass.
    """
    return log_probs - np.maximum(verifying, LEAST_LOG_PROB)


def after_prefill(ratios: Floats) -> Floats:
    """Log ratios without the first token of each text, [..., L] -> [..., L - 1].

    The prefill emits it, so the first draft starts after it; UserError if no text has a second.
    """
    if np.isnan(ratios[-1, :, 1:]).all():
        raise UserError(
            "the target ends its text with the first token after every prompt, which leaves "
            "nothing to draft: give other prompts."
        )
    return ratios[..., 1:]
