"""Benchmarks of nostall and its peers, side by side, and the demo.

Every command prints a table and writes JSON and a plot. The commands are entry points of the group
`nostall.commands` (pyproject.toml): ``nostall bench loader`` is the module of ``bench.loader``.
"""
