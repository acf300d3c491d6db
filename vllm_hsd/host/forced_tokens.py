"""Tokens that a grammar leaves no choice of, drafted in the place of what the levels drafted.

The grammar is known to the scheduler, and the levels' drafts come from the worker. On a CPU the
scheduler waits for both: it puts forced tokens in the place of a draft, and the worker takes them
from the step's output, as point masses. Whether there are any follows from the text alone, so a
draft is never dropped for what was drawn. On a GPU the worker runs ahead of the scheduler and has
fed its own drafts before the grammar has read the text.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.config import platform
from vllm_hsd.host.hooks import REGISTRY, RUNNER, SCHEDULER
from vllm_hsd.host.request_keys import NUM_TOKENS

# Name of the source in the counts.
FORCED = "forced"
# Of a scheduler, and of what it hands to the worker: name of a request -> its forced tokens.
ATTRIBUTE = "hsd_forced"
# Put before a text that goes on. The second is for one that begins with a space or a line.
ANCHORS = ("\n", "0")
# Of a forced text, for each token that it may fill: hardly any token of such texts is longer.
_CHARACTERS = 6
# Where more are allowed, they do not begin alike: no vocabulary has so many of one character.
_MOST_ALLOWED = 1024
_BYTE = re.compile("<0x(..)>")
UPDATE_REQUESTS = f"{RUNNER}.update_requests"


def forced_tokens(grammar: Any, manager: Any, stops: Set[int], most: int) -> list[int]:
    """What must follow, of `most` tokens at most, as one of the ways to write it in tokens.

    Masks say it: what xgrammar and llguidance themselves say of it ends where the grammar leaves a
    choice, which may be never, and xgrammar fails inside a character.

    Args:
        manager: vLLM's, of structured outputs.
        stops: tokens that end the text, which are never forced.
    """
    # Other backends roll back no further than a draft.
    if not (hasattr(grammar, "matcher") or hasattr(grammar, "ll_matcher")):
        return []
    tokenizer, mask = manager.tokenizer, manager.backend.allocate_token_bitmask(1)
    tokens: list[int] = []
    while len(tokens) < _CHARACTERS * most and not grammar.is_terminated():
        grammar.fill_bitmask(mask.fill_(-1), 0)
        token = _beginning(_allowed(mask[0].numpy()), tokenizer, stops)
        if token is None or not grammar.accept_tokens(FORCED, [token]):
            break
        tokens.append(token)
    if not tokens:
        return []
    grammar.rollback(len(tokens))
    # A grammar allows every way to write a text, and the target has one that it prefers.
    text = _text(tokenizer, tokens)
    return _continued(tokenizer, text)[:most] if text else []


def _allowed(mask: NDArray[np.int32]) -> list[int]:
    """Tokens of a mask, of 32 a word; too many ones are cut."""
    words = np.flatnonzero(mask)[: _MOST_ALLOWED + 1]
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    found: list[int] = (words[word] * 32 + bit).tolist()
    return found


def _beginning(allowed: list[int], tokenizer: Any, stops: Set[int]) -> int | None:
    """The token that all allowed ones begin with."""
    if not 0 < len(allowed) <= _MOST_ALLOWED or not stops.isdisjoint(allowed):
        return None
    pieces = [_bytes(piece or "") for piece in tokenizer.convert_ids_to_tokens(allowed)]
    shortest = min(pieces, key=len)
    alike = shortest and all(piece.startswith(shortest) for piece in pieces)
    return allowed[pieces.index(shortest)] if alike else None


def _bytes(piece: str | bytes) -> bytes:
    """Of a token, as SentencePiece or tiktoken write it, or by characters that stand for bytes."""
    if isinstance(piece, bytes):
        return piece
    if byte := _BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("\u2581", " ").encode()


def _text(tokenizer: Any, tokens: list[int]) -> str:
    """Of tokens that go on, up to a character that they do not end."""
    before = ANCHORS[-1]
    anchor = tokenizer.encode(before, add_special_tokens=False)
    text: str = tokenizer.decode([*anchor, *tokens])
    return text.removeprefix(before).partition("\ufffd")[0]


def _continued(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that goes on: SentencePiece puts a space before one that begins."""
    for before in ANCHORS:
        anchor, both = (
            list(tokenizer.encode(each, add_special_tokens=False))
            for each in (before, before + text)
        )
        # Unless a token holds the end of one and the beginning of the other.
        if both[: len(anchor)] == anchor:
            return both[len(anchor) :]
    return list(tokenizer.encode(text, add_special_tokens=False))


