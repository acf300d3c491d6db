"""Train the tiny models: one tokenizer, a target, two drafters distilled from it, a store of texts.

    python -m benchmarks.models.train                # the committed models; about 40 minutes
    python -m benchmarks.models.train --scale 0.1 --output /tmp/models

The text is the Python standard library of the interpreter that runs this script (sources with
their docstrings; no tests, no generated tables). The target learns the next token. Mid and small
then learn the target's distribution, both from one pass of the target: first by Kullback-Leibler
divergence and gradually by total variation, because 1 - total variation = sum_v min(p(v), q(v))
is the acceptance rate of speculative decoding. Half of their text was sampled from the target
itself, since a drafter meets text that the target wrote.

Weights are trained in float32 (matrix products in bfloat16 where the CPU has AVX512_BF16) and
stored in float16 to keep the repository small; config.json asks for float32.
"""

import argparse
import functools
import json
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from benchmarks.common import write_csv
from vllm_hsd.core.text_store import collect_texts, write_store
from vllm_hsd.host import flags

HERE = Path(__file__).parent
EOS = "<|endoftext|>"
VOCAB_SIZE = 257  # every byte, and EOS
SEQUENCE = 256  # bytes; every fourth batch has sequences four times as long
MAX_POSITIONS = 1024
BATCH_TOKENS = 2048
SEED = 20
LIBRARY_STEP, LIBRARY_BYTES = 4, 1500
SHAPES = {
    "target": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=6,
                   num_attention_heads=4, num_key_value_heads=2, head_dim=64),
    "mid": dict(hidden_size=192, intermediate_size=640, num_hidden_layers=2,
                num_attention_heads=3, num_key_value_heads=1, head_dim=64),
    "small": dict(hidden_size=128, intermediate_size=512, num_hidden_layers=1,
                  num_attention_heads=4, num_key_value_heads=4, head_dim=32),
}  # fmt: skip
SKIPPED_DIRECTORIES = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings",
    "pydoc_data", "lib-dynload", "__phello__",
}  # fmt: skip


def library_files() -> tuple[list[Path], list[Path]]:
    """Standard-library sources as (training files, held-out files: one in 25, by path)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata holds the paths of the machine that built Python.
        if SKIPPED_DIRECTORIES & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        parts[zlib.crc32(name.as_posix().encode()) % 25 == 0].append(path)
    return parts


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8; entry 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts as one stream of token ids, int64 [n], each text ended by EOS."""
    encoded = tokenizer.backend_tokenizer.encode_batch(texts)
    return torch.tensor([i for e in encoded for i in (*e.ids, tokenizer.eos_token_id)])


