"""The version, read by the build and compared between ranks."""

__all__ = ["__version__"]

__version__ = "0.1.0"
