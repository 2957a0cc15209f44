"""``python -m sordino``."""

from sordino.cli import main

if __name__ == "__main__":
    main()
