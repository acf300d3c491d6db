"""Measure how the members of a family accept each other: rates, survival tables, entropies.

The target continues every prompt, and one teacher-forced pass of every member over these texts
gives all laws on the same contexts: the pairwise rates, the entropies, and the acceptance of
every drafter by the target. A level below the target verifies text of its own, so from where the
target would ask it for a draft each candidate draws short continuations, over which the others
pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hsd.errors import UserError
from vllm_hsd.planner.models import Family, Sampling
from vllm_hsd.planner.parts import Parts
from vllm_hsd.planner.recorded import (
    VERIFIERS,
    Verifier,
    survival_along,
    survival_by_position,
    visited_survival,
    visits,
)

Floats = NDArray[np.float64]

LEAST_LOG_PROB = -14.0
# Logits of all members on one batch of texts stay within this many bytes.
LOGITS_BYTES = 1 << 31

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Effort:
    """How much text to measure on.

    Attributes:
        text_tokens: tokens of the target's continuation of each prompt.
        contexts: contexts per candidate from which it draws continuations of its own.
        max_tokens: longest draft that the profile covers (H).
        batch: most texts per forward; fewer where their logits are large.
        seed: of everything drawn.
    """

    text_tokens: int = 96
    contexts: int = 512
    max_tokens: int = 16
    batch: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Laws:
    """What was measured on the laws of M members, the target last.

    Attributes:
        rates: mean of 1 - total variation on the target's texts, [M, M].
        rate_errors: its standard error over prompts, [M, M].
        survival: per verifier [M (verifying), M (drafting), H + 1 (budget), H + 1 (position),
            H + 1 (t)]: P(at least t tokens accepted) in a round of a verifier that has made
            `position` tokens since it was asked, over drafts of at most `budget` tokens. The
            target's text never starts anew, so its rows are the same at all positions. nan
            where a pair was not measured. See `recorded.visited_survival` and
            `recorded.survival_by_position`.
        entropies: mean, then `QUANTILES`, of the entropy in nats, [M, 1 + len(QUANTILES)].
        positions: contexts that the rates are means over.
    """

    rates: Floats
    rate_errors: Floats
    survival: dict[Verifier, Floats]
    entropies: Floats
    positions: int


def measure(
    family: Family,
    contexts: Sequence[list[int]],
    sampling: Sampling,
    effort: Effort,
    parts: Parts,
    advance: Callable[[str], None] = lambda what: None,
) -> Laws:
    """Draw texts and compare the laws of all members on them.

    Args:
        contexts: token ids of the prompts.
        parts: where finished batches are kept, so that a later call continues.
        advance: told what was finished after every batch; see `batches`.
    """
    effort = _fitting(family, effort)
    # Texts of one batch are padded to the longest.
    contexts = sorted(contexts, key=len)
    texts = []
    for start in range(0, len(contexts), effort.batch):
        group = contexts[start : start + effort.batch]
        seed = effort.seed, 0, start
        texts.append(
            parts.get(f"text-{start}", _target_text, family, group, sampling, effort, seed)
        )
        advance("the target's texts")
    ratios = _after_prefill(texts)
    survival = _target_survival(ratios, effort)
    for member in range(len(family.members) - 1):
        below = _can_draft_for(family, member)
        starts = _asked_contexts(contexts, texts, ratios[member], member, effort)
        own = _own_texts(family, member, starts, sampling, effort, parts, advance)
        for verifier in VERIFIERS:
            table = np.full_like(survival[verifier][member], np.nan)
            table[below] = survival_by_position(own[below], effort.max_tokens, verifier)
            survival[verifier][member] = table
    by_prompt = np.concatenate([part["rates"] for part in texts])  # [prompts, M, M]
    counts = np.concatenate([part["lengths"] for part in texts])
    rates = np.average(by_prompt, axis=0, weights=counts)
    spread = (counts[:, None, None] * (by_prompt - rates)) ** 2
    entropies = np.concatenate([_columns(part["entropies"]) for part in texts], axis=1)
    entropies = entropies[:, ~np.isnan(entropies[0])]
    summary = [entropies.mean(1), *np.quantile(entropies, QUANTILES, axis=1)]
    return Laws(
        rates=rates,
        rate_errors=np.sqrt(spread.sum(0)) / counts.sum(),
        survival=survival,
        entropies=np.stack(summary, axis=1),
        positions=int(counts.sum()),
    )


def batches(family: Family, prompts: int, effort: Effort) -> int:
    """How often `measure` calls `advance`."""
    effort, members = _fitting(family, effort), len(family.members)
    per_member = -(-effort.contexts // effort.batch)
    return -(-prompts // effort.batch) + (members - 1) * per_member


def _fitting(family: Family, effort: Effort) -> Effort:
    width = len(family.members) * family.target.config.vocab_size * 4
    most = LOGITS_BYTES // (width * max(effort.text_tokens, effort.max_tokens))
    return replace(effort, batch=max(1, min(effort.batch, most)))


def _generator(family: Family, *seed: int) -> torch.Generator:
    state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    return torch.Generator(family.device).manual_seed(state)


def _target_text(
    family: Family,
    contexts: list[list[int]],
    sampling: Sampling,
    effort: Effort,
    seed: tuple[int, ...],
) -> dict[str, NDArray]:
    """Texts of the target and what all members make of them.

    Returns tokens [B, L], lengths [B], log_probs and entropies [M, B, L] (nan past the end),
    rates [B, M, M] (means over each text).
    """
    members = len(family.members)
    generator = _generator(family, *seed)
    tokens = family.draw(members - 1, contexts, effort.text_tokens, sampling, generator)
    lengths = _lengths(family, tokens)
    logits = _on_texts(family, contexts, tokens, range(members))
    texts, length = tokens.shape
    rates = np.ones((texts, members, members))
    log_probs, entropies = np.full((2, members, texts, length), np.nan)
    for row in range(texts):
        laws = _stack(logits, sampling, row, lengths[row])
        for i in range(members):
            overlap = torch.minimum(laws[i], laws[i + 1 :]).sum(-1).double().mean(-1)
            rates[row, i, i + 1 :] = rates[row, i + 1 :, i] = overlap.cpu().numpy()
        log_probs[:, row, : lengths[row]] = _log_prob(laws, tokens[row, : lengths[row]])
        entropies[:, row, : lengths[row]] = torch.special.entr(laws).sum(-1).cpu().numpy()
    return {
        "tokens": tokens.cpu().numpy(),
        "lengths": lengths,
        "rates": rates,
        "log_probs": log_probs,
        "entropies": entropies,
    }


def _asked_contexts(
    prompts: list[list[int]],
    texts: list[dict[str, NDArray]],
    ratios: Floats,
    member: int,
    effort: Effort,
) -> list[list[int]]:
    """Contexts at which the target asks a candidate for a draft, shortest first."""
    rng = np.random.default_rng((effort.seed, 1, member))
    reached = _asked_at(ratios, effort.max_tokens).cumsum()
    # Evenly along all texts, which leaves less to chance than independent draws.
    even = (np.arange(effort.contexts) + rng.random()) / effort.contexts
    chosen = np.searchsorted(reached, even * reached[-1], side="right")
    written = np.concatenate([part["tokens"] for part in texts])
    rows, ends = np.unravel_index(chosen, written.shape)
    return sorted(
        (
            [*prompts[row], *written[row, :end].tolist()]
            for row, end in zip(rows, ends, strict=True)
        ),
        key=len,
    )


def _asked_at(ratios: Floats, max_tokens: int) -> Floats:
    """Where the target asks a candidate for a draft: P(text, position), [texts, L].

    Not everywhere alike: a candidate drafts anew where it has just failed, and skips what was
    accepted. Drafts of all lengths count alike.

    Args:
        ratios: of the candidate, from `_after_prefill`, [texts, L - 1].
    """
    alive = survival_along(ratios, max_tokens, "block")
    starts = [visits(alive, draft) for draft in range(1, max_tokens + 1)]
    chances = np.where(np.isnan(ratios), 0.0, sum(each / each.sum() for each in starts))
    return np.pad(chances / chances.sum(), ((0, 0), (1, 0)))


def _own_texts(
    family: Family,
    member: int,
    contexts: list[list[int]],
    sampling: Sampling,
    effort: Effort,
    parts: Parts,
    advance: Callable[[str], None],
) -> Floats:
    """Log ratios of all members to one, along texts of that one, [M, contexts, H]."""
    found = []
    for start in range(0, len(contexts), effort.batch):
        group = contexts[start : start + effort.batch]
        seed = effort.seed, 2, member, start
        name = f"own-{member}-{start}"
        part = parts.get(name, _own_text, family, member, group, sampling, effort, seed)
        found.append(part["log_probs"])
        advance("the candidates' texts")
    return _ratios(np.concatenate(found, axis=1), member)


def _own_text(
    family: Family,
    member: int,
    contexts: list[list[int]],
    sampling: Sampling,
    effort: Effort,
    seed: tuple[int, ...],
) -> dict[str, NDArray]:
    """log_probs [M, B, H] along short texts of one member; nan for those never below it."""
    generator = _generator(family, *seed)
    tokens = family.draw(member, contexts, effort.max_tokens, sampling, generator)
    lengths = _lengths(family, tokens)
    present = [*_can_draft_for(family, member), member]
    logits = _on_texts(family, contexts, tokens, present)
    log_probs = np.full((len(family.members), *tokens.shape), np.nan)
    for row, length in enumerate(lengths):
        laws = _stack(logits, sampling, row, length)
        log_probs[present, row, :length] = _log_prob(laws, tokens[row, :length])
    return {"log_probs": log_probs}


def _on_texts(
    family: Family, contexts: list[list[int]], tokens: Tensor, members: Sequence[int]
) -> list[list[Tensor]]:
    """Logits per member and text, [L, V] each, that predict the tokens drawn after contexts."""
    length = tokens.shape[1]
    shortest = min(map(len, contexts)) - 1
    longest = max(map(len, contexts)) + length - 1
    padded = torch.zeros(len(contexts), longest, dtype=torch.long, device=family.device)
    for row, context in enumerate(contexts):
        whole = torch.cat([torch.tensor(context, device=family.device), tokens[row, :-1]])
        padded[row, : len(whole)] = whole
    found = family.logits(padded, shortest, members)
    starts = [len(context) - 1 - shortest for context in contexts]
    return [
        [found[member][row, start : start + length] for row, start in enumerate(starts)]
        for member in members
    ]


def _stack(logits: list[list[Tensor]], sampling: Sampling, row: int, length: int) -> Tensor:
    """Laws of all given members along one text, [members, length, V]."""
    return torch.stack([sampling.laws(each[row][:length]) for each in logits])


def _lengths(family: Family, tokens: Tensor) -> NDArray[np.int64]:
    """Tokens of each text up to its end-of-text token, which counts."""
    end = family.target.generation_config.eos_token_id
    ends = [] if end is None else [end] if isinstance(end, int) else end
    drawn = tokens.cpu().numpy()
    ended = np.isin(drawn, ends)
    return np.where(ended.any(1), ended.argmax(1) + 1, drawn.shape[1])


def _log_prob(laws: Tensor, tokens: Tensor) -> Floats:
    """log of the laws [M, L, V] at tokens [L]; -inf where a law has no mass."""
    index = tokens.expand(len(laws), -1).unsqueeze(-1)
    with np.errstate(divide="ignore"):
        return np.log(laws.gather(-1, index).squeeze(-1).double().cpu().numpy())


def _ratios(log_probs: Floats, verifying: int) -> Floats:
    """log q - log p of all members to the verifying one, [M, N, L]; nan past the ends.

    The verifying member drew these tokens, so where rounding puts one just outside its law
    (top-p, near ties of greedy decoding) it still had some mass.
    """
    return log_probs - np.maximum(log_probs[verifying], LEAST_LOG_PROB)


def _after_prefill(texts: list[dict[str, NDArray]]) -> Floats:
    """Log ratios of all members to the target along its texts, [M, texts, L - 1].

    The prefill makes the first token of a text, so the first draft starts behind it.

    Raises:
        UserError: no text has a second token.
    """
    log_probs = np.concatenate([part["log_probs"] for part in texts], axis=1)
    ratios = _ratios(log_probs, len(log_probs) - 1)[..., 1:]
    if np.isnan(ratios).all():
        raise UserError(
            "the target ends its text with the first token after every prompt, which leaves "
            "nothing to draft: give other prompts or more text tokens."
        )
    return ratios


def _target_survival(ratios: Floats, effort: Effort) -> dict[Verifier, Floats]:
    """Tables with the target as the verifier; the other verifiers are left for later."""
    size = effort.max_tokens + 1
    tables = {}
    for verifier in VERIFIERS:
        tables[verifier] = np.full((len(ratios), len(ratios), size, size, size), np.nan)
        everywhere = visited_survival(ratios[:-1], effort.max_tokens, verifier)
        tables[verifier][-1, :-1] = everywhere[:, :, None]
    return tables


def _can_draft_for(family: Family, member: int) -> list[int]:
    """Candidates that may stand below `member`: not itself, no exit that runs more layers."""
    own = family.layers(member)
    return [
        other
        for other in range(len(family.members) - 1)
        if other != member and not (own and (family.layers(other) or 0) > own)
    ]


def _columns(values: Floats) -> Floats:
    return values.reshape(len(values), -1)
