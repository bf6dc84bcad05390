"""Shipped test tools: users verify their own models with the same ones as we do."""
