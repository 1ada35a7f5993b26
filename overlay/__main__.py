"""`python -m overlay`: the command line."""

from overlay.cli import main

if __name__ == "__main__":
    main()
