"""The sampling side of vLLM's runner with tables in the place of models.

vLLM's own code runs as in an engine; logits of target and drafter are rows of a table that the last
token chooses. So the distribution of a text is known exactly.
"""

from types import SimpleNamespace

import numpy as np
import torch
from support.exact_joint_distribution import joint_distribution_of
from support.table_drafters import CPU, TableCascade, TableDrafter, tables
from torch.nn.functional import pad
from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import expand_idx_mapping, post_update
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_hsd.host.cascade_sampler import serve

# Sampling parameters that change a distribution.
CASES = {
    "temperature 1": {},
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k at 1.3": {"top_k": 4, "temperature": 1.3},
    "min_p": {"min_p": 0.15, "temperature": 1.2},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "allowed tokens": {"allowed_token_ids": [0, 2, 3, 5]},
}


class TableRunner:
    """Requests that generate with a drafter; all of them take part in every step.

    Args:
        target, draft: float32 [V, V], logits of the next token after each token.
        length: of drafts; with 0 the sampler draws without speculation.
        keeps_rows: whether the drafter samples and keeps its rows, or drafts its argmax.
        ours: whether our verifier replaces vLLM's.
        prompt_length: tokens 0 that every text starts with.
        cascade: as configured, of levels {"model": table [V, V]}, in the place of `draft`.
        couples_all: as of a configuration with "verifier": "coupled".
        adapts: whether drafts have confidences, for vLLM's adaptive verification.
    """

    def __init__(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        params: list[dict],
        *,
        length: int,
        keeps_rows: bool = True,
        ours: bool = True,
        prompt_length: int = 1,
        cascade: dict | None = None,
        couples_all: bool = False,
        drafter: str = "StandaloneARSpeculator",
        adapts: bool = False,
    ) -> None:
        self.target, self.draft, self.length = target, draft, length
        self.count, vocabulary = len(params), len(target)
        self.states = RequestState(self.count, 64, 64, length, vocabulary, CPU)
        config = SimpleNamespace(reasoning_config=None, num_speculative_tokens=length)
        self.sampler = Sampler(
            config, self.count, vocabulary, CPU, self.states, num_speculative_tokens=length + 1
        )
        spec_config = SimpleNamespace(
            num_speculative_tokens=length,
            enable_adaptive_verification=adapts,
            rejection_sample_method="block",
            fly_entropy_threshold=None,
            fly_entropy_top_k=None,
            hsd_couples_all=couples_all,
        )
        made = type(drafter, (TableDrafter,), {"__module__": "vllm.tables"})
        self.drafter = made(self.count, length, vocabulary, keeps_rows)
        if adapts:
            self.drafter.acceptance_estimator = OnlineAcceptanceEstimator(self.count, length, CPU)
        if cascade is not None:
            cascade = {**cascade, "enable_adaptive_verification": adapts}
            self.drafter = TableCascade(cascade, self.states, draft)
        self.runner = SimpleNamespace(
            sampler=self.sampler,
            rejection_sampler=RejectionSampler(self.sampler, spec_config, CPU),
            speculator=self.drafter,
            speculative_config=spec_config,
            req_states=self.states,
            batch_sharder=None,
            vocab_size=vocabulary,
            device=CPU,
            sample_tokens=None,
            draft_tokens_handler=SimpleNamespace(get_draft_tokens=None),
        )
        if ours:
            serve(self.runner)
        np.random.seed(0)  # requests without a seed get theirs from it
        for i, given in enumerate(params):
            self.states.add_request(str(i), prompt_length, [0] * prompt_length, 0, 64)
            slot = self.states.req_id_to_index[str(i)]
            self.sampler.add_request(slot, SamplingParams(**given, detokenize=False))
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        slots = [self.states.req_id_to_index[str(i)] for i in range(self.count)]
        self.slots = torch.tensor(slots)
        self.drafted: torch.Tensor | None = None
        self.accepted = self.verified = 0

    def step(self, invalid: torch.Tensor | None = None, logits=None):
        """One step of the target, then a proposal; returns vLLM's `SamplerOutput`.

        `invalid` draft tokens [rows] are refused by a grammar; `logits` of input tokens may stand
        in the place of the target's table.
        """
        batch = self.input_batch()
        rows = (logits or (lambda tokens: self.target[tokens]))(batch.input_ids.long())
        # In the memory of a head, which vLLM pads.
        rows = pad(rows, (0, -rows.shape[1] % 64))[:, : rows.shape[1]]
        if self.drafted is None or self.length == 0:
            output = self.sampler(rows, batch)
        else:
            output = self.runner.rejection_sampler(rows, batch, self.drafter.draft_logits, invalid)
            self.verified += self.count * self.length
            self.accepted += int(output.num_sampled.sum()) - self.count
        post_update(
            self.slots,
            self.states.num_computed_tokens.gpu,
            self.states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            batch.query_start_loc,
            self.states.all_token_ids.gpu,
            self.states.total_len.gpu,
        )
        self.propose(output.num_sampled, output.num_rejected)
        return output

    def input_batch(self) -> SimpleNamespace:
        """The fields of vLLM's `InputBatch` that samplers read."""
        if self.drafted is None:
            tokens = self.states.all_token_ids.gpu[self.slots, :1].long()
        else:
            tokens = torch.cat((self.states.last_sampled_tokens[self.slots], self.drafted), 1)
        starts = torch.arange(self.count + 1, dtype=torch.int32) * tokens.shape[1]
        return self.batch_of(tokens, starts, starts.numpy(), starts)

    def batch_of(self, tokens, starts, host_starts, queries) -> SimpleNamespace:
        """Of [requests, n] tokens, of which each request has as many as `starts` says."""
        widths, longest, rows = starts.diff(), tokens.shape[1], int(starts[-1])
        committed = self.states.total_len.gpu[self.slots]
        inside = torch.arange(longest) < widths[:, None]
        positions = (committed - 1)[:, None] + torch.arange(longest)
        expanded, local = expand_idx_mapping(self.slots, rows, starts, longest)
        return SimpleNamespace(
            num_reqs=self.count,
            input_ids=tokens[inside].int(),
            positions=positions[inside].long(),
            logits_indices=torch.arange(rows),
            idx_mapping=self.slots,
            idx_mapping_np=self.slots.numpy(),
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            cu_num_logits=starts,
            cu_num_logits_np=host_starts,
            query_start_loc=queries,
            seq_lens=(committed + widths - 1).int(),
            seq_lens_cpu_upper_bound=(committed + longest - 1).int(),
            num_draft_tokens=rows - self.count,
        )

    def propose(self, *num_tokens: torch.Tensor) -> None:
        if isinstance(self.drafter, TableCascade):
            states = self.sampler.sampling_states
            drafted = self.drafter.drafts(self.slots, states, *num_tokens).clone()
            self.drafted = drafted[:, : self.drafter.asked or None]
            return
        drafter, states = self.drafter, self.sampler.sampling_states
        token = self.states.last_sampled_tokens[self.slots, 0]
        if self.length == 0:
            self.drafted = token[:, None][:, :0]
            return
        if type(drafter).__name__ == "DFlashSpeculator":
            self.drafted = self._drafted_at_once(token)
            return
        drafter._copy_request_inputs(
            self.count, self.slots, states.temperature.gpu, states.seeds.gpu
        )
        columns = []
        for step in range(self.length):
            token = drafter.sample_draft(
                self.draft[token],
                self.states.total_len.gpu[self.slots].long() - 1 + step,
                drafter.idx_mapping,
                drafter.temperature,
                drafter.seeds,
                torch.tensor(step),
                drafter.draft_logits,
            )
            columns.append(token)
        self.drafted = torch.stack(columns, 1)

    def _drafted_at_once(self, token: torch.Tensor) -> torch.Tensor:
        """All places from rows after the last token, without `_copy_request_inputs`."""
        drafter, places = self.drafter, torch.arange(self.length, dtype=torch.int32)
        drafter.seeds.copy_(self.sampler.sampling_states.seeds.gpu)
        begins = self.states.total_len.gpu[self.slots].long() - 1
        found = drafter.sample_draft(
            self.draft[token].repeat_interleave(self.length, 0),
            (begins[:, None] + places).flatten(),
            self.slots.repeat_interleave(self.length),
            None,
            drafter.seeds,
            places.repeat(self.count),
            drafter.draft_logits,
        )
        return found.view(self.count, self.length)

    def texts(self) -> list[list[int]]:
        """Tokens of every request, the prompt included."""
        lengths = self.states.total_len.gpu[self.slots].tolist()
        rows = self.states.all_token_ids.gpu[self.slots].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def joint(params, length):
    """Exact distribution of the first `length` tokens after token 0 of the target's table."""
    target = tables()[0].double().numpy()
    return joint_distribution_of(
        lambda texts: target[[text[-1] for text in texts]], [0], length, params
    )
