"""``python -m octavo`` is the ``octavo`` command."""

from octavo_command import main

if __name__ == "__main__":
    main()
