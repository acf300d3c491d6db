"""Changes to the installed vLLM before an engine starts: other releases and other plugins."""

import functools


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
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    del GPUModelRunner._input_fits_in_drafter


def wrapped_before() -> None:
    """Another plugin that was loaded before ours."""
    _wrap_by_another_plugin()


def wrapped_after() -> None:
    """Another plugin that was loaded after ours."""
    from vllm_hsd import plugin
    from vllm_hsd.runner_v1 import hooks

    plugin.register()
    hooks.install()
    _wrap_by_another_plugin()


def rebuilt_logits_processors() -> None:
    """Another plugin that builds an empty list without calling anything."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.worker import gpu_model_runner

    gpu_model_runner.build_logitsprocs = lambda *args, **kwargs: LogitsProcessors()


def foreign_logits_processor() -> None:
    """Another plugin that adds a processor of its own."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.worker import gpu_model_runner

    class Foreign(MinPLogitsProcessor.__base__):
        __init__ = apply = update_state = lambda self, *args: None
        is_argmax_invariant = lambda self: False  # noqa: E731

    gpu_model_runner.build_logitsprocs = lambda *args, **kwargs: LogitsProcessors([Foreign()])


def _wrap_by_another_plugin() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.worker import gpu_model_runner

    for owner, name in (
        (EngineArgs, "create_speculative_config"),
        (SamplingParams, "_validate_spec_decode"),
        (RejectionSampler, "__init__"),
        (gpu_model_runner, "build_logitsprocs"),
        (gpu_model_runner.GPUModelRunner, "_update_states"),
        (gpu_model_runner.GPUModelRunner, "sample_tokens"),
    ):
        setattr(owner, name, _passing_on(getattr(owner, name)))


def _passing_on(original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        return original(*args, **kwargs)

    return call
