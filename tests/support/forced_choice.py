"""A choice between a lookup and a head by the last token, and a fault of it."""

import torch


def install() -> None:
    """Both sources win, where the head alone would before long: it is accepted more often."""
    from vllm_hsd.budget.source_choice import SourcesLookup

    offer = SourcesLookup.offer

    def forced(self, state, text):
        offer(self, state, text)
        slots, last = state.slot.long(), (state.end - 1).clamp(min=0).long()
        wins = state.window[torch.arange(state.batch), last].long() % self.count
        # Nothing that was expected has become of the others.
        self.own[:, :, slots] = 0.0
        self.own[0, :, slots] = -self.prior
        self.own[0, wins, slots] = 0.0

    SourcesLookup.offer = forced


def install_drawn_lookups() -> None:
    """The same choice, and a lookup's tokens are verified as if the head had drawn them."""
    from vllm_hsd.host.cascade_sampler import HeadSourcesSampler

    install()
    right = HeadSourcesSampler.drafts

    def drafts(self, draft_logits, idx_mapping):
        found = right(self, draft_logits, idx_mapping)
        return {**found, "draft_temperature": self.parameters.temperature}

    HeadSourcesSampler.drafts = drafts
