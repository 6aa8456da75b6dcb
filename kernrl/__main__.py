"""`python -m kernrl`: the command line."""

from kernrl.cli import main

if __name__ == "__main__":
    main()