def force(scheduler: Any, draft_token_ids: Any) -> dict[str, list[int]]:
    """Put forced tokens in the place of drafts, before vLLM reads them.

    Returns:
        name of a request -> its forced tokens.
    """
    hsd = getattr(scheduler.vllm_config.speculative_config, "hsd", None)
    if hsd is None or hsd.several_drafts or not platform.read_on_host():
        return {}
    found: dict[str, list[int]] = {}
    names, lengths = draft_token_ids.req_ids, scheduler.dynamic_sd_lookup
    # The drafts of a batch that is too large for them are not verified.
    drafts = lengths is None or lengths[len(names)] > 0
    for place, name in enumerate(names if drafts else ()):
        request = scheduler.requests.get(name)
        if request is None or request.is_finished() or request.is_prefill_chunk:
            continue
        if tokens := _forced(scheduler, request, hsd.num_speculative_tokens):
            found[name] = draft_token_ids.draft_token_ids[place] = tokens
    kept = getattr(scheduler, ATTRIBUTE, {}).items()
    old = {name: tokens for name, tokens in kept if name not in names}
    setattr(scheduler, ATTRIBUTE, old | found)
    return found


def _forced(scheduler: Any, request: Any, longest: int) -> list[int]:
    manager = scheduler.structured_output_manager
    if not request.use_structured_output or not _constrained(manager, request):
        return []
    grammar = request.structured_output_request.grammar
    if grammar is None or grammar.is_terminated():
        return []
    keys = request.sampling_params.extra_args or {}
    # The target adds a token to every draft.
    left = request.max_tokens - request.num_output_tokens - 1
    room = max(min(longest, keys.get(NUM_TOKENS, longest), left), 0)
    stops = request.sampling_params.all_stop_token_ids | {manager.tokenizer.eos_token_id}
    tokens = forced_tokens(grammar, manager, stops, room) if room else []
    return grammar.validate_tokens(tokens) if tokens else []


def _constrained(manager: Any, request: Any) -> bool:
    """Whether the grammar applies by now: not while a model reasons, unless it is to."""
    ended = request.structured_output_request.reasoning_ended
    return bool(manager.enable_in_reasoning or manager.reasoner_cls is None or ended)


@REGISTRY.replaces(
    f"{SCHEDULER}._update_after_schedule",
    "self scheduler_output",
    why="tells the worker which drafts of a step a grammar has forced; vLLM hands it their lengths",
    until="vLLM drafts what a grammar forces",
)
def update_after_schedule(original: Any, self: Any, scheduler_output: Any) -> None:
    if waiting := getattr(self, ATTRIBUTE, None):
        running, drafts = (
            scheduler_output.num_scheduled_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
        )
        # What is scheduled for a request that waited may be placeholders by now.
        forced = {
            name: draft
            for name, tokens in waiting.items()
            if (draft := drafts.get(name)) and draft == tokens[: len(draft)]
        }
        setattr(scheduler_output, ATTRIBUTE, forced)
        # A request may wait for its next step, and keeps its draft.
        waiting = {n: t for n, t in waiting.items() if n not in running and n in self.requests}
        setattr(self, ATTRIBUTE, waiting)
    original(self, scheduler_output)


@REGISTRY.replaces_on_runner(
    UPDATE_REQUESTS,
    "self scheduler_output",
    why="verifies what a grammar has forced in the place of the worker's own drafts",
    until="vLLM drafts what a grammar forces",
)
def update_requests(original: Any, speculator: Any, scheduler_output: Any) -> None:
    original(scheduler_output)
    speculator.take_forced(getattr(scheduler_output, ATTRIBUTE, {}))
