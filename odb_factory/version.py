"""The release of this package and of installed packages."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.2.0"


def installed_version(package: str) -> str | None:
    """The release of a package; None if it is not installed. This package may run without an installation."""
    if package == "odb_factory":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
