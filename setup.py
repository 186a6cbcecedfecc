"""README.md as a package page shows it: such a page has none of the files that its links name.

Everything else is in pyproject.toml. With `Repository` in its [project.urls], links and pictures lead there, else links
become their text and pictures go.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
URLS = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]


def for_package_page(readme: str, repository: str | None) -> str:
    """repository: such as https://github.com/owner/name."""
    pictures, links = r"!\[([^\[\]]*)\]\((?!https?:)([^)]+)\)\n*", r"\[([^\[\]]+)\]\((?!https?:)([^)]+)\)"
    if repository is None:
        return re.sub(links, r"\1", re.sub(pictures, "", readme))
    readme = re.sub(pictures, rf"![\1]({repository}/raw/main/\2)\n\n", readme)
    return re.sub(links, rf"[\1]({repository}/blob/main/\2)", readme)


setup(
    long_description=for_package_page((HERE / "README.md").read_text(encoding="utf-8"), URLS.get("Repository")),
    long_description_content_type="text/markdown",
)
