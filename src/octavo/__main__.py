"""``python -m octavo`` is the ``octavo`` command."""

from octavo.cli.app import main

if __name__ == "__main__":
    main()
