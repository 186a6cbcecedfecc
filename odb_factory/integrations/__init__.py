"""Adapters to other trainers. Each module needs its library, an extra of this package, and is imported by its users."""
