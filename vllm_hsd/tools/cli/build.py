"""`vllm-hsd build`: writes the files that levels read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.tools.cli.options import integers

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


def add_parser(commands: argparse._SubParsersAction) -> None:
    build = commands.add_parser(
        "build", help="write the files that suffix, bigram and exit-head levels read"
    )
    artifacts = build.add_subparsers(required=True, metavar="ARTIFACT")
    store = artifacts.add_parser(
        "store",
        help="collect texts for 'suffix', 'bigram' and 'bigram_model' levels",
        description="Store texts that a level {'suffix': {'store': FILE}} looks in, or "
        "{'bigram': FILE} and {'bigram_model': FILE} count: text files, outputs that were served "
        "(.jsonl or .jsonl.gz: responses of the OpenAI API, chats as 'messages', or "
        "'token_ids'), or chats that the target writes itself.",
        epilog="examples:\n"
        "  vllm-hsd build store --target Qwen/Qwen3-8B --output code.safetensors src/*.py\n"
        "  vllm-hsd build store --target Qwen/Qwen3-8B --output served.safetensors logs.jsonl\n"
        "  vllm-hsd build store --target Qwen/Qwen3-8B --output own.safetensors --chats 1000",
    )
    _add_texts(store, "FILE", "store to write", least="*")
    store.add_argument(
        "--chats", type=int, default=0, metavar="N", help="chats that the target writes itself"
    )
    store.set_defaults(run=build_store)
    heads = artifacts.add_parser(
        "exit-heads",
        help="train heads on the target's layers for 'exit_head' levels",
        description="Train a norm and a head on each of several layers of the target, to match "
        "its last layer; a level {'exit_head': DIR/layer-N} drafts with one.",
        epilog="example:\n"
        "  vllm-hsd build exit-heads --target Qwen/Qwen3-8B --layers 6,12 --output heads chats.txt",
    )
    _add_texts(heads, "DIR", "directory to write; each head goes to DIR/layer-N")
    heads.add_argument(
        "--layers",
        required=True,
        type=integers,
        metavar="N[,N...]",
        help="layers of the target that run below each head, 0 for the embedding alone",
    )
    heads.add_argument("--steps", type=int, default=300, metavar="N", help="optimizer steps")
    heads.set_defaults(run=build_exit_heads)


def _add_texts(
    parser: argparse.ArgumentParser, output: str, written: str, least: str = "+"
) -> None:
    parser.add_argument(
        "--target", required=True, metavar="MODEL", help="the target: a name or a directory"
    )
    parser.add_argument("texts", nargs=least, metavar="TEXT", help="file in UTF-8, one document")
    parser.add_argument("-o", "--output", required=True, metavar=output, help=written)


def build_store(given: argparse.Namespace) -> int:
    """Collect token ids of texts, one document a file, of files of JSON lines (see `served_texts`)
    and of chats that the target writes itself, and store them.
    """
    from vllm_hsd.cascade.text_store import collect_texts, write_store
    from vllm_hsd.tools.cli.served_texts import RECORDS, recorded_outputs, self_written_answers

    if not given.texts and given.chats < 1:
        raise UserError("no texts: give files, or let the target write chats with --chats N.")
    if not 0 <= given.chats <= 1_000_000:
        raise UserError(f"--chats is {given.chats}: it must be 0 to 1000000.")
    directory = Path(given.output).parent
    if not directory.absolute().is_dir() or not os.access(directory.absolute(), os.W_OK):
        raise UserError(f"--output: no directory {quoted(str(directory))} to write to; make it.")
    if Path(given.output).is_dir():
        raise UserError(f"--output: {quoted(given.output)} is a directory: name a file.")
    if Path(given.output).resolve() in {Path(path).resolve() for path in given.texts}:
        raise UserError("--output would write over a text: name another file.")
    # Without chats the target may be a tokenizer alone.
    tokenizer = _tokenizer(given.target)

    def documents() -> Iterator[np.ndarray]:
        for path in given.texts:
            read = recorded_outputs if path.endswith(RECORDS) else _document
            yield from read(path, tokenizer)
        if given.chats:
            yield from self_written_answers(given.target, tokenizer, given.chats)

    store = collect_texts(documents(), _vocab_size(given.target, len(tokenizer)))
    write_store(store, given.output)
    print(
        f"{given.output}: {len(store.tokens)} tokens in {len(store.starts) - 1} texts, over a "
        f"vocabulary of {store.vocab_size}"
    )
    return 0


def build_exit_heads(given: argparse.Namespace) -> int:
    """Train heads, the last tenth of the texts held out, and store each in `output`/layer-K."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_hsd.cascade.exit_head import write_exit_head
    from vllm_hsd.tools.exit_head_training import train_heads

    if given.steps < 1:
        raise UserError(f"--steps is {given.steps}: it must be at least 1.")
    output = Path(given.output).absolute()
    there = next(path for path in (output, *output.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--output: {quoted(str(there))} is no directory to write to.")
    tokenizer = _tokenizer(given.target)
    tokens = np.concatenate([ids for path in given.texts for ids in _document(path, tokenizer)])
    try:
        model = AutoModelForCausalLM.from_pretrained(given.target, dtype="auto")
    except Exception as error:  # packages for quantized weights, damaged files
        raise UserError(
            f"--target: {quoted(given.target)} is not a causal language model ({brief(error)})."
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)  # type: ignore[arg-type]  # transformers hides the signature
    for trained in train_heads(model, given.layers, torch.from_numpy(tokens), given.steps):
        before, after = trained.before, trained.after
        directory = Path(given.output) / f"layer-{trained.head.layer}"
        write_exit_head(trained.head, directory)
        print(
            f"{directory}: held-out divergence {before.divergence:.3f} -> {after.divergence:.3f} "
            f"nats, overlap with the target {before.overlap:.3f} -> {after.overlap:.3f} "
            "(plain early exit -> trained head)"
        )
    return 0


def _tokenizer(target: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except Exception as error:  # tokenizers raises no other for files that it cannot read
        raise UserError(f"--target: {quoted(target)} has no tokenizer ({brief(error)}).") from error


def _vocab_size(target: str, known: int) -> int:
    """Size of the model's distributions, which may be padded; else the tokenizer's size."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(target).get_text_config().vocab_size
    except Exception:  # whatever a config.json makes transformers raise
        return known


def _document(path: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Token ids of a file, int64 [n], ended by the tokenizer's eos if it has one."""
    import numpy as np

    from vllm_hsd.tools.cli.served_texts import encoded, reading

    with reading(path):
        text = Path(path).read_text(encoding="utf-8")
    yield np.array(encoded(text, tokenizer), dtype=np.int64)
