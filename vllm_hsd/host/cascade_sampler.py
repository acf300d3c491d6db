"""The target's samplers by what drafts, and how the runner gets them."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.adaptive_verification import BoundedConfidence
from vllm_hsd.cascade.prediction_lookup import PredictionLookup
from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.config.sizes import reads_texts
from vllm_hsd.errors import UserError
from vllm_hsd.host.base_speculator import BaseSpeculator
from vllm_hsd.host.branches import HostedBranches
from vllm_hsd.host.draft_lengths import GET_DRAFT_TOKENS
from vllm_hsd.host.drawn_branches import DrawnBranches
from vllm_hsd.host.forced_tokens import UPDATE_REQUESTS
from vllm_hsd.host.head_sources import HeadSources
from vllm_hsd.host.hooks import RUNNER, replace_on
from vllm_hsd.host.host_branches import HostBranches
from vllm_hsd.host.host_speculator import HostSpeculator
from vllm_hsd.host.request_parameters import RequestParameters
from vllm_hsd.host.sampler import BlockRejectionSampler
from vllm_hsd.host.stock_drafters import kept_drafts

logger = init_logger(f"vllm.{__name__}")

_SERVED = "method 'hsd' and rejection_sample_method 'hierarchical'"


def serve(runner: Any) -> None:
    """Put our verifier into a V2 model runner that has loaded its models.

    Raises:
        UserError: the runner samples in a way that our verifier does not know.
    """
    sampler, stock = runner.sampler, runner.rejection_sampler
    if sampler is None or stock is None:
        return  # a pipeline stage that does not sample
    if type(sampler).__name__ != "Sampler" or type(stock) is not RejectionSampler:
        raise UserError(
            f"{_SERVED} work with vLLM's own samplers, not with {type(sampler).__name__} and "
            f"{type(stock).__name__}: remove the speculative configuration, or watermarking."
        )
    if runner.batch_sharder is not None:
        raise UserError(f"{_SERVED} do not work with enable_batch_sharded_sampling: remove it.")
    if sampler.use_fp64_gumbel:
        raise UserError(
            f"{_SERVED} draw requests with seeds from vLLM's noise in float32: remove "
            "use_fp64_gumbel."
        )
    speculator, kept = runner.speculator, None
    couples_all = runner.speculative_config.hsd_couples_all
    parameters = RequestParameters(sampler.sampling_states, couples_all)
    if isinstance(speculator, BaseSpeculator | HeadSources):
        speculator.req_states, speculator.parameters = runner.req_states, parameters
        lookup = speculator.lookup
        lookups = [k for k, _ in lookup.lookups] if isinstance(lookup, SourcesLookup) else [lookup]
        parameters.predictions = [each for each in lookups if isinstance(each, PredictionLookup)]
        suffixes = (each for each in lookups if isinstance(each, SuffixLookup))
        if shared := [each.shared for each in suffixes if each.shared is not None]:
            replace_on(runner, f"{RUNNER}.finish_requests", by=(runner.req_states, shared))
    if isinstance(speculator, BaseSpeculator):
        if reads_texts(speculator.hsd.levels):
            size = runner.req_states.all_token_ids.gpu.nbytes / 2**20
            logger.info("The cascade keeps the texts on the device: %.1f MiB.", size)
        replace_on(runner, f"{RUNNER}.sample_tokens", by=speculator)
        if runner.device.type == "cpu":
            replace_on(runner.draft_tokens_handler, GET_DRAFT_TOKENS, by=runner)
        if isinstance(speculator, HostSpeculator):
            replace_on(runner, UPDATE_REQUESTS, by=speculator)
        runner.rejection_sampler = CascadeRejectionSampler(
            sampler, runner.speculative_config, runner.device, parameters, speculator
        )
        if speculator.hsd.branches > 1:
            hosted = runner, speculator.state
            chained = runner.rejection_sampler.chained
            if speculator.several is not None:
                speculator.branches = DrawnBranches(*hosted, speculator.several, chained)
            else:
                assert isinstance(speculator.lookup, SourcesLookup)
                made_for_cpu = isinstance(speculator, HostSpeculator)
                branches = HostBranches if made_for_cpu else HostedBranches
                speculator.branches = branches(*hosted, speculator.lookup, chained)
        return
    if speculator.draft_logits is not None:
        drafted, vocabulary = speculator.draft_logits.shape[-1], runner.vocab_size
        if drafted != vocabulary:
            raise UserError(
                f"the drafter's vocabulary has {drafted} entries, the target's {vocabulary}: set "
                "draft_sample_method to 'greedy', which needs no probabilities of the drafter."
            )
        kept = kept_drafts(speculator, runner.req_states, parameters)
    estimator = getattr(speculator, "acceptance_estimator", None)
    if estimator is not None:
        own = isinstance(speculator, HeadSources)
        speculator.acceptance_estimator = (
            speculator.confidence if own else BoundedConfidence(estimator)
        )
    made: Any = BlockRejectionSampler
    if isinstance(speculator, HeadSources):
        made = partial(HeadSourcesSampler, speculator)
    runner.rejection_sampler = made(
        sampler, runner.speculative_config, runner.device, parameters, kept
    )


class HeadSourcesSampler(BlockRejectionSampler):
    """Verification of drafts that are a head's or a lookup's, request by request."""

    def __init__(self, speculator: HeadSources, *args) -> None:
        super().__init__(*args)
        self.speculator = speculator

    def drafts(self, draft_logits, idx_mapping) -> dict:
        given, drawn = super().drafts(draft_logits, idx_mapping), self.speculator.lookup.drawn
        # A lookup's tokens are point masses.
        temperature = given["draft_temperature"] * drawn[:-1]
        length = self.speculator.draft_length
        return {**given, "draft_temperature": temperature, "draft_length": length}


class CascadeRejectionSampler(BlockRejectionSampler):
    """Verification of a cascade's drafts, which are in the order of the last proposal's batch."""

    def __init__(
        self,
        sampler,
        spec_config,
        device,
        parameters: RequestParameters,
        speculator: BaseSpeculator,
    ) -> None:
        super().__init__(sampler, spec_config, device, parameters, None)
        self.speculator = speculator
        self.level, self.method = speculator.schedule.num_levels, speculator.hsd.drawn_verifier
        # Of a chain; vLLM's list of draft tokens has branches after it.
        self.longest = speculator.state.longest

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        """As the base's, and then the blocks of branches that won are copied to the text's."""
        branches = self.speculator.branches
        if branches is not None:
            branches.begin(input_batch)
        output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        if branches is not None:
            branches.finish()
        return output

    def warm_up_verification(self, *arguments):
        branches = self.speculator.branches
        if branches is not None:
            branches.begin_warm_up(inputs=len(arguments[0]))
        super().warm_up_verification(*arguments)
        if branches is not None:
            branches.step = None

    def emitted(self, result, *arguments, **options):
        branches = self.speculator.branches
        if branches is None:
            return super().emitted(result)
        return branches.follow(result, *arguments, **options)

    def draft_rows(self, draft_logits, max_draft_tokens):
        if max_draft_tokens == 0:
            return None
        return self.speculator.state.rows[-1]

    def drafts(self, draft_logits, idx_mapping) -> dict:
        state, speculator = self.speculator.state, self.speculator
        temperature = self.parameters.temperature * speculator.scales[-1]
        if speculator.drawn is not None:
            # A lookup's tokens are point masses.
            temperature = temperature * speculator.drawn
        return {
            "draft_temperature": temperature,
            "draft_lse": None if state.rows[-1] is None else state.lse[-1],
            "draft_index": state.row_of_slot[idx_mapping.long()],
            "draft_length": state.draft_length,
        }
