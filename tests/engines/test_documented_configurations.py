"""Every speculative configuration shown in the README and in docs/ starts an engine."""

import copy
import itertools
import json
import re
from pathlib import Path

import pytest
from support.engines import run_engine
from support.level_files import write_level_files

from vllm_hsd.tools.audit.tiny_models import Family

REPOSITORY = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted(REPOSITORY.glob("docs/*.md"))))


def documented_configurations() -> dict[str, dict]:
    """ "page, number" -> each speculative configuration that code blocks show, once."""
    found: dict[str, dict] = {}
    for page in PAGES:
        blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", (REPOSITORY / page).read_text(), re.M | re.S)
        configs = [config for block in blocks for config in _configurations(block)]
        found |= {f"{page}, {i}": c for i, c in enumerate(configs) if c not in found.values()}
    return found


def _configurations(block: str) -> list[dict]:
    # Python's comments and trailing commas are not JSON.
    block = re.sub(r",(\s*[}\]])", r"\1", re.sub(r"\s#.*", "", block))
    decoder, position, found = json.JSONDecoder(), 0, []
    while (position := block.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(block, position)
        except ValueError:
            position += 1
            continue
        parts = value, value.get("speculative_config")
        found += [part for part in parts if isinstance(part, dict) and "method" in part]
    return found


def with_tiny_models(config: dict, family: Family, directory: Path) -> dict:
    """The configuration with every model, head and store replaced by a tiny one."""
    files = write_level_files(family.target, directory, vocab_size=family.vocabulary)
    if "model" in config:
        config["model"] = files.eagle3 if config["method"] == "eagle3" else family.mid
    models, layers = iter([family.small, family.mid]), itertools.count(1)
    given = config.get("levels", [])
    for level in [*given, *(source for outer in given for source in outer.get("sources", []))]:
        # Of a real checkpoint.
        level.pop("max_model_len", None)
        if "store" in level.get("suffix", {}):
            level["suffix"]["store"] = files.store
        if "eagle3" in level:
            level["eagle3"] = files.eagle3
        if "model" in level:
            level["model"] = next(models)
        if "early_exit" in level:
            # Exits must be ordered by depth, and the target has two layers.
            level["early_exit"] = next(layers)
    return config


CONFIGURATIONS = documented_configurations()
GREEDY = {
    "prompts": [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(4)],
    "params": {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def plain(family) -> list:
    return run_engine({"model": family.target}, {"greedy": GREEDY})["greedy"]["outputs"]


def test_the_readme_shows_a_cascade_and_block_verification():
    shown = [config for name, config in CONFIGURATIONS.items() if name.startswith("README.md")]
    assert any(config["method"] == "hsd" for config in shown)
    assert any("rejection_sample_method" in config for config in shown)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_serves_greedy_requests_as_no_speculation_does(family, plain, name, tmp_path):
    config = with_tiny_models(copy.deepcopy(CONFIGURATIONS[name]), family, tmp_path)
    engine = {"model": family.target, "speculative_config": config}
    assert run_engine(engine, {"greedy": GREEDY})["greedy"]["outputs"] == plain
