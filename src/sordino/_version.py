"""The version, alone in a file so that building needs no import of the package."""

__version__ = "0.2.0"
