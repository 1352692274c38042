"""Units, errors, files, secrets, compiled loops: what every other wing stands on."""
