"""Requests whose texts a suffix lookup continues, and the comparison with its plain rule."""

import numpy as np
import torch
from support.proposal_states import MAX_NUM_REQS, GuardedState, poison, schedule_of

from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.cascade.text_order import OrderedTexts, order_texts
from vllm_hsd.cascade.text_store import collect_texts
from vllm_hsd.tools.lookup_level import Texts
from vllm_hsd.tools.planner.suffix_level import SuffixLevel


class Requests:
    """Texts, of committed tokens and tokens drafted after them, in a state amid poisoned memory."""

    def __init__(self, texts, requested, length=8, device="cpu") -> None:
        schedule = schedule_of(length, lookup=True)
        self.guarded = GuardedState(schedule, len(texts), lookup=True, device=device)
        state, window = self.guarded.state, schedule.window
        longest = max(len(text) for text, _ in texts)
        self.text = poison(torch.empty(MAX_NUM_REQS, longest + 3, dtype=torch.int32, device=device))
        poison(state.window)
        self.tokens = np.zeros((len(texts), longest + 2 * length), np.int32)
        self.ends = np.zeros(len(texts), np.int64)
        self.committed = np.array([len(text) for text, _ in texts])
        self.requested = np.array(requested)
        for b, (text, drafted) in enumerate(texts):
            slot, base = MAX_NUM_REQS - 1 - b, len(text) - window
            whole = torch.from_numpy(np.append(text, drafted).astype(np.int32))
            self.text[slot, : len(text)] = whole[: len(text)]
            state.slot[b], state.base[b], state.start[0, b] = slot, base, window
            state.window[b, : len(whole) - base] = whole[base:]
            state.end[b], state.requested[0, b] = len(whole) - base, requested[b]
            self.tokens[b, : len(whole)], self.ends[b] = whole.numpy(), len(whole)
        self.state = state

    def compare(self, texts=None, min_acceptance=0.05, shared=None) -> list[int]:
        """Offers and drafts of the kernels equal the reference's; counts of the drafts."""
        rows = np.arange(len(self.ends))
        ring = None if shared is None else shared.tokens.cpu().numpy()
        plain = SuffixLevel(texts, min_acceptance, ring)
        plain.read(Texts(self.tokens, rows, rows, self.committed))
        inputs = Texts(self.tokens, rows, rows, self.ends), self.requested
        each, taken = plain.lookup_each(*inputs), plain.lookup(*inputs)
        ends = self.state.end.clone()
        device = self.text.device
        stored = None if texts is None else OrderedTexts(*(part.to(device) for part in texts))
        offers = SuffixLookup(stored, min_acceptance, device, shared)(self.state, self.text)
        token_ids, confidence = offers.token_ids.cpu().numpy(), offers.confidence.cpu().numpy()
        width = taken.token_ids.shape[1]
        for source, expected in enumerate(each):
            assert offers.counts[source].tolist() == expected.counts.tolist()
            assert (token_ids[source, :, :width] == expected.token_ids).all()
            assert (confidence[source, :, :width] == expected.confidence).all()
        assert self.state.drafted[0].tolist() == taken.counts.tolist()
        assert (self.state.end - ends).tolist() == taken.counts.tolist()
        for b, (end, count) in enumerate(zip(ends.tolist(), taken.counts, strict=True)):
            found = self.state.window[b, end : end + count].tolist()
            assert found == taken.token_ids[b, :count].tolist()
        self.guarded.assert_guards()
        return taken.counts.tolist()


def markov(rng, length, vocabulary):
    """[length] tokens of a chain with few likely successors."""
    rows = rng.dirichlet(np.full(vocabulary, 0.15), size=vocabulary).cumsum(1)
    text = [0]
    while len(text) < length:
        text.append(int(np.searchsorted(rows[text[-1]], rng.random())) % vocabulary)
    return np.array(text)


def store_of(*texts, vocabulary=100) -> OrderedTexts:
    """The order of some texts, on the host."""
    return order_texts(collect_texts(list(map(np.array, texts)), vocabulary), "cpu")
