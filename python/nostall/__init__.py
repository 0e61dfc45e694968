"""Deep-learning training that does not wait."""

__version__ = "0.1.0"
