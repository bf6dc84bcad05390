"""Rules between keys, and between the configuration and the model's size, by subject."""
