"""The release of this package, and of others as they are installed."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.2.0"


def installed_version(package: str) -> str | None:
    """Of a distribution; None if it is not installed. This package may run from a folder that is not."""
    if package == "odb_factory":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
