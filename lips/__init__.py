"""Programs that ship with Symphony, one file each, written against libsym alone."""
