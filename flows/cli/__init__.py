"""The command line: `alto`. `app` declares the commands; each command's work stands in the module of its name.

Nothing heavy is imported before a command needs it, so that `alto --help` answers at once.
"""
