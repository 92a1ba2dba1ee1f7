"""Errors that every rank raises alike."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """The run cannot go on; the message is the same sentence on every rank."""
