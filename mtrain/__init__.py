"""mtrain trains a translator from parallel text and leaves a folder that translates."""

__version__ = "0.1.0"
