"""`symphony top`: programs, files, steps and waits on a terminal, again and again. Only here is textual imported."""
