"""python -m finefit."""

from .cli import main

main()
