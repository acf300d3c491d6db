"""The sampling side of vLLM's V2 runner with tables in the place of models.

vLLM's own request table, sampler, drafter methods and rejection sampler run as in an engine, under
Triton's interpreter; logits of target and drafter are rows of a table that the last token chooses.
"""

from types import SimpleNamespace

import numpy as np
import torch
from support import triton_cpu

triton_cpu.prepare_vllm()

from vllm import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu.input_batch import expand_idx_mapping, post_update  # noqa: E402
from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

from vllm_hsd.runner_v2.sampler import serve  # noqa: E402

CPU = torch.device("cpu")


class TableDrafter:
    """The methods that vLLM's drafters share; `compute_draft_logits` is given rows of a table."""

    _copy_request_inputs = DraftModelSpeculator._copy_request_inputs
    sample_draft = DraftModelSpeculator.sample_draft
    _maybe_predict_acceptance = DraftModelSpeculator._maybe_predict_acceptance

    def __init__(self, slots: int, length: int, vocabulary: int, keeps_rows: bool) -> None:
        self.temperature = torch.zeros(slots)
        self.seeds = torch.zeros(slots, dtype=torch.int64)
        self.idx_mapping = torch.zeros(slots, dtype=torch.int64)
        self.draft_logits = torch.zeros(slots, length, vocabulary) if keeps_rows else None
        self.use_local_argmax_reduction = self.use_fp64_gumbel = False
        self.draft_watermarker = self.acceptance_estimator = None

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        return hidden_states


class TableRunner:
    """Requests that generate with a drafter; all of them take part in every step.

    Args:
        target, draft: float32 [V, V], logits of the next token after each token.
        params: sampling parameters of each request.
        length: draft length K.
        keeps_rows: whether the drafter samples and keeps its rows, or drafts its argmax.
        ours: whether our verifier replaces vLLM's.
        prompt: token that every text starts with.
        prompt_length: how often.
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
        prompt: int = 0,
        prompt_length: int = 1,
    ) -> None:
        self.target, self.draft, self.length = target, draft, length
        self.count, vocabulary = len(params), len(target)
        self.states = RequestState(self.count, 64, 64, length, vocabulary, CPU)
        config = SimpleNamespace(reasoning_config=None, num_speculative_tokens=length)
        self.sampler = Sampler(
            config,
            self.count,
            vocabulary,
            CPU,
            self.states,
            num_speculative_tokens=length + 1,
        )
        spec_config = SimpleNamespace(
            num_speculative_tokens=length,
            enable_adaptive_verification=False,
            rejection_sample_method="block",
            fly_entropy_threshold=None,
            fly_entropy_top_k=None,
        )
        self.drafter = TableDrafter(self.count, length, vocabulary, keeps_rows)
        self.runner = SimpleNamespace(
            sampler=self.sampler,
            rejection_sampler=RejectionSampler(self.sampler, spec_config, CPU),
            speculator=self.drafter,
            speculative_config=spec_config,
            req_states=self.states,
            batch_sharder=None,
            vocab_size=vocabulary,
            device=CPU,
        )
        if ours:
            serve(self.runner)
        for i, given in enumerate(params):
            self.states.add_request(str(i), prompt_length, [prompt] * prompt_length, 0, 64)
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

        Args:
            invalid: bool [rows] as vLLM marks draft tokens that a grammar refuses.
            logits: called with the input tokens of the rows, in the place of the target's table.
        """
        batch = self.input_batch()
        rows = (logits or (lambda tokens: self.target[tokens]))(batch.input_ids.long())
        if self.drafted is None:
            output = self.sampler(rows.clone(), batch)
        else:
            output = self.runner.rejection_sampler(
                rows.clone(), batch, self.drafter.draft_logits, invalid
            )
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
        self.propose()
        return output

    def input_batch(self) -> SimpleNamespace:
        """The fields of vLLM's `InputBatch` that samplers read."""
        last = self.states.last_sampled_tokens[self.slots]
        if self.drafted is None:
            tokens = self.states.all_token_ids.gpu[self.slots, :1].long()
        else:
            tokens = torch.cat((last, self.drafted), 1)
        width = tokens.shape[1]
        total = self.states.total_len.gpu[self.slots]
        starts = torch.arange(self.count + 1, dtype=torch.int32) * width
        expanded, local = expand_idx_mapping(self.slots, self.count * width, starts, width)
        positions = (total - 1)[:, None] + torch.arange(width)
        drafts = width - 1
        seq_lens = (total + drafts).int()
        return SimpleNamespace(
            num_reqs=self.count,
            input_ids=tokens.int().flatten(),
            positions=positions.long().flatten(),
            logits_indices=torch.arange(self.count * width),
            idx_mapping=self.slots,
            idx_mapping_np=self.slots.numpy(),
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            cu_num_logits=starts,
            cu_num_logits_np=starts.numpy(),
            query_start_loc=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            num_draft_tokens=self.count * drafts,
        )

    def propose(self) -> None:
        drafter, states = self.drafter, self.sampler.sampling_states
        drafter._copy_request_inputs(
            self.count, self.slots, states.temperature.gpu, states.seeds.gpu
        )
        token = self.states.last_sampled_tokens[self.slots, 0]
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

    def texts(self) -> list[list[int]]:
        """Tokens of every request, the prompt included."""
        lengths = self.states.total_len.gpu[self.slots].tolist()
        rows = self.states.all_token_ids.gpu[self.slots].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def table(seed: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Normal logits [V, V] of standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(vocabulary, vocabulary)) * spread).float()
