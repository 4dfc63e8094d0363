"""The way into the ``octavo`` command, which the package ``octavo`` is too slow to import for."""
