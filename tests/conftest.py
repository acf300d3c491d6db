"""Session fixtures (tiny models), and the order of test files."""

import os

import pytest
from support import engines

from vllm_hsd.tools.audit import tiny_models

os.environ.update(engines.ENVIRONMENT)

# The longest first, then all other files that start engines: parallel runs end together.
LONGEST = (
    "test_launches_compile.py",
    "test_branches.py",
    "test_serve.py",
    "test_verify.py",
    "test_level_checks.py",
    "test_cascade_exact.py",
    "test_level_kinds.py",
    "test_adaptive.py",
    "test_head_levels.py",
    "test_recurrent_targets.py",
    "test_seeds.py",
    "test_simulated_serving.py",
    "test_damaged_drafters.py",
    "test_forced_tokens.py",
    "test_mrope.py",
    "test_wheel.py",
    "test_gpu_proof.py",
    "test_hooks.py",
)
WITH_ENGINES = ("engines", "host", "robustness", "cli", "test_engine.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n 2 --dist loadfile --no-loadscope-reorder`, no long file is left for last."""

    def place(item: pytest.Item) -> int:
        if item.path.name in LONGEST:
            return LONGEST.index(item.path.name)
        engines = {item.path.name, item.path.parent.name} & set(WITH_ENGINES)
        return len(LONGEST) if engines else len(LONGEST) + 1

    items.sort(key=place)


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> tiny_models.Family:
    """Vocabulary of 64, peaked distributions."""
    return tiny_models.build_family(tmp_path_factory.mktemp("family"), vocabulary=64, peak=4.0)


@pytest.fixture(scope="session")
def small_vocabulary(tmp_path_factory) -> tiny_models.Family:
    """Vocabulary of 5: the joint distribution of a few tokens has few outcomes."""
    return tiny_models.build_family(tmp_path_factory.mktemp("small"), vocabulary=5, peak=1.5)


@pytest.fixture(scope="session")
def text_family(tmp_path_factory) -> tiny_models.Family:
    """Models with a byte-level tokenizer."""
    tokenizer = tiny_models.byte_tokenizer()
    directory = tmp_path_factory.mktemp("text")
    family = tiny_models.build_family(directory, vocabulary=len(tokenizer), peak=4.0)
    for path in (family.target, family.mid, family.small):
        tokenizer.save_pretrained(path)
    return family


@pytest.fixture
def as_on_gpus(monkeypatch) -> None:
    """Engines draft by fixed schedules, of which the host reads nothing."""
    monkeypatch.setenv(engines.AS_ON_GPUS, "1")
    monkeypatch.setattr("vllm_hsd.config.platform.read_on_host", lambda: False)
