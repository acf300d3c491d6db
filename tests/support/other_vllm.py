"""Changes to the installed vLLM before an engine starts: other releases and other plugins."""

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from vllm_hsd.tools.audit.mutants import replace

FAVORED = 17


def other_release() -> None:
    import vllm

    vllm.__version__ = "0.99.0"


def other_parameters() -> None:
    from vllm.sampling_params import SamplingParams

    def _validate_spec_decode(self, speculative_config, another=None):
        return None

    SamplingParams._validate_spec_decode = _validate_spec_decode


def missing_method() -> None:
    """A runner that no longer has a method that is replaced."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    del GPUModelRunner.prepare_attn


def missing_entrance() -> None:
    """A vLLM that reads configurations by a function of another name."""
    from vllm.engine.arg_utils import EngineArgs

    renamed = EngineArgs.create_speculative_config
    del EngineArgs.create_speculative_config

    def for_its_caller(self, name):
        if name != renamed.__name__:
            raise AttributeError(name)
        return renamed.__get__(self)

    EngineArgs.__getattr__ = for_its_caller


class Favors(LogitsProcessor):
    """Another plugin's processor of logits, which leaves one token."""

    def apply(self, logits, context):
        logits[:, FAVORED] += 1000.0
        return logits


def wrap() -> None:
    """Another plugin that wraps what ours replaces."""
    for name in (
        "engine.arg_utils:EngineArgs.create_speculative_config",
        "sampling_params:SamplingParams._validate_spec_decode",
        "v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__init__",
        "v1.worker.gpu.model_runner:GPUModelRunner.load_model",
        "v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
        "v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        "v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
    ):
        replace(f"vllm.{name}", lambda original, *args, **kwargs: original(*args, **kwargs))
