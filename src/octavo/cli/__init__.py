"""The ``octavo`` command: one file a command, thin over the library."""
