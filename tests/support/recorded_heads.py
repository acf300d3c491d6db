"""Patches for engines with a head: its drafts are noted; faults."""

from typing import Any
from unittest import mock

from support import engines
from support.hosted_branches import runner_of

from vllm_hsd.host import unread_states
from vllm_hsd.tools.audit.mutants import replace

HEAD = "vllm_hsd.host.target_head:ProgramHead"
FEW = 8
# (verified text, draft tokens after it) -> what the head makes of it
_NOTED: dict[tuple, Any] = {}


def run(llm, jobs: dict[str, dict]) -> tuple[dict, dict]:
    """The jobs, and what was noted of them."""
    return engines.run_jobs(llm, jobs), _NOTED


def install() -> None:
    """Note the next token by the head after each text of greedy requests."""
    from vllm_hsd.cascade.schedule import Draft

    def recorded(forward, self, state, op, num_logits):
        logits = forward(self, state, op, num_logits)
        text = self.speculator.req_states.all_token_ids.gpu
        window = self.speculator.schedule.window
        running = state.drafted[-1] < state.requested[-1]
        # Next to lookups that adapt it is a level above them, which drafts token by token.
        open_ = op.step < state.requested[0] if isinstance(op, Draft) else running
        drafts = running & open_ & (state.temperature[op.level] == 0)
        for b in drafts.nonzero()[:, 0].tolist():
            verified = text[state.slot[b], : int(state.base[b]) + window].tolist()
            drafted = state.window[b, window : state.end[b]].tolist()
            _NOTED[tuple(verified), tuple(drafted)] = int(logits[b].argmax())
        return logits

    replace(f"{HEAD}.forward", recorded)


def run_with_vllm_drafter(llm, jobs: dict[str, dict]) -> tuple[dict, dict]:
    """The jobs, and of greedy requests: text -> (draft of vLLM's drafter, whether the head's)."""
    from vllm_hsd.host.head_sources import HeadSources

    runner, noted = runner_of(llm), {}
    speculator, states = runner.speculator, runner.req_states
    temperature, propose = runner.sampler.sampling_states.temperature.np, speculator.propose

    def recorded(batch, *read, **options):
        drafts = propose(batch, *read, **options)
        # vLLM 0.33 wants none in the last step of all requests.
        if options.get("num_speculative_tokens") == 0:
            return drafts
        for b, slot in enumerate(batch.idx_mapping_np[: batch.num_reqs].tolist()):
            text = states.all_token_ids.gpu[slot, : states.total_len.gpu[slot]].tolist()
            if len(text) <= states.prefill_len.np[slot] or temperature[slot]:
                continue
            draft, is_own = drafts[b].tolist(), True
            if isinstance(speculator, HeadSources):
                draft = draft[: speculator.draft_length[slot]]
                is_own = bool(speculator.lookup.drawn[slot])
            noted[tuple(text)] = draft, is_own
        return drafts

    with mock.patch.object(speculator, "propose", recorded):
        return engines.run_jobs(llm, jobs), noted


def shift() -> None:
    """The head reads each state a position too late."""

    def take_states(take, self, batch, final, inner):
        take(self, batch, final, [states.roll(1, 0) for states in inner])

    replace(f"{HEAD}.take_states", take_states)


def keep_own_states() -> None:
    """The head keeps what it has computed of drafts from its own states."""

    def read_last(read, self, batch):
        reading = self.inputs.reading
        last = self.inputs.last[:batch] % reading.query_length
        places = reading.slot_mapping.view(len(reading.slot_mapping), reading.batch, -1)
        for b, place in enumerate(last.tolist()):
            places[:, b, :place] = -1
        return read(self, batch)

    def keep_last(keep, self, slot, states):
        self.restart(slot, self.first[slot] + self.count[slot] + len(states) - 1)
        keep(self, slot, states[-1:])

    replace(f"{HEAD}._read", read_last)
    replace("vllm_hsd.host.unread_states:UnreadStates.keep", keep_last)


def keep_few() -> None:
    """Of a text the head reads the last FEW states alone."""
    unread_states.MOST = FEW


def leave_stale() -> None:
    """What is not read is what other requests have left."""
    replace(f"{HEAD}._clear", lambda clear, self, *where: None)


def hurry() -> None:
    """In later rounds the head reads the last token alone."""

    def draft_first(draft, self, state, back):
        return draft(self, state, back) if back == 0 else None

    replace(f"{HEAD}._draft", draft_first)


def verify_colder() -> None:
    """Levels verify what is below them as if it were drawn at a tenth of its temperature."""

    def colder(verify, *args, draft_temperature, draft_lse, **kwargs):
        return verify(*args, draft_temperature=draft_temperature / 10, draft_lse=None, **kwargs)

    replace("vllm_hsd.cascade.program:verify_chain_padded", colder)
