"""`prefixflow import`: rollouts as text to trajectory files. Apart from `trajectories`, which stays
free of tokenizers and what they pull in."""

from prefixflow.importer.importer import (
    Advantage,
    ImportOptions,
    ImportResult,
    Mode,
    add_import_arguments,
    import_trajectories,
    run_import,
)

__all__ = [
    "Advantage",
    "ImportOptions",
    "ImportResult",
    "Mode",
    "add_import_arguments",
    "import_trajectories",
    "run_import",
]
