"""Fixtures of more than one file."""

from keras_kinds import kind

__all__ = ["kind"]
