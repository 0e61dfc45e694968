"""What every other room may use: sizes and limits of memory, and files that are this user's own.

Nothing here is public.
"""

__all__: list[str] = []
