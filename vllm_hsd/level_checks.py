"""Checks of a cascade against its target, before any weights are loaded."""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.tokenizers.registry import get_tokenizer

from vllm_hsd.checked_files import check_safetensors
from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.bigram import bigram_vocab_size, read_bigram
from vllm_hsd.core.exit_head import EXIT_ARCHITECTURES, exit_head_header, read_exit_head
from vllm_hsd.core.suffix import suffix_tree_class
from vllm_hsd.core.suffix_store import SuffixStore, read_store, store_vocab_size
from vllm_hsd.core.vocabulary import differing_token
from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.level_config import (
    BigramLevelConfig,
    Eagle3LevelConfig,
    EarlyExitLevelConfig,
    ExitHeadLevelConfig,
    LevelConfig,
    ModelLevelConfig,
    NgramModelLevelConfig,
    SourceConfig,
    SuffixLevelConfig,
    reads_late,
    sources,
)

logger = init_logger(f"vllm.{__name__}")

# Kinds that run layers of the target, for other rows than the target does.
_WITHOUT_ADAPTERS = ("early_exit", "exit_head")


def target_mistakes(model_config: ModelConfig, parallel_config: ParallelConfig) -> Iterator[str]:
    """Why the target cannot be served with a cascade: a sentence for each reason."""
    if parallel_config.pipeline_parallel_size > 1:
        yield (
            "method 'hsd' does not run with pipeline parallelism: set pipeline_parallel_size to 1."
        )
    if parallel_config.data_parallel_size > 1 and model_config.is_moe:
        yield (
            "method 'hsd' runs data-parallel with dense targets only, whose ranks do not wait for "
            f"each other: set data_parallel_size to 1 for {quoted(model_config.model)}."
        )
    if parallel_config.decode_context_parallel_size > 1:
        yield "method 'hsd' does not run with decode_context_parallel_size above 1: set it to 1."
    if model_config.is_hybrid or model_config.is_attention_free:
        yield (
            f"method 'hsd' cannot take back rejected tokens of the target "
            f"{quoted(model_config.model)}, which keeps recurrent state: use an attention-only "
            "target."
        )
    if model_config.uses_mrope:
        yield (
            "method 'hsd' does not serve targets with multi-dimensional positions (M-RoPE) such "
            f"as {quoted(model_config.model)}: use a text-only target."
        )


def check_level(name: str, level: SourceConfig, target_config: ModelConfig) -> None:
    """Check a level, or a source of one, that loads no model against the target.

    Args:
        name: what messages call it, "levels[i]".
        level: its keys.
        target_config: vLLM's configuration of the target.

    Raises:
        UserError: names the level, its key and its file.
    """
    if isinstance(level, EarlyExitLevelConfig | ExitHeadLevelConfig):
        found = target_config.architecture
        if found not in EXIT_ARCHITECTURES:
            raise UserError(
                f"{name}.{level.kind} works with the targets {', '.join(EXIT_ARCHITECTURES)}, not "
                f"{found}: use another kind of level."
            )
    if isinstance(level, EarlyExitLevelConfig):
        layers = target_config.hf_text_config.num_hidden_layers
        if level.early_exit > layers:
            raise UserError(
                f"{name}.early_exit is {level.early_exit}, but the target has {layers} layers: "
                "lower it."
            )
    elif isinstance(level, ExitHeadLevelConfig):
        with _named(name):
            _check_exit_head(level.exit_head, target_config)
    elif isinstance(level, BigramLevelConfig):
        with _named(name):
            _check_bigram(level.bigram, target_config)
    elif isinstance(level, NgramModelLevelConfig):
        with _named(name):
            store = _check_store("ngram_model", level.ngram_model, target_config)
            if len(store.tokens) == len(store.starts) - 1:
                raise UserError(
                    f"ngram_model: {quoted(level.ngram_model)} has no text of two tokens: build it "
                    "from longer texts."
                )
    elif isinstance(level, SuffixLevelConfig):
        with _named(name):
            suffix_tree_class()
        with _named(f"{name}.suffix"):
            if level.suffix.store is not None:
                _check_store("store", level.suffix.store, target_config)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the level in front of messages that begin with its key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}.{error}") from error


def _check_bigram(path: str, target_config: ModelConfig) -> None:
    _check_size("bigram", path, bigram_vocab_size(path), target_config)
    read_bigram(path)


def _check_store(key: str, path: str, target_config: ModelConfig) -> SuffixStore:
    _check_size(key, path, store_vocab_size(path, key), target_config)
    return read_store(path, key)


def _check_size(key: str, path: str, size: int, target_config: ModelConfig) -> None:
    vocabulary = target_config.get_vocab_size()
    if size != vocabulary:
        raise UserError(
            f"{key}: {quoted(path)} was built for {size} tokens and the target has {vocabulary}: "
            "build it with the target's tokenizer."
        )


def _check_exit_head(path: str, target_config: ModelConfig) -> None:
    header = exit_head_header(path)
    needed = (target_config.get_vocab_size(), target_config.get_hidden_size())
    if header.shape != needed:
        raise UserError(
            f"exit_head: {quoted(path)} has the shape {header.shape} and the target needs "
            f"{needed}: train it for this target."
        )
    layers = target_config.hf_text_config.num_hidden_layers
    if header.layer > layers:
        raise UserError(
            f"exit_head: {quoted(path)} sits on layer {header.layer}, but the target has {layers}: "
            "train it for this target."
        )
    read_exit_head(path)


