"""Groups of commands, each registered by ``sordino.cli``. Thin: they parse, call ``study`` and print."""
