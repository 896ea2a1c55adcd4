"""What ranks do in tests of several files, and in tests whose file would be too long with it."""
