"""Binaries: thin mains over bpo_jax and environments, configured by flags."""
