"""nostall inside other programs: each module is imported by the program that it serves.

dlio    a data loader and a reader of checkpoints for the DLIO benchmark
"""

__all__: list[str] = []
