"""The commands `vllm-hsd bigram` and `vllm-hsd train-heads`, which write what levels read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def add_parsers(commands: argparse._SubParsersAction) -> None:
    """Add both commands to the parser of `vllm-hsd`."""
    bigram = commands.add_parser("bigram", help="count a corpus for levels of the kind 'bigram'")
    bigram.add_argument(
        "--tokenizer", required=True, help="the target: a folder or name of a model"
    )
    bigram.add_argument("corpus", nargs="+", help="text files in UTF-8")
    bigram.add_argument("-o", "--output", required=True, metavar="FILE", help="table to write")
    bigram.set_defaults(run=_run_bigram)
    heads = commands.add_parser(
        "train-heads", help="train heads on the target's layers for levels of the kind 'exit_head'"
    )
    heads.add_argument("--target", required=True, help="folder or name of a Llama-like model")
    heads.add_argument(
        "--layers", required=True, nargs="+", type=int, metavar="K", help="one head each"
    )
    heads.add_argument("--texts", required=True, nargs="+", metavar="FILE", help="files in UTF-8")
    heads.add_argument("--steps", type=int, default=300, help="optimiser steps (default: 300)")
    heads.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="every head goes to DIR/layer-K"
    )
    heads.set_defaults(run=_run_train_heads)


def build_bigram(tokenizer: str, corpus: Sequence[str], output: str) -> str:
    """Count a corpus and store the table.

    Args:
        tokenizer: folder or name of the target.
        corpus: text files, one document each.
        output: file to write.

    Returns:
        one line that says what was written.

    Raises:
        ValueError: one sentence that names the argument.
    """
    from vllm_hsd.core.bigram import count_bigrams, write_bigram

    if not Path(output).absolute().parent.is_dir():
        raise ValueError(f"output: no directory '{Path(output).parent}' to write to; make it.")
    known = _tokenizer("tokenizer", tokenizer)
    table = count_bigrams(_documents("corpus", corpus, known), _vocabulary(tokenizer, len(known)))
    write_bigram(table, output)
    return (
        f"{output}: {int(table.pairs.data.sum())} pairs of tokens, {table.pairs.nnz} of them "
        f"different, over a vocabulary of {table.vocab_size}"
    )


def build_heads(
    target: str, layers: Sequence[int], texts: Sequence[str], output: str, steps: int
) -> Iterator[str]:
    """Train heads and store them in `output`/layer-K.

    Args:
        target: folder or name of a Llama-like model.
        layers: layers that run below each head.
        texts: text files; the last tenth of them is held out.
        output: directory to write.
        steps: optimiser steps.

    Yields:
        a line for every head, with its divergence and overlap on the held-out text.

    Raises:
        ValueError: one sentence that names the argument.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_hsd.core.exit_head import write_exit_head
    from vllm_hsd.core.exit_head_training import train_heads

    if steps < 1:
        raise ValueError(f"steps is {steps}, must be at least 1.")
    tokens = np.concatenate(list(_documents("texts", texts, _tokenizer("target", target))))
    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"target: '{target}' is no causal language model ({reason}).") from error
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    for trained in train_heads(model, layers, torch.from_numpy(tokens), steps):
        head, before, after = trained.head, trained.before, trained.after
        directory = Path(output) / f"layer-{head.layer}"
        write_exit_head(head, directory)
        yield (
            f"{directory}: held-out divergence {before.divergence:.3f} -> {after.divergence:.3f} "
            f"nats, overlap with the target {before.overlap:.3f} -> {after.overlap:.3f} "
            "(plain early exit -> trained head)"
        )


def _run_bigram(arguments: argparse.Namespace) -> int:
    try:
        print(build_bigram(arguments.tokenizer, arguments.corpus, arguments.output))
    except (OSError, ValueError) as error:
        print(f"vllm-hsd bigram: {error}", file=sys.stderr)
        return 2
    return 0


def _run_train_heads(arguments: argparse.Namespace) -> int:
    try:
        for line in build_heads(
            arguments.target, arguments.layers, arguments.texts, arguments.output, arguments.steps
        ):
            print(line)
    except (OSError, ValueError) as error:
        print(f"vllm-hsd train-heads: {error}", file=sys.stderr)
        return 2
    return 0


def _tokenizer(argument: str, name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{argument}: '{name}' has no tokenizer ({reason}).") from error


def _vocabulary(name: str, known: int) -> int:
    """Width of the model's rows, which may be padded; without a model, what the tokenizer knows."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name).get_text_config().vocab_size
    except (OSError, ValueError):
        return known


def _documents(argument: str, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator:
    """Token ids of every file, int64 [n], ended by the tokenizer's eos if it has one."""
    import numpy as np

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{argument}: cannot read '{path}' ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{argument}: '{path}' is not text in UTF-8.") from error
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        yield np.array(ids + end, dtype=np.int64)
