"""The rules for the keys of method "hsd", written a second time and without vllm_hsd.

`is_valid` is the oracle of the configuration fuzzer; `valid_cascade` draws what it must accept.
"""

import math
import random

LOOKUPS = ("ngram", "suffix")
TABLES = {"bigram", "ngram_model"}
SOURCE_KEYS = {"model", "early_exit", "exit_head", "ngram", "suffix", "eagle3"} | TABLES
SUFFIX_KEYS = {"store", "shared_tokens", "min_acceptance"}
KIND_KEYS = SOURCE_KEYS | {"first_of"}
ONLY_LOWEST = (*LOOKUPS, "first_of", "eagle3")
SAMPLING_KEYS = {"stopping", "temperature_scale"}
VERIFYING_KEYS = {"verifier", "max_rounds"}
VLLM_KEYS = {
    "attention_backend",
    "code_revision",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "quantization",
    "revision",
}
TOP_KEYS = {"num_speculative_tokens", "levels", "verifier", "horizontal_tokens", "adaptive"}
VERIFIERS = ("block", "hierarchical", "standard")


def _valid_adaptive(value: object) -> bool:
    if not isinstance(value, dict):
        return type(value) is bool
    profile = value.get("profile")
    return value.keys() <= {"profile"} and (
        profile is None or (isinstance(profile, str) and profile != "")
    )


def is_valid(raw: object) -> bool:
    """Whether a cascade (without its key `method`) may be served, whatever the target."""
    keys = plain_keys(raw)
    if keys is None or not keys.keys() <= TOP_KEYS:
        return False
    longest, levels = keys.get("num_speculative_tokens"), keys.get("levels")
    horizontal = keys.get("horizontal_tokens", 0)
    if not _whole(longest, 1, 128) or not _whole(horizontal, 0, longest - 1):
        return False
    if not _one_of(keys.get("verifier", "block"), VERIFIERS):
        return False
    if not _valid_adaptive(keys.get("adaptive", False)):
        return False
    if not isinstance(levels, list) or not 1 <= len(levels) <= 16:
        return False
    if not all(_valid_level(level, i, len(levels), longest) for i, level in enumerate(levels)):
        return False
    if (
        keys.get("adaptive", False) is not False
        and len(levels) > 1
        and any(map(has_eagle3, levels))
    ):
        return False
    if horizontal and len(levels) == 1:
        return False
    # Level j asks the one below for a token less than it passes up, and level 0 needs one.
    for j, level in enumerate(levels):
        passes = plain_keys(level).get("num_tokens") or longest
        if j == len(levels) - 1:
            passes = longest - horizontal
        if j > 0 and min(passes, longest - horizontal) < j + 1:
            return False
    return True


def has_eagle3(raw: object) -> bool:
    """Whether a level is an EAGLE-3 head or has one among its sources."""
    level = plain_keys(raw) or {}
    return any(
        "eagle3" in (plain_keys(source) or {}) for source in [level, *level.get("first_of", [])]
    )


def plain_keys(raw: object) -> dict | None:
    """The mapping with underscores, None if it is not a mapping of texts or repeats a key."""
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        return None
    keys = {key.replace("-", "_"): value for key, value in raw.items()}
    return keys if len(keys) == len(raw) else None


def _valid_level(raw: object, place: int, count: int, longest: int) -> bool:
    level = plain_keys(raw)
    if level is None:
        return False
    kinds = sorted(KIND_KEYS & level.keys())
    if len(kinds) != 1:
        return False
    kind = kinds[0]
    if kind == "first_of":
        known = {kind, "num_tokens", "min_acceptance"}
        if not level.keys() <= known or not _valid_sources(level[kind]):
            return False
        if not _share(level.get("min_acceptance", 0)):
            return False
    elif not _valid_keys(kind, level):
        return False
    tokens = level.get("num_tokens")
    if tokens is not None and not _whole(tokens, 1, longest):
        return False
    if place == count - 1 and tokens not in (None, longest):
        return False
    if place < count - 1 and tokens is None:
        return False
    if kind in ONLY_LOWEST and place > 0:
        return False
    verifier, rounds = level.get("verifier"), level.get("max_rounds")
    if verifier is not None and not (place > 0 and _one_of(verifier, VERIFIERS)):
        return False
    return rounds is None or (place > 0 and _whole(rounds, 1, 128))


