"""`python -m evener`: the same as the command `evener`, for environments without its script."""

from evener.cli import main

if __name__ == "__main__":
    main()
