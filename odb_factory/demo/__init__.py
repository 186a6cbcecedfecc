"""`odb-factory demo`: its data, its tiny models, its runs."""
