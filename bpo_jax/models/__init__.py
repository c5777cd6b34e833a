"""Policies: decoder-only transformers behind one `apply` function."""
