"""titanish: a PyTorch-native trainer for large language models, configured by one TOML."""

__version__ = "0.1.0"
