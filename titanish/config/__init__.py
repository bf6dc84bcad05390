"""The configuration: its sections, where every value came from, and the rules between them. No torch."""
