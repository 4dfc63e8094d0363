"""``python -m octavo`` is the ``octavo`` command."""

from octavo_command.__main__ import main

if __name__ == "__main__":
    main()
