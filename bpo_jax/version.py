"""The version, alone in a file so that a build reads it without JAX."""

__version__ = '0.1.0'
