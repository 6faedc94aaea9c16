"""`symphony top`: programs, files, steps and waits on a terminal, updated live. Only this package imports textual."""