def engine_mistakes(hsd: CascadeConfig, arguments: EngineArgs) -> Iterator[str]:
    """A sentence for every level that does not work with other arguments of the engine."""
    levels = [sources(level) for level in hsd.levels]
    for i, level in enumerate(levels):
        if arguments.enable_lora and level[-1].kind in _WITHOUT_ADAPTERS:
            yield (
                f"levels[{i}].{level[-1].kind} runs layers of the target, which does not work with "
                "LoRA adapters: remove the level or enable_lora."
            )
    if mistake := connector_mistake(hsd, arguments):
        yield mistake


def connector_mistake(hsd: CascadeConfig, arguments: EngineArgs) -> str | None:
    """A sentence if a KV connector would take caches that a level has not filled yet."""
    # It takes what a step has computed, and a level that reads late has not.
    used = [
        key
        for key in ("kv_transfer_config", "kv_offloading_size")
        if getattr(arguments, key) is not None
    ]
    late = [
        "adaptive" if hsd.adaptive else f"levels[{i}].first_of"
        for i, level in enumerate(hsd.levels)
        if reads_late(level) or (hsd.adaptive and sources(level)[-1].kind in ("model", "eagle3"))
    ]
    if not used or not late:
        return None
    return (
        f"{late[0]} fills the cache of a model no sooner than the model drafts, too late for a "
        f"KV connector: remove {late[0]} or {used[0]}."
    )


def check_exit_order(levels: Sequence[LevelConfig | None]) -> None:
    """Check that every exit of the target runs more layers than the exits below it.

    Args:
        levels: of the cascade; None for one that is not looked at.

    Raises:
        UserError: names both levels.
    """
    exits = []
    for i, level in enumerate(levels):
        if level is None:
            continue
        # Only the last source of a level can be an exit.
        source = sources(level)[-1]
        if isinstance(source, EarlyExitLevelConfig):
            exits.append((f"levels[{i}].early_exit", source.early_exit))
        elif isinstance(source, ExitHeadLevelConfig):
            exits.append((f"levels[{i}].exit_head", exit_head_header(source.exit_head).layer))
    for (lower, below), (upper, above) in itertools.pairwise(exits):
        if above <= below:
            raise UserError(
                f"{upper} runs {above} layers of the target and cannot improve on {lower}, which "
                f"runs {below}: order exits by depth, or keep one."
            )


@config
class DraftConfig(SpeculativeConfig):
    """vLLM's configuration of one drafter; its vocabulary is checked by `_check_model`."""

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Our own message names the level and explains padded vocabularies."""


def draft_config(
    name: str,
    level: ModelLevelConfig | Eagle3LevelConfig,
    draft_length: int,
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
    config_class: type[DraftConfig],
) -> DraftConfig:
    """vLLM's configuration of one draft model, which parses the per-model keys.

    Args:
        name: what messages call the level, "levels[i]".
        level: its keys.
        draft_length: tokens that it drafts at a time.
        target_model_config: of the target.
        target_parallel_config: of the target.
        config_class: class of the result.

    Raises:
        UserError: no such model, damaged weights, a key that vLLM refuses, or another vocabulary.
    """
    key = f"{name}.{level.kind}"
    model = os.path.expanduser(level.path)
    looks_local = os.path.isabs(model) or level.path.startswith((".", "~"))
    if looks_local and not os.path.isdir(model):
        raise UserError(f"{key}: no directory {quoted(level.path)}; give a model's path or name.")
    if os.path.isdir(model):
        _check_weights(key, model)
    tp = target_parallel_config.tensor_parallel_size
    if level.model_keys.get("draft_tensor_parallel_size", tp) != tp:
        raise UserError(
            f"{name}.draft_tensor_parallel_size is "
            f"{quoted(level.draft_tensor_parallel_size)} and the target's "
            f"tensor_parallel_size {tp}: they must be equal, leave the key out."
        )
    is_head = isinstance(level, Eagle3LevelConfig)
    try:
        parsed = config_class(
            method="eagle3" if is_head else "draft_model",
            model=level.path,
            num_speculative_tokens=draft_length,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
            **level.model_keys,
        )
    except ValidationError as error:
        fault = error.errors()[0]
        loc = fault["loc"][0] if fault["loc"] else ""
        where = str(loc) if loc in level.model_keys else f"{level.kind} {quoted(level.path)}"
        reason = brief(fault["msg"].removeprefix("Value error, "))
        raise UserError(f"{name}.{where}: vLLM refuses it ({reason}).") from error
    except Exception as error:  # whatever a config.json makes vLLM or transformers raise
        raise UserError(
            f"{key} {quoted(level.path)} cannot be loaded as a drafter: {_reason(error)}."
        ) from error
    _check_model(
        f"{key} {quoted(level.path)}", parsed.draft_model_config, target_model_config, is_head
    )
    if hasattr(parsed.draft_model_config.hf_config, "ptd_token_id"):
        raise UserError(
            f"{key} {quoted(level.path)} drafts all tokens in parallel, which levels do not: use "
            "a head that drafts one token after the other, or vLLM's own method 'eagle3'."
        )
    return parsed


def _check_weights(key: str, directory: str) -> None:
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            check_safetensors(path)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error


def _check_model(
    named: str, draft_config: ModelConfig, target_config: ModelConfig, is_head: bool
) -> None:
    if draft_config.is_hybrid or draft_config.is_attention_free:
        raise UserError(
            f"{named} keeps recurrent state and cannot take back rejected "
            "tokens: use an attention-only drafter."
        )
    _check_vocabulary(named, draft_config, target_config, is_head)


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
    except (OSError, ValueError):
        return None


def _token(tokens: dict[str, int], token_id: int) -> str:
    return next(token for token, known in tokens.items() if known == token_id)


@contextlib.contextmanager
def loading(named: str) -> Iterator[None]:
    """Name the level and the model in whatever loading its weights raises.

    Args:
        named: what the message calls them, "levels[i].model 'path'".

    Raises:
        UserError: the weights are damaged or do not fit the model's config.json.
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
