"""vLLM's configuration of a draft model, checked before any weights are loaded."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from vllm.config.model import ModelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.tokenizers.registry import get_tokenizer
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from vllm_hsd.cascade.vocabulary import differing_token
from vllm_hsd.checked_files import check_safetensors
from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.levels.base import Target

logger = init_logger(f"vllm.{__name__}")


@config(repr=False)
class DraftConfig(SpeculativeConfig):
    """vLLM's configuration of one drafter, whose vocabulary is checked here."""

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Our own message names the level and explains padded vocabularies."""


def draft_config(
    name: str,
    kind: str,
    path: str,
    keys: Mapping[str, Any],
    draft_length: int,
    target: Target,
    method: Literal["draft_model", "eagle3", "mtp"],
) -> SpeculativeConfig:
    """vLLM's configuration of one draft model, which parses the per-model keys.

    Args:
        name: what messages call the level, "levels[i]".
        path: path or name of the model.
        keys: vLLM's per-model keys that were given.
        draft_length: tokens that it drafts at a time.
        method: vLLM's name of such a drafter.

    Raises:
        UserError: no such model, damaged weights, a key that vLLM refuses, or another vocabulary.
    """
    key = f"{name}.{kind}"
    model = os.path.expanduser(path)
    looks_local = os.path.isabs(model) or path.startswith((".", "~"))
    if looks_local and not os.path.isdir(model):
        raise UserError(f"{key}: no directory {quoted(path)}; give a model's path or name.")
    for weights in sorted(Path(model).glob("*.safetensors")) if os.path.isdir(model) else ():
        try:
            check_safetensors(weights)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
    tp = target.parallel_config.tensor_parallel_size
    if keys.get("draft_tensor_parallel_size", tp) != tp:
        raise UserError(
            f"{name}.draft_tensor_parallel_size is "
            f"{quoted(keys['draft_tensor_parallel_size'])} and the target's "
            f"tensor_parallel_size {tp}: they must be equal, leave the key out."
        )
    try:
        parsed = DraftConfig(
            method=method,
            model=model,
            num_speculative_tokens=draft_length,
            target_model_config=target.model_config,
            target_parallel_config=target.parallel_config,
            **keys,
        )
    except ValidationError as error:
        fault = error.errors()[0]
        loc = fault["loc"][0] if fault["loc"] else ""
        where = str(loc) if loc in keys else f"{kind} {quoted(path)}"
        reason = brief(fault["msg"].removeprefix("Value error, "))
        raise UserError(f"{name}.{where}: vLLM refuses it ({reason}).") from error
    except NotImplementedError as error:
        raise UserError(
            f"{key}: {quoted(path)} has nothing that vLLM runs as method '{method}': use another "
            "kind of level."
        ) from error
    except Exception as error:  # whatever a config.json makes vLLM or transformers raise
        raise UserError(
            f"{key} {quoted(path)} cannot be loaded as a drafter: {_reason(error)}."
        ) from error
    named, model_config = f"{key} {quoted(path)}", parsed.draft_model_config
    is_head = any("Eagle3" in name for name in model_config.architectures)
    known_as = "eagle3" if is_head else parsed.method
    if known_as != method:
        # vLLM also goes by words in the path.
        raise UserError(
            f"{named} is a drafter of method '{known_as}' to vLLM: give it as such a level, or a "
            "plain model a path without that word."
        )
    if model_config.is_hybrid or model_config.is_attention_free or model_config.is_encoder_decoder:
        raise UserError(
            f"{named} has an encoder, or keeps recurrent state and cannot take back rejected "
            "tokens: use an attention-only decoder."
        )
    _check_vocabulary(named, model_config, target.model_config, method != "draft_model")
    if hasattr(model_config.hf_config, "ptd_token_id"):
        raise UserError(
            f"{named} drafts all tokens in parallel, which levels do not: use "
            "a head that drafts one token after the other, or vLLM's own method 'eagle3'."
        )
    name_layers(parsed)
    return parsed


def name_layers(config: SpeculativeConfig) -> None:
    """Have vLLM's V2 runner read the layers that a head names where its V1 runner alone looks."""
    if config.method != "eagle3" or get_eagle3_aux_layers_from_config(config) is not None:
        return
    own, key = config.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids"
    nested = getattr(own, "eagle_config", None)
    if isinstance(nested, Mapping) and nested.get(key):
        setattr(own, key, nested[key])


def _check_vocabulary(
    named: str, draft_config: ModelConfig, target_config: ModelConfig, is_head: bool
) -> None:
    """Token ids must mean the same; a model may pad the logits of one tokenizer differently."""
    theirs, ours = target_config.get_vocab_size(), draft_config.get_vocab_size()
    sizes = (
        f"{named} has a vocabulary of {ours} tokens and the target "
        f"{quoted(target_config.model)} one of {theirs}"
    )
    if is_head and ours != theirs:
        raise UserError(f"{sizes}: use a head of this target.")
    if target_config.skip_tokenizer_init and ours == theirs:
        return
    drafts = _tokens(draft_config.model, draft_config)
    targets = _tokens(target_config.tokenizer, target_config)
    if drafts is None or targets is None:
        # A drafter only ever sees token ids, so it may come without tokenizer files.
        if ours != theirs:
            raise UserError(
                f"{sizes}, and there are not two tokenizers to compare: use a drafter whose "
                f"config.json has vocab_size {theirs}, or give both models tokenizer files."
            )
        return
    differing = differing_token(drafts, targets)
    if differing is not None:
        raise UserError(
            f"{named} has another tokenizer than {quoted(target_config.tokenizer)}: token "
            f"{differing} is {quoted(_token(drafts, differing))} in one and "
            f"{quoted(_token(targets, differing))} in the other; use a drafter with the target's "
            "tokenizer."
        )
    if ours != theirs:
        logger.info(
            "%s; one tokenizer, padded differently: the level drafts tokens that both have.", sizes
        )


def _tokens(path: str, config: ModelConfig) -> dict[str, int] | None:
    """Id of every token of a tokenizer; None without its files."""
    try:
        return get_tokenizer(path, trust_remote_code=config.trust_remote_code).get_vocab()
    except Exception:  # whatever the files of a tokenizer make a library raise
        return None


def _token(tokens: dict[str, int], token_id: int) -> str:
    return next(token for token, known in tokens.items() if known == token_id)


@contextlib.contextmanager
def loading(named: str) -> Iterator[None]:
    """Make a UserError that begins with `named`, "levels[i].model 'path'", of whatever loading a
    model's weights raises.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{named} cannot be loaded ({_reason(error)}): check that its "
            "weights are complete and fit its config.json."
        ) from error


def _reason(error: BaseException) -> str:
    """An exception's message, or where it was raised if it has none."""
    text = brief(error)
    if text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name}" if frames else type(error).__name__
