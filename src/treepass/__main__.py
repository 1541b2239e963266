"""``python -m treepass``."""

from treepass.cli import main

main()