def write_library(tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Store bytes from the middle of every n-th training file, for lookups and n-gram models."""
    files = library_files()[0][::LIBRARY_STEP]
    whole = [path.read_text(errors="ignore") for path in files]
    texts = [text[len(text) // 2 :][:LIBRARY_BYTES] for text in whole]
    documents = [encode(tokenizer, [text]).numpy() for text in texts]
    write_store(collect_texts(documents, VOCAB_SIZE), str(output / "library.safetensors"))


def new_model(name: str, eos: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
        **SHAPES[name],
    )
    return LlamaForCausalLM(config).float()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write float16 weights with a config that asks for float32, and round `model` alike."""
    model.half().save_pretrained(directory)
    model.float()
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class Batches:
    """Endless random batches, int64 [BATCH_TOKENS / length, length + 1], of a token stream."""

    def __init__(self, stream: torch.Tensor, generator: torch.Generator):
        self.stream, self.generator = stream, generator
        self.waiting: dict[int, list[torch.Tensor]] = {}

    def draw(self, length: int) -> torch.Tensor:
        waiting = self.waiting.setdefault(length, [])
        count = BATCH_TOKENS // length
        if len(waiting) < count:
            # A new pass over the text, cut at another offset.
            first = int(torch.randint(length, (), generator=self.generator))
            windows = self.stream[first:].unfold(0, length + 1, length)
            order = torch.randperm(len(windows), generator=self.generator)
            waiting.extend(windows[i] for i in order)
        batch = torch.stack(waiting[:count])
        del waiting[:count]
        return batch


class Optimizer:
    """Muon on the layers' matrices, AdamW on embeddings and norms; warm-up, then cosine decay.

    Muon (Jordan et al., 2024) orthogonalizes each update. In one early comparison at 4096 tokens
    a batch (Muon without decay of the rate, AdamW with it) it reached after 90 steps the held-out
    loss, 4.82 nats, that AdamW alone reached after 270.
    """

    def __init__(self, model: LlamaForCausalLM, peak: float, steps: int):
        self.model = model
        layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
        inside = {id(p) for p in layers}
        others = [p for p in model.parameters() if id(p) not in inside]
        muon = torch.optim.Muon(layers, peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(others, peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.parts = [muon, adam]
        warm = max(1, min(50, steps // 10))

        def rate(step: int) -> float:
            return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))

        self.schedules = [torch.optim.lr_scheduler.LambdaLR(part, rate) for part in self.parts]

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part in (*self.parts, *self.schedules):
            part.step()
        self.model.zero_grad()


def logits_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token logits, float32 [batch * length, vocabulary]."""
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16()):
        logits = model(tokens, use_cache=False).logits
    return logits.float().flatten(0, 1)


@functools.cache
def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 natively (Linux names the flag avx512_bf16)."""
    return "avx512_bf16" in flags()


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Mean negative log-likelihood, nats per token, over 16 Ki held-out tokens."""
    windows = stream[: 2**14 + 1].unfold(0, SEQUENCE + 1, SEQUENCE)
    parts = [F.cross_entropy(logits_of(model, w[:, :-1]), w[:, 1:].flatten())
             for w in windows.split(16)]  # fmt: skip
    return float(torch.stack(parts).mean())


class Log:
    """Rows of loss.csv: what each model's training loss and held-out loss were, and when."""

    def __init__(self, steps: dict[str, int], held_out: torch.Tensor):
        self.rows: list[dict] = []
        self.steps, self.held_out, self.start = steps, held_out, time.time()
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, model, step: int, loss: float) -> None:
        sums = self.sums.setdefault(name, [])
        sums.append(loss)
        every = max(1, self.steps[name] // 25)
        if (step + 1) % every and step + 1 != self.steps[name]:
            return
        row = dict(model=name, step=step + 1, tokens=(step + 1) * BATCH_TOKENS,
                   seconds=round(time.time() - self.start),
                   train_loss=round(sum(sums) / len(sums), 4),
                   held_out_nats=round(held_out_loss(model, self.held_out), 4))  # fmt: skip
        sums.clear()
        self.rows.append(row)
        print(*(f"{k}={v}" for k, v in row.items()), flush=True)

    def write(self, path: Path) -> None:
        write_csv(path, self.rows, torch.get_num_threads())


def train_target(model, text: Batches, steps: int, log: Log) -> None:
    optimizer = Optimizer(model, 3e-3, steps)
    for step in range(steps):
        tokens = text.draw(SEQUENCE if step % 4 else 4 * SEQUENCE)
        loss = F.cross_entropy(logits_of(model, tokens[:, :-1]), tokens[:, 1:].flatten())
        optimizer.step(loss)
        log.add("target", model, step, loss.item())


@torch.no_grad()
def sample_stream(model: LlamaForCausalLM, text: Batches, sequences: int) -> torch.Tensor:
    """Text sampled from `model` at temperature 1 after 32 bytes of real text, int64 [n]."""
    parts = []
    for count in range(0, sequences, 128):
        starts = torch.cat([text.draw(SEQUENCE)[:, :32] for _ in range(16)])
        parts.append(model.generate(
            starts, attention_mask=torch.ones_like(starts), do_sample=True, top_k=0,
            max_new_tokens=SEQUENCE - 32, min_new_tokens=SEQUENCE - 32,
        ))  # fmt: skip
        print(f"sampled {min(count + 128, sequences)} of {sequences} sequences", flush=True)
    return torch.cat(parts).flatten()


def distill(teacher, students: dict, sources: list[Batches], steps: int, log: Log) -> None:
    """Fit every student to the teacher; the loss moves from KL to total variation."""
    optimizers = {n: Optimizer(m, 4e-3, steps) for n, m in students.items()}
    for step in range(steps):
        source = sources[step % len(sources)]
        tokens = source.draw(4 * SEQUENCE if step % 8 in (0, 1) else SEQUENCE)[:, :-1]
        with torch.no_grad():
            probs = logits_of(teacher, tokens).softmax(-1)
        share = step / steps
        for name, student in students.items():
            log_q = logits_of(student, tokens).log_softmax(-1)
            divergence = F.kl_div(log_q, probs, reduction="batchmean")
            variation = 0.5 * (log_q.exp() - probs).abs().sum(-1).mean()
            optimizers[name].step((1 - share) * divergence + 3 * share * variation)
            log.add(name, student, step, variation.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the training steps")
    parser.add_argument("--threads", type=int, default=1, help="2 helps only on idle cores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    transformers_logging.set_verbosity_error()
    steps = {"target": 2000, "mid": 4000, "small": 4000}
    steps = {name: max(2, round(n * options.scale)) for name, n in steps.items()}

    train_files, held_out_files = library_files()
    texts = [p.read_text(errors="ignore") for p in train_files]
    tokenizer = train_tokenizer(texts)
    stream = encode(tokenizer, texts)
    held_out = encode(tokenizer, [p.read_text(errors="ignore") for p in held_out_files])
    print(f"{len(train_files)} files, {len(stream)} training tokens; "
          f"{len(held_out_files)} files, {len(held_out)} held-out tokens")  # fmt: skip

    generator = torch.Generator().manual_seed(SEED)
    text, log = Batches(stream, generator), Log(steps, held_out)
    target = new_model("target", tokenizer.eos_token_id)
    train_target(target, text, steps["target"], log)
    save(target, tokenizer, options.output / "target")

    sampled = sample_stream(target.eval(), text, 128 * max(1, round(24 * options.scale)))
    students = {name: new_model(name, tokenizer.eos_token_id) for name in ("mid", "small")}
    distill(target, students, [text, Batches(sampled, generator)], steps["mid"], log)
    for name, model in students.items():
        save(model, tokenizer, options.output / name)
    log.write(options.output / "loss.csv")
    write_library(tokenizer, options.output)


if __name__ == "__main__":
    main()
