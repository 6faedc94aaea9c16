"""The grammar of the command line, with a module for each group of commands.

Modules here are fast to import, so that `symphony stat` starts in a tenth of a second. An action imports whatever else
it needs when it runs.
"""