def _valid_sources(raw: object) -> bool:
    if not isinstance(raw, list) or not 1 <= len(raw) <= 8:
        return False
    for i, given in enumerate(raw):
        source = plain_keys(given)
        kinds = [] if source is None else sorted(SOURCE_KEYS & source.keys())
        if source is None or len(kinds) != 1 or not _valid_keys(kinds[0], source):
            return False
        if kinds[0] not in LOOKUPS and i < len(raw) - 1:
            return False
        if any(source.get(key) is not None for key in ("num_tokens", "verifier", "max_rounds")):
            return False
    return True


def _valid_keys(kind: str, level: dict) -> bool:
    """Whether the keys belong to the kind, and the values that need no place in a cascade."""
    known = {kind, "num_tokens"}
    if kind not in LOOKUPS:
        known |= SAMPLING_KEYS
    if kind not in ONLY_LOWEST:
        known |= VERIFYING_KEYS
    if kind in ("model", "eagle3"):
        known |= VLLM_KEYS
    if not level.keys() <= known or not _valid_kind(kind, level[kind]):
        return False
    context = level.get("max_model_len")
    if context is not None and not _whole(context, 1, math.inf):
        return False
    scale = level.get("temperature_scale", 1)
    return _one_of(level.get("stopping", "fixed"), ("fixed", "entropy")) and (
        type(scale) in (int, float) and 0.01 <= scale <= 100
    )


def _valid_kind(kind: str, value: object) -> bool:
    if kind == "early_exit":
        return _whole(value, 1, 10_000)
    if kind == "ngram":
        if not isinstance(value, dict) or not value.keys() <= {"max", "min"}:
            return False
        largest, smallest = value.get("max", 4), value.get("min", 1)
        return _whole(largest, 1, 1024) and _whole(smallest, 1, largest)
    if kind == "suffix":
        if not isinstance(value, dict) or not value.keys() <= SUFFIX_KEYS:
            return False
        if not _share(value.get("min_acceptance", 0)):
            return False
        store = value.get("store")
        return (store is None or _name(store)) and _whole(value.get("shared_tokens", 0), 0, 1 << 24)
    return _name(value)


def _share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _name(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\ud800" not in value


def _whole(value: object, low: float, high: float) -> bool:
    return type(value) is int and low <= value <= high


def _one_of(value: object, names: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in names


def valid_cascade(rng: random.Random, models: list[str], lookups: dict[str, object]) -> dict:
    """A random cascade that must be accepted.

    Args:
        rng: the source of randomness.
        models: names of draft models.
        lookups: kind -> value of levels that can stand at the bottom.
    """
    longest = rng.randint(6, 20)
    count = rng.randint(1, 4)
    levels = []
    for place in range(count):
        kinds = {"model": rng.choice(models)}
        if place == 0:
            kinds |= lookups
        kind = rng.choice(sorted(kinds))
        level = {kind: kinds[kind]}
        if kind in lookups and rng.random() < 0.4:
            # The rest of the level's keys go to a model below.
            first = {key: lookups[key] for key in LOOKUPS if key in lookups}
            sources = [{key: value} for key, value in first.items() if rng.random() < 0.7]
            kind, level = "first_of", {"first_of": [*sources, level]}
        if place < count - 1:
            level["num_tokens"] = rng.randint(place + 1, 5)
        if kind not in (*LOOKUPS, "first_of") and rng.random() < 0.3:
            level["stopping"] = rng.choice(["fixed", "entropy"])
        if kind not in (*LOOKUPS, "first_of") and rng.random() < 0.3:
            level["temperature_scale"] = rng.choice([0.5, 1, 2.0])
        if place and rng.random() < 0.3:
            level["max_rounds"] = rng.randint(1, 3)
        if place and rng.random() < 0.3:
            level["verifier"] = rng.choice(VERIFIERS)
        levels.append(level)
    cascade = {"num_speculative_tokens": longest, "levels": levels}
    if rng.random() < 0.5:
        cascade["verifier"] = rng.choice(VERIFIERS)
    if count > 1 and rng.random() < 0.3:
        cascade["horizontal_tokens"] = rng.randint(0, longest - count)
    if rng.random() < 0.3 and (count == 1 or not any(map(has_eagle3, levels))):
        cascade["adaptive"] = rng.random() < 0.5
    return cascade
