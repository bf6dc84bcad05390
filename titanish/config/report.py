"""What a check and the start of every run say about a configuration, in a few lines."""

from __future__ import annotations

from titanish.config.load import Loaded


def summary(loaded: Loaded) -> tuple[str, ...]:
    """The world equation, the batch equation and the model's size, as far as they are known."""
    lines = []
    if loaded.world is not None:
        assumed = (
            " (the smallest world that fits; --world-size N checks another)" if loaded.world_assumed else ""
        )
        lines.append(f"{loaded.world}{assumed}")
    if loaded.batch is not None:
        lines.append(str(loaded.batch))
    if loaded.size is not None:
        model = loaded.config.model
        lines.append(f"model {model.name} {model.flavor}: {loaded.size.num_parameters:,} parameters")
    return tuple(lines)


def verdict(loaded: Loaded, name: str) -> str:
    """One line that says whether the file is valid, and whether a run could start with it."""
    stopping = sum(note.level == "start" for note in loaded.notes)
    if not stopping:
        return f"{name}: valid"
    return f"{name}: valid, but {stopping} {'thing' if stopping == 1 else 'things'} above would fail a start"
