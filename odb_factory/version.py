"""The versions of this package and of installed packages."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.2.0"


def installed_version(package: str) -> str | None:
    """The version of a package; None if not installed. odb_factory itself may run without being installed."""
    if package == "odb_factory":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
