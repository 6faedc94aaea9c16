"""The grammar of the command line: a module for each group of commands, which adds its own and says what they do.

Nothing here is slow to import: `symphony stat` starts in a tenth of a second, so an action brings what it needs itself.
"""
