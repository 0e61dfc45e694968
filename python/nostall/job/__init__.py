"""The ranks of a job: their numbers, how they find each other, and the streams between nodes.

Nothing here is public.
"""

__all__: list[str] = []
