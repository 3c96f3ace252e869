"""L0: files on disk: written whole, locked, hashed, opened only if they are ordinary ones."""
