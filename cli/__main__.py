"""`coterie`, and ``python -m coterie.cli``. Ctrl-C is Ctrl-C even while the rest is still being imported."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from coterie.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
