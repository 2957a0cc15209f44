"""Commands that are too large for ``cli``, one file each."""
