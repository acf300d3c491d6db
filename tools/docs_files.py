"""Hook of mkdocs: the site has the repository's paths, so links work in both places.

The pages of the navigation are in it, and every file of the repository that one of them links to.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/, whose paths would begin there, with those of the repository."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    found = [path for entry in config.nav for path in entry.values()] + list(config.extra_css)
    for name in found:
        if not name.endswith(".md"):
            continue
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            path = (ROOT / PurePosixPath(name).parent / link).resolve()
            relative = path.relative_to(ROOT).as_posix()
            if path.is_file() and relative not in found:
                found.append(relative)
    own = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in found]
    return Files([*theme, *own])
