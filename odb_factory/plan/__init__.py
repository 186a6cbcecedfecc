"""A look before training: a sample of the data, observed and planned as a training would, without a model."""

from __future__ import annotations
