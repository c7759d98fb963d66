"""`python -m llm`."""

import sys

from llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
