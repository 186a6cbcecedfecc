"""Adapters for other trainers. Import the module for your trainer; its library is an optional extra of odb_factory."""
