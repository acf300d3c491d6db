"""docs/keys.md and docs/known-faults.md are what their sources say today."""

from tools import key_reference


def test_the_generated_pages_are_not_stale():
    pages = {key_reference.PAGE: key_reference.page}
    pages[key_reference.FAULTS] = key_reference.faults_page
    for path, page in pages.items():
        assert path.read_text() == page(), "write it again: python -m tools.key_reference"
