"""Makes the installed vLLM look like one that this package does not know."""


def other_release() -> None:
    import vllm

    vllm.__version__ = "0.99.0"


def other_parameters() -> None:
    from vllm.sampling_params import SamplingParams

    def _validate_spec_decode(self, speculative_config, another=None):
        return None

    SamplingParams._validate_spec_decode = _validate_spec_decode
