"""The dtype in which an engine runs on this CPU: bfloat16 where it works and is faster.

bfloat16 is fastest on some processors, slower than float32 on others, and on some virtual machines
it ends a model with an illegal instruction. So both are tried: two engines with a random model of
the served model's shapes, each in a process of its own, that take turns.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_hsd.checked_files import write_json
from vllm_hsd.errors import UserError, brief
from vllm_hsd.tools import system
from vllm_hsd.tools.engine import MAX_CPU_CACHE, EngineProcess

FAST, EXACT = "bfloat16", "float32"
# Parameters of the random model: too many for any cache, as those of a served model are.
PROBE_PARAMETERS = 64e6
# Tokens per forward pass: of a decoding step without and with speculation.
STEP_TOKENS = (1, 9)
ROUNDS = 7


@dataclass(frozen=True)
class Choice:
    """A dtype and one sentence that says why.

    Attributes:
        lasts: the same is to be found by every process of this machine.
    """

    dtype: str
    reason: str
    lasts: bool = True

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})"


def choose_dtype(model: str, given: Mapping[str, Any] | None = None) -> Choice:
    """`FAST` where this CPU runs it, and runs it faster than `EXACT`; else `EXACT`.

    The probe takes seconds, so its outcome is kept in a file of the user's cache directory, by
    processor, threads, versions and shapes.

    Args:
        model: name or directory of the model to serve; only its configuration is read.
        given: arguments of its engine, of which some say where the configuration is.

    Raises:
        UserError: the model's configuration cannot be read, or float32 does not run either.
    """
    given = given or {}
    config = _config(model, given)
    if (method := _method_of_16_bits(config, given.get("quantization"))) is not None:
        return Choice(FAST, f"vLLM has no kernels of float32 for weights of '{method}'")
    shapes = probe_shapes(config)
    found, threads = system.versions(), os.environ.get("OMP_NUM_THREADS", "")
    parts = [system.processor(), system.cores(), threads, found.get("torch"), found.get("vllm")]
    text = json.dumps([*parts, sorted(system.flags()), sorted(shapes.items())])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-hsd"
    file = cache / f"dtype-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    try:
        return Choice(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # not probed yet, or not by this version
        choice = _probe(shapes)
    if not choice.lasts:
        return choice
    # A home that cannot be written: the next process probes again.
    with contextlib.suppress(OSError, UserError):
        cache.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(choice))
    return choice


def cpu_defaults(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine with what vLLM needs to be told on a CPU.

    Args:
        given: those that the user gave, which stay.

    Raises:
        UserError: as `choose_dtype`.
    """
    found = dict(given)
    if "gpu_memory_utilization" not in found:
        # Two engines may share the memory; weights may take more than any share vLLM is told.
        room = min(MAX_CPU_CACHE, psutil.virtual_memory().available // 8)
        found.setdefault("kv_cache_memory_bytes", room)
    if found.get("dtype", "auto") == "auto":
        found["dtype"] = choose_dtype(model, given).dtype
    return found


def _config(model: str, given: Mapping[str, Any]) -> Any:
    """The model's configuration, of transformers."""
    from transformers import AutoConfig

    keys = {key: given[key] for key in ("revision", "trust_remote_code") if key in given}
    try:
        return AutoConfig.from_pretrained(model, **keys)
    except Exception as error:  # whatever a config.json makes transformers raise
        raise UserError(f"the model '{model}' has no configuration ({brief(error)}).") from None


def _method_of_16_bits(config: Any, given: str | None) -> str | None:
    """A quantization method whose weights vLLM serves in 16 bits alone, if the model has one."""
    every = (getattr(c, "quantization_config", None) for c in (config, config.get_text_config()))
    named = [each.get("quant_method") for each in every if isinstance(each, dict)]
    method = str(next(filter(None, [given, *named]), "")).lower()
    if not method:
        return None
    # AutoRound's name in checkpoints, and vLLM's.
    method = {"auto-round": "inc"}.get(method, method)
    import torch
    from vllm.model_executor.layers.quantization import get_quantization_config

    try:
        kind: Any = get_quantization_config(method)
    except ValueError:  # vLLM says so itself when it reads the model
        return None
    # A method of the class in some, of its objects in others, which look at nothing.
    dtypes = object.__new__(kind).get_supported_act_dtypes()
    return None if torch.float32 in dtypes else method


def probe_shapes(config: Any) -> dict[str, int]:
    """Keys of a Llama configuration with the model's widths and about PROBE_PARAMETERS."""
    config = config.get_text_config()
    hidden = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or max(hidden // 64, 1)
    inner = getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * hidden
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    layers = round(
        PROBE_PARAMETERS / (3 * hidden * inner + 2 * hidden * head_dim * (heads + kv_heads))
    )
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": max(1, min(layers, config.num_hidden_layers)),
    }


def _probe(shapes: Mapping[str, int]) -> Choice:
    with tempfile.TemporaryDirectory() as directory:
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512}
        Path(directory, "config.json").write_text(json.dumps({**llama, **shapes}))
        arguments = {
            "model": directory,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 1,
            "kv_cache_memory_bytes": 1 << 26,
        }
        with (
            EngineProcess({**arguments, "dtype": EXACT}, "the float32 probe") as exact,
            EngineProcess({**arguments, "dtype": FAST}, "the bfloat16 probe") as fast,
        ):
            exact.wait()
            try:
                fast.generate([[1, 2, 3]], {"max_tokens": 4, "ignore_eos": True})
                ratios = [
                    statistics.median(
                        fast.call(forward_seconds, tokens) / exact.call(forward_seconds, tokens)
                        for _ in range(ROUNDS)
                    )
                    for tokens in STEP_TOKENS
                ]
            except UserError as error:
                if any(engine.ended_by(signal.SIGKILL) for engine in (fast, exact)):
                    why = "the system ended a probe of bfloat16, as it does where memory is short"
                    return Choice(EXACT, why, lasts=False)
                why = f"bfloat16 does not run on this CPU: {brief(error)}"
                return Choice(EXACT, why, lasts=fast.ended_by(signal.SIGILL))
    figures = " and ".join(f"{ratio:.2f}" for ratio in ratios)
    reason = (
        f"a bfloat16 step over {' and '.join(map(str, STEP_TOKENS))} tokens takes {figures} of a "
        "float32 step's time on this CPU"
    )
    return Choice(FAST if math.prod(ratios) < 1 else EXACT, reason)


def forward_seconds(llm: Any, tokens: int) -> float:
    """CPU time of one pass through all linear layers; runs in the engine's process."""
    return llm.apply_model(lambda model: _pass_seconds(model, tokens))[0]


def _pass_seconds(model: Any, tokens: int) -> float:
    import torch

    weight = next(model.parameters())
    hidden = torch.full((tokens, model.config.hidden_size), 0.5, dtype=weight.dtype)
    with torch.inference_mode():
        began = time.process_time()
        for layer in model.model.layers:
            attention = layer.self_attn
            projected, _ = attention.qkv_proj(hidden)
            attention.o_proj(projected[:, : attention.q_size].contiguous())
            layer.mlp(hidden)
        return time.process_time() - began
