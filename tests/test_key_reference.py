"""docs/keys.md is what the classes of the configuration say today."""

from tools import key_reference


def test_the_reference_of_keys_is_not_stale():
    assert key_reference.PAGE.read_text() == key_reference.page(), (
        "write it again: python -m tools.key_reference"
    )
