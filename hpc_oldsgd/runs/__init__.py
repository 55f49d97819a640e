"""A run as a whole: its folder, its identity, how it is built and resumed."""
